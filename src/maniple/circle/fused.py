"""The sum of several workers' vectors, in place, compiled by numba and cached on disk. Twin of `fold.fold_slice`."""

from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from maniple.contracts import Array

_compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy")


def _values_code(typing: Any, address: Any, like: Any) -> Any:
    """A pointer to what lies at `address`, of the dtype of the array `like`."""
    del typing
    pointer = types.CPointer(like.dtype)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, like), code


def _fence_code(typing: Any) -> Any:
    """Neither compiler nor processor may move a read or write across it."""
    del typing

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature, arguments
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


_array: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]
_values: Any = intrinsic(_values_code)
_fence: Any = intrinsic(_fence_code)


@_compiled
def _fold(addresses: Any, weights: Any, start: Any, stop: Any, block: Any, progress: Any, base: Any) -> None:  # noqa: PLR0917, PLR0912 - compiled code has no keywords, and its branches outside of the loops
    size = block.size
    is_equal = True
    for k in range(1, weights.size):
        is_equal = is_equal and weights[k] == weights[0]
    scale = weights[0]
    for number in range((stop - start + size - 1) // size):
        done = progress[0] - 2 * (base + number)
        if done >= 2:
            continue
        low = start + number * size
        count = min(size, stop - low)
        result = block[:count]
        if done < 1:
            first = _array(_values(addresses[0], block), stop)[low : low + count]
            second = _array(_values(addresses[min(1, addresses.size - 1)], block), stop)[low : low + count]
            if addresses.size == 1:
                for i in range(count):
                    result[i] = scale * first[i]
            elif is_equal and (scale == 1 or addresses.size > 2):
                for i in range(count):
                    result[i] = first[i] + second[i]
            elif is_equal:
                for i in range(count):
                    result[i] = scale * (first[i] + second[i])
            else:
                other = weights[1]
                for i in range(count):
                    result[i] = scale * first[i] + other * second[i]
            for k in range(2, addresses.size):
                more, weight = _array(_values(addresses[k], block), stop)[low : low + count], weights[k]
                if not is_equal:
                    for i in range(count):
                        result[i] += weight * more[i]
                elif k < addresses.size - 1 or scale == 1:
                    for i in range(count):
                        result[i] += more[i]
                else:
                    for i in range(count):
                        result[i] = scale * (result[i] + more[i])
            _fence()
            progress[0] += 1
            _fence()
        for k in range(addresses.size):
            target = _array(_values(addresses[k], block), stop)[low : low + count]
            for i in range(count):
                target[i] = result[i]
        _fence()
        progress[0] += 1
        _fence()


def fold_slice(
    vectors: list[Array], weights: Array, bounds: tuple[int, int], block: Array, progress: Array, *, base: int
) -> None:
    """`x = sum_k w_k x_k` for a part of all vectors, in steps that can be repeated."""
    addresses = np.array([vector.ctypes.data for vector in vectors], np.uint64)
    _fold(addresses, weights, *bounds, block, progress, base)
