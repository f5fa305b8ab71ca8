"""Codecs: compression of floating-point values for the wire (`--wire`).

    float32     no compression: values as the center keeps them (float64 stays float64)
    bfloat16    2 bytes: the upper half of a float32, rounded to nearest
    float16     2 bytes: 3 more bits of precision, a smaller range; larger values become the largest
    int8        1 byte: quantized with one float32 scale per 256 values, v = scale * q, scale = max |v| / 127

A sender keeps what rounding loses and adds it to its next message (error feedback, `center/contributions`).
"""

import numpy as np

from maniple.contracts import Array
from maniple.errors import InvalidArgument

_BLOCK = 1 << 15  # values converted at once, so that temporaries stay in the cache; a multiple of _GROUP
_GROUP = 256  # values per scale of int8: the scales add 1.6 %
_MAX_FLOAT16 = np.float32(65504)
_SAFE_BFLOAT16 = np.float32(3e38)  # smaller values stay finite when they are rounded to bfloat16


class Codec:
    """Converts values to bytes and back; this one changes nothing.

    Both may share memory: `pack` may write to the start of the values' memory, `unpack` may read from its end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_plain = type(self) is Codec

    def size_bytes(self, count: int, itemsize: int) -> int:
        """The bytes of `count` values, whose dtype has `itemsize`."""
        return count * itemsize

    def pack(self, values: Array, data: Array) -> None:
        """Convert values to bytes."""
        data[:] = values.view(np.uint8)

    def unpack(self, data: Array, values: Array) -> None:
        """Convert bytes to values."""
        values.view(np.uint8)[:] = data


class _Half(Codec):
    """2 bytes per value: bfloat16 or float16."""

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


class _Int8(Codec):
    """1 byte per value and one scale per group: all values first, then all scales."""

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
                rounded[~np.isfinite(scale)] = 1  # decodes to the non-finite scale, which the center refuses
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


CODECS = {c.name: c for c in (Codec("float32"), _Half("bfloat16"), _Half("float16"), _Int8("int8"))}


def get_codec(name: str) -> Codec:
    """Return the codec with this name, or raise InvalidArgument."""
    try:
        return CODECS[name]
    except KeyError:
        raise InvalidArgument(f"wire={name!r} is not a codec. Use one of {', '.join(CODECS)}.") from None


def _is_below(values: Array, limit: np.float32) -> bool:
    """Whether all values are numbers smaller than `limit`: the usual case, in which no value needs special care."""
    with np.errstate(invalid="ignore"):
        return bool(np.abs(values).max(initial=0) < limit)


def _to_float16(values: Array) -> Array:
    if _is_below(values, _MAX_FLOAT16):
        return values.astype(np.float16).view(np.uint16)
    with np.errstate(invalid="ignore"):
        clipped = np.where(np.isinf(values), values, np.clip(values, -_MAX_FLOAT16, _MAX_FLOAT16))
    return clipped.astype(np.float16).view(np.uint16)


def _to_bfloat16(values: Array) -> Array:
    bits = values.view(np.uint32)
    if _is_below(values, _SAFE_BFLOAT16):
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        return rounded.astype(np.uint16)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    finite = np.isfinite(values)
    # Non-finite values keep their upper half. A NaN gets a bit there, or it could become an infinity.
    other = (bits >> 16) | np.where(np.isnan(values), np.uint32(0x40), np.uint32(0))
    largest = (bits >> 31 << 15) | np.uint32(0x7F7F)
    rounded = np.where(finite & ((rounded & 0x7F80) == 0x7F80), largest, rounded)
    return np.where(finite, rounded, other).astype(np.uint16)


def _grouped(block: Array) -> Array:
    missing = -block.size % _GROUP
    return (np.append(block, np.zeros(missing, block.dtype)) if missing else block).reshape(-1, _GROUP)
