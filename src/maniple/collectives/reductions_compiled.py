"""The compiled twin of `reductions.SlicePart.combine`: sums and means, with numba, cached on disk."""

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from maniple.contracts import Array
from maniple.rules.kernels.numba_kernels import fence

_compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy")


def _values_code(typing: Any, address: Any, like: Any) -> Any:
    """A pointer to what lies at `address`, of the dtype of the array `like`."""
    del typing
    pointer = types.CPointer(like.dtype)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, like), code


_array: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]
_values: Any = intrinsic(_values_code)


@_compiled
def _combine(  # noqa: PLR0912, PLR0917 - compiled code has its branches outside of the loops, and no keywords
    sources: Any, weights: Any, total: Any, targets: Any, start: Any, stop: Any, block: Any, progress: Any, base: Any
) -> None:
    size = block.size
    is_weighted = False
    for k in range(weights.size):
        is_weighted = is_weighted or weights[k] != 1
    for number in range((stop - start + size - 1) // size):
        done = progress[0] - 2 * (base + number)
        if done >= 2:
            continue
        low = start + number * size
        count = min(size, stop - low)
        result = block[:count]
        if done < 1:
            first = _array(_values(sources[0], block), stop)[low : low + count]
            if sources.size == 1:
                for i in range(count):
                    result[i] = first[i]
            elif is_weighted:
                second, w, v = _array(_values(sources[1], block), stop)[low : low + count], weights[0], weights[1]
                for i in range(count):
                    result[i] = w * first[i] + v * second[i]
            else:
                second = _array(_values(sources[1], block), stop)[low : low + count]
                for i in range(count):
                    result[i] = first[i] + second[i]
            for k in range(2, sources.size):
                more, w = _array(_values(sources[k], block), stop)[low : low + count], weights[k]
                if is_weighted:
                    for i in range(count):
                        result[i] += w * more[i]
                else:
                    for i in range(count):
                        result[i] += more[i]
            if total != 1:
                for i in range(count):
                    result[i] /= total
            fence()
            progress[0] += 1
            fence()
        for k in range(targets.size):
            target = _array(_values(targets[k], block), stop)[low : low + count]
            for i in range(count):
                target[i] = result[i]
        fence()
        progress[0] += 1
        fence()


def combine_slice(
    addresses: Array,
    weights: Sequence[float],
    total: float,
    span: tuple[int, int],
    *,
    block: Array,
    progress: Array,
    base: int,
) -> None:
    """`x = sum_k w_k x_k / total` for a part of the vectors at these addresses, in steps that can be repeated."""
    counted, sources = np.array(weights, block.dtype), addresses
    if not all(weights):
        counted, sources = counted[counted != 0], addresses[counted != 0]
    _combine(sources, counted, block.dtype.type(total), addresses, *span, block, progress, base)
