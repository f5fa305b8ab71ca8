"""Codecs: floating-point values made smaller for the wire, block by block, in place.

    float32     as the center keeps them (float64 stays float64): nothing is lost
    bfloat16    2 bytes: the upper half of a float32, rounded to nearest
    float16     2 bytes: more digits, a smaller range; what is too large becomes the largest
    int8        1 byte, and a float32 scale for each 256 values: v = scale * q, scale = max |v| / 127

What a push loses by it is kept and added to the next one (error feedback), so that it comes late and not never.
"""

from typing import Protocol

import numpy as np

from maniple.contracts import Array
from maniple.errors import InvalidArgument

_BLOCK = 1 << 15  # values; a multiple of the group
_GROUP = 256
_LARGEST_HALF = np.float32(65504)
_NEAR_LARGEST = np.float32(3e38)  # smaller values stay finite when they are rounded to bfloat16


class Codec(Protocol):
    """Values to bytes and back. The bytes may lie in the same memory: packed at its start, unpacked from its end."""

    @property
    def name(self) -> str: ...
    @property
    def is_plain(self) -> bool: ...
    def size_bytes(self, count: int, itemsize: int) -> int: ...
    def pack(self, values: Array, data: Array) -> None: ...
    def unpack(self, data: Array, values: Array) -> None: ...


class _Plain:
    name = "float32"
    is_plain = True

    def size_bytes(self, count: int, itemsize: int) -> int:
        return count * itemsize

    def pack(self, values: Array, data: Array) -> None:
        data[:] = values.view(np.uint8)

    def unpack(self, data: Array, values: Array) -> None:
        values.view(np.uint8)[:] = data


class _Half:
    """Two bytes per value."""

    is_plain = False

    def __init__(self, name: str) -> None:
        self.name = name

    def size_bytes(self, count: int, itemsize: int) -> int:
        del itemsize
        return 2 * count

    def pack(self, values: Array, data: Array) -> None:
        halves = data.view(np.uint16)
        for start in range(0, values.size, _BLOCK):
            block = values[start : start + _BLOCK].astype(np.float32)
            halves[start : start + _BLOCK] = _to_bfloat16(block) if self.name == "bfloat16" else _to_float16(block)

    def unpack(self, data: Array, values: Array) -> None:
        halves = data.view(np.uint16)
        for start in range(0, values.size, _BLOCK):
            block = halves[start : start + _BLOCK].copy()
            if self.name == "bfloat16":
                values[start : start + _BLOCK] = (block.astype(np.uint32) << 16).view(np.float32)
            else:
                values[start : start + _BLOCK] = block.view(np.float16)


class _Int8:
    """One byte per value, and one scale per group: all values first, then all scales."""

    name = "int8"
    is_plain = False

    def size_bytes(self, count: int, itemsize: int) -> int:
        del itemsize
        return count + 4 * -(-count // _GROUP)

    def pack(self, values: Array, data: Array) -> None:
        count = values.size
        scales = np.empty(-(-count // _GROUP), np.float32)
        for start in range(0, count, _BLOCK):
            block = values[start : start + _BLOCK].astype(np.float32)
            groups = _grouped(block)
            with np.errstate(all="ignore"):
                scale = np.abs(groups).max(axis=1) / np.float32(127)
                too_large = np.isfinite(scale) & ~np.isfinite(scale * np.float32(127))
                scale = np.where(too_large, np.nextafter(scale, np.float32(0)), scale)
                rounded = np.rint(groups / np.where(scale > 0, scale, np.float32(1))[:, None])
                np.clip(rounded, -127, 127, out=rounded)
                rounded[~np.isfinite(scale)] = 1  # times what is not finite: refused by the center as what it is
            scales[start // _GROUP : start // _GROUP + scale.size] = scale
            data[start : start + block.size] = rounded.reshape(-1)[: block.size].astype(np.int8).view(np.uint8)
        data[count:] = scales.view(np.uint8)

    def unpack(self, data: Array, values: Array) -> None:
        count = values.size
        scales = data[count:].copy().view(np.float32)
        for start in range(0, count, _BLOCK):
            block = data[start : min(start + _BLOCK, count)].copy().view(np.int8).astype(np.float32)
            groups = _grouped(block)
            with np.errstate(all="ignore"):
                groups = groups * scales[start // _GROUP : start // _GROUP + len(groups), None]
            values[start : start + block.size] = groups.reshape(-1)[: block.size]


CODECS: dict[str, Codec] = {c.name: c for c in (_Plain(), _Half("bfloat16"), _Half("float16"), _Int8())}


def codec(name: str) -> Codec:
    """The codec of that name."""
    try:
        return CODECS[name]
    except KeyError:
        raise InvalidArgument(f"wire={name!r} is no way to send values (one of {', '.join(CODECS)}).") from None


def _is_below(values: Array, limit: np.float32) -> bool:
    """All are numbers smaller than `limit`, as nearly always: what is rare need not be looked for in each value."""
    with np.errstate(invalid="ignore"):
        return bool(np.abs(values).max(initial=0) < limit)


def _to_float16(values: Array) -> Array:
    if _is_below(values, _LARGEST_HALF):
        return values.astype(np.float16).view(np.uint16)
    with np.errstate(invalid="ignore"):
        clipped = np.where(np.isinf(values), values, np.clip(values, -_LARGEST_HALF, _LARGEST_HALF))
    return clipped.astype(np.float16).view(np.uint16)


def _to_bfloat16(values: Array) -> Array:
    bits = values.view(np.uint32)
    if _is_below(values, _NEAR_LARGEST):
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        return rounded.astype(np.uint16)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    finite = np.isfinite(values)
    # What is not finite keeps its upper half; a NaN keeps one bit there, else it would become an infinity.
    other = (bits >> 16) | np.where(np.isnan(values), np.uint32(0x40), np.uint32(0))
    largest = (bits >> 31 << 15) | np.uint32(0x7F7F)
    rounded = np.where(finite & ((rounded & 0x7F80) == 0x7F80), largest, rounded)
    return np.where(finite, rounded, other).astype(np.uint16)


def _grouped(block: Array) -> Array:
    missing = -block.size % _GROUP
    return (np.append(block, np.zeros(missing, block.dtype)) if missing else block).reshape(-1, _GROUP)
