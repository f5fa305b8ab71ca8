"""Rows of a large array, taken past the caches: compiled by numba (the extra `fast`) and cached on disk.

An ordinary store reads the line that it writes into the cache first. What is larger than the cache gains nothing by
that, and a third of the traffic on the memory bus is for nothing; non-temporal stores write lines as they are.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from maniple.contracts import Array
from maniple.pool.box import LINE
from maniple.rules.fused import fence

_compiled: Any = numba.njit(cache=True, nogil=True)


def _copy_code(typing: Any, target: Any, source: Any) -> Any:
    """Copy one line from one address to another; the target is a multiple of it."""
    del typing, target, source

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        target, source = arguments
        vector, is_streaming = ir.VectorType(ir.IntType(64), 8), builder.module.add_metadata([ir.IntType(32)(1)])
        pointer = vector.as_pointer()
        line = builder.load(builder.inttoptr(source, pointer), align=1)
        builder.store(line, builder.inttoptr(target, pointer), align=LINE).set_metadata("nontemporal", is_streaming)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), code


def _fetch_code(typing: Any, source: Any) -> Any:
    """Have a line on its way to the cache, for a copy that follows soon."""
    del typing, source

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], form)
        builder.call(fetch, [builder.inttoptr(arguments[0], pointer), number(0), number(0), number(1)])  # once, to read
        return context.get_dummy_value()

    return types.void(types.uintp), code


_copy_line: Any = intrinsic(_copy_code)
_fetch_line: Any = intrinsic(_fetch_code)


@_compiled
def _take(target: Any, source: Any, indices: Any, size: Any) -> None:
    for k in range(indices.size):
        to, at = target + np.uintp(k * size), source + np.uintp(indices[k] * size)
        following = source + np.uintp(indices[min(k + 1, indices.size - 1)] * size)
        for offset in range(0, size, LINE):
            _fetch_line(following + np.uintp(offset))  # the processor cannot guess which row is next
            _copy_line(to + np.uintp(offset), at + np.uintp(offset))
    fence()  # such stores may be seen late by others


def take(values: Array, indices: Array) -> Array:
    """`values[indices]`, for indices of rows that are there, of a contiguous array whose rows are whole lines."""
    size = values.nbytes // len(values)
    memory = np.empty(size * len(indices) + LINE, np.uint8)
    begin = -memory.ctypes.data % LINE
    made = memory[begin : begin + size * len(indices)].view(values.dtype).reshape(len(indices), *values.shape[1:])
    _take(np.uintp(made.ctypes.data), np.uintp(values.ctypes.data), indices, size)
    return made
