"""Gather kernel for rows of arrays larger than the cache, compiled by numba (the extra `fast`) and cached on disk.

An ordinary store first reads the cache line that it writes. For an output larger than the cache that read is wasted: a
third of the memory traffic. Non-temporal stores skip it: 11.8 against 8.7 GB/s for 100 MB of rows on two cores
(benchmarks/pool.py). NumPy and numba offer no such store, so the two instructions are written as LLVM intrinsics.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from maniple.contracts import Array
from maniple.pool.data import LINE
from maniple.rules.kernels.numba_kernels import fence


def take(values: Array, indices: Array) -> Array:
    """`values[indices]` for valid indices of a contiguous array whose rows are whole cache lines."""
    size = values.nbytes // len(values)
    memory = np.empty(size * len(indices) + LINE, np.uint8)
    begin = -memory.ctypes.data % LINE
    rows = memory[begin : begin + size * len(indices)].view(values.dtype).reshape(len(indices), *values.shape[1:])
    _take(np.uintp(rows.ctypes.data), np.uintp(values.ctypes.data), indices, size)
    return rows


def _copy_code(typing: Any, target: Any, source: Any) -> Any:
    """Copy one cache line past the cache; the target address must be aligned to a line."""
    del typing, target, source

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        target, source = arguments
        vector, metadata = ir.VectorType(ir.IntType(64), 8), builder.module.add_metadata([ir.IntType(32)(1)])
        pointer = vector.as_pointer()
        line = builder.load(builder.inttoptr(source, pointer), align=1)
        builder.store(line, builder.inttoptr(target, pointer), align=LINE).set_metadata("nontemporal", metadata)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), code


def _prefetch_code(typing: Any, source: Any) -> Any:
    """Start to load a cache line that is copied soon."""
    del typing, source

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], form)
        address = builder.inttoptr(arguments[0], pointer)
        builder.call(prefetch, [address, number(0), number(0), number(1)])  # for one read; a data cache
        return context.get_dummy_value()

    return types.void(types.uintp), code


_copy_line: Any = intrinsic(_copy_code)
_prefetch_line: Any = intrinsic(_prefetch_code)
_compiled: Any = numba.njit(cache=True, nogil=True)


@_compiled
def _take(target: Any, source: Any, indices: Any, size: Any) -> None:
    for k in range(indices.size):
        to, at = target + np.uintp(k * size), source + np.uintp(indices[k] * size)
        following = source + np.uintp(indices[min(k + 1, indices.size - 1)] * size)
        for offset in range(0, size, LINE):
            _prefetch_line(following + np.uintp(offset))  # the processor cannot predict the next row
            _copy_line(to + np.uintp(offset), at + np.uintp(offset))
    fence()  # other cores may see non-temporal stores late
