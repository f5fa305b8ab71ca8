"""The compiled twin of `quantized`: one pass over memory, group by group, with numba, cached on disk.

Each group is copied before it is converted, so values and bytes may share memory. Loops over a whole group have a fixed
length and elementwise steps, so that they vectorise; the largest magnitude is found by halves, among bits as integers,
where a NaN is larger than infinity.
"""

from typing import Any

import numba
import numpy as np

from maniple.contracts import Array
from maniple.wire.quantized import GROUP, LEVELS, ROOT_2, SMALLEST

_INFINITY = np.int32(0x7F800000)
_ONE, _127 = np.float32(1), np.float32(127)

# No fast maths: every operation is rounded as written, so that the results are bit-equal to those of NumPy.
_compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def _load(  # noqa: PLR0917 - compiled code has no keywords
    values: Any, low: Any, size: Any, group: Any, folded: Any, folded_bits: Any
) -> Any:
    """Copy a group, filled up by zeros; return the bits of its largest magnitude."""
    if size == GROUP:
        for i in range(GROUP):
            group[i] = values[low + i]
    else:
        for i in range(size):
            group[i] = values[low + i]
        for i in range(size, GROUP):
            group[i] = 0
    for i in range(GROUP // 2):
        a, b = np.abs(group[i]), np.abs(group[i + GROUP // 2])
        folded[i] = a
        folded[i + GROUP // 2] = b
    for i in range(128):
        folded_bits[i] = max(folded_bits[i], folded_bits[i + 128])
    for i in range(64):
        folded_bits[i] = max(folded_bits[i], folded_bits[i + 64])
    for i in range(32):
        folded_bits[i] = max(folded_bits[i], folded_bits[i + 32])
    for i in range(16):
        folded_bits[i] = max(folded_bits[i], folded_bits[i + 16])
    largest = folded_bits[0]
    for i in range(1, 16):
        largest = max(largest, folded_bits[i])
    return largest


@_compiled
def _pack_int8(values: Any, data: Any, scales: Any) -> None:
    group, folded = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    folded_bits, whole = folded.view(np.int32), np.empty(GROUP, np.int8)
    scale_bits = scales.view(np.int32)
    for number in range(scales.size):
        low = number * GROUP
        size = min(GROUP, values.size - low)
        largest = _load(values, low, size, group, folded, folded_bits)
        if largest >= _INFINITY:
            scales[number] = np.inf if largest == _INFINITY else np.nan
            for i in range(size):
                data[low + i] = 1
            continue
        scale_bits[number] = largest
        scale = scales[number] / _127
        if not np.isfinite(scale * _127):
            scales[number] = scale
            scale_bits[number] -= 1
            scale = scales[number]
        scales[number] = scale
        divisor = scale if scale > 0 else _ONE
        for i in range(GROUP):
            q = np.rint(group[i] / divisor)
            q = q if q < _127 else _127
            q = q if q > -_127 else -_127
            whole[i] = np.int32(q)
        signed = whole.view(np.uint8)
        if size == GROUP:
            for i in range(GROUP):
                data[low + i] = signed[i]
        else:
            for i in range(size):
                data[low + i] = signed[i]


@_compiled
def _unpack_int8(data: Any, scales: Any, values: Any) -> None:
    whole = np.empty(GROUP, np.int8)
    taken = whole.view(np.uint8)
    for number in range(scales.size):
        low = number * GROUP
        size = min(GROUP, values.size - low)
        scale = scales[number]
        if size == GROUP:
            for i in range(GROUP):
                taken[i] = data[low + i]
            for i in range(GROUP):
                values[low + i] = np.float32(whole[i]) * scale
        else:
            for i in range(size):
                taken[i] = data[low + i]
            for i in range(size):
                values[low + i] = np.float32(whole[i]) * scale


@_compiled
def _pack_int4(values: Any, data: Any, scales: Any) -> None:
    group, folded = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    folded_bits, codes = folded.view(np.int32), np.empty(GROUP, np.uint8)
    group_bits, scale_bits = group.view(np.int32), scales.view(np.int32)
    smallest_bits = np.float32(SMALLEST)
    for number in range(scales.size):
        low = number * GROUP
        size = min(GROUP, values.size - low)
        half, at = (size + 1) // 2, low // 2
        largest = _load(values, low, size, group, folded, folded_bits)
        if largest >= _INFINITY:
            scales[number] = np.inf if largest == _INFINITY else np.nan
            for i in range(half):
                data[at + i] = 0x77
            continue
        scale_bits[number] = largest
        divisor = scales[number] if largest > 0 else _ONE
        for i in range(GROUP):
            folded[i] = np.abs(group[i]) / divisor
        for i in range(GROUP):
            is_sent = folded[i] >= smallest_bits
            folded[i] = folded[i] * ROOT_2
            level = (folded_bits[i] >> np.int32(23)) - np.int32(120)
            level = level if level > np.int32(1) else np.int32(1)
            sign = (group_bits[i] >> np.int32(28)) & np.int32(8)
            codes[i] = level | sign if is_sent else np.int32(0)
        if half == GROUP // 2:
            for i in range(GROUP // 2):
                data[at + i] = codes[i] | (codes[i + GROUP // 2] << np.uint8(4))
        else:
            for i in range(half):
                data[at + i] = codes[i] | (codes[i + half] << np.uint8(4))


@_compiled
def _unpack_int4(data: Any, scales: Any, values: Any) -> None:
    taken, found = np.empty(GROUP // 2, np.uint8), np.empty(16, np.float32)
    for number in range(scales.size):
        low = number * GROUP
        size = min(GROUP, values.size - low)
        half, at = (size + 1) // 2, low // 2
        for level in range(16):
            found[level] = LEVELS[level] * scales[number]
        for i in range(half):
            taken[i] = data[at + i]
        if half == GROUP // 2 and size == GROUP:
            for i in range(GROUP // 2):
                values[low + i] = found[taken[i] & np.uint8(15)]
            for i in range(GROUP // 2):
                values[low + GROUP // 2 + i] = found[taken[i] >> np.uint8(4)]
        else:
            for i in range(half):
                values[low + i] = found[taken[i] & np.uint8(15)]
            for i in range(size - half):
                values[low + half + i] = found[taken[i] >> np.uint8(4)]


def pack_int8(values: Array, data: Array, scales: Array) -> None:
    """As `quantized.pack_int8`."""
    _pack_int8(values, data, scales)


def unpack_int8(data: Array, scales: Array, values: Array) -> None:
    """As `quantized.unpack_int8`."""
    _unpack_int8(data, scales, values)


def pack_int4(values: Array, data: Array, scales: Array) -> None:
    """As `quantized.pack_int4`."""
    _pack_int4(values, data, scales)


def unpack_int4(data: Array, scales: Array, values: Array) -> None:
    """As `quantized.unpack_int4`."""
    _unpack_int4(data, scales, values)
