"""Codecs: compression of floating-point values for the wire (`--wire`).

    float32     no compression: values as the center keeps them (float64 stays float64)
    bfloat16    2 bytes: the upper half of a float32, rounded to nearest
    float16     2 bytes: 3 more bits of precision, a smaller range; larger values become the largest
    int8        1.016 bytes: an integer, and one float32 scale per 256 values (`quantized`)
    int4        0.516 bytes: sign and exponent, and one float32 scale per 256 values; for changes only
    topk        0.029 bytes: the 64 largest of 4096 values, in 2 bits each (`topk`); for changes only

A sender keeps what rounding loses and adds it to its next message (error feedback, `center/contributions` and
`collectives/error_feedback`). 4 bits of a weight are useless, while those of a change, with what later changes correct,
train as well: where int4 or topk is chosen, values travel as `for_values` says.
"""

import functools
from typing import Any

import numpy as np

from maniple.compiled import LARGE_BYTES, SMALL_DELAY_S, compiled, load_in_background, loading
from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.wire import quantized, topk

_BLOCK = 1 << 15  # values converted at once, so that temporaries stay in the cache
_MAX_FLOAT16 = np.float32(65504)
_SAFE_BFLOAT16 = np.float32(3e38)  # smaller values stay finite when they are rounded to bfloat16


class Codec:
    """Converts values to bytes and back; this one changes nothing.

    Both may share memory: `pack` may write to the start of the values' memory, `unpack` may read from its end.

    Attributes:
        for_values: the name of the codec for values where this one is chosen: of the center's parameters in a reply.
        is_for_changes: it is too coarse for values, and carries only changes.
        is_sparse: most values decode to 0.
        keeps_errors: it is so coarse that collectives keep its errors too; half precision only rounds there.
    """

    def __init__(self, name: str, *, for_values: str | None = None) -> None:
        self.name = name
        self.for_values = for_values or name
        self.is_plain = type(self) is Codec
        self.is_for_changes = self.for_values != name
        self.is_sparse = isinstance(self, _TopK)
        self.keeps_errors = isinstance(self, _Quantized | _TopK)

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


class _Quantized(Codec):
    """Small integers and one scale per group: all integers first, then all scales (`quantized`)."""

    def __init__(self, name: str, *, bits: int, for_values: str | None = None) -> None:
        super().__init__(name, for_values=for_values)
        self._bits = bits

    def size_bytes(self, count: int, itemsize: int) -> int:
        del itemsize
        return -(-count * self._bits // 8) + 4 * -(-count // quantized.GROUP)

    def pack(self, values: Array, data: Array) -> None:
        scales = np.empty(-(-values.size // quantized.GROUP), np.float32)
        end = data.size - scales.nbytes
        (_active.pack_int8 if self._bits == 8 else _active.pack_int4)(values, data[:end], scales)
        data[end:] = scales.view(np.uint8)

    def unpack(self, data: Array, values: Array) -> None:
        end = data.size - 4 * -(-values.size // quantized.GROUP)
        scales = data[end:].copy().view(np.float32)
        (_active.unpack_int8 if self._bits == 8 else _active.unpack_int4)(data[:end], scales, values)


class _TopK(Codec):
    """The largest values of each chunk (`topk`)."""

    def size_bytes(self, count: int, itemsize: int) -> int:
        del itemsize
        return topk.size_bytes(count)

    def pack(self, values: Array, data: Array) -> None:
        topk.pack(values, data)

    def unpack(self, data: Array, values: Array) -> None:
        topk.unpack(data, values)


_active: Any = quantized  # the kernels in use
CODECS = {
    c.name: c
    for c in (
        Codec("float32"),
        _Half("bfloat16"),
        _Half("float16"),
        _Quantized("int8", bits=8),
        _Quantized("int4", bits=4, for_values="bfloat16"),
        _TopK("topk", for_values="bfloat16"),
    )
}


def get_codec(name: str) -> Codec:
    """Return the codec with this name, or raise InvalidArgument."""
    try:
        return CODECS[name]
    except KeyError:
        raise InvalidArgument(f"wire={name!r} is not a codec. Use one of {', '.join(CODECS)}.") from None


def load_kernels() -> None:
    """Load the compiled kernels now, which numba has compiled and cached, or compiles. Until then NumPy's serve."""
    global _active  # noqa: PLW0603 - there is one set of kernels in a process
    with loading:
        kernels = compiled("maniple.wire.quantized_compiled")
        if kernels is None or _active is kernels:
            return
        for dtype in (np.float32, np.float64):
            values, data, scales = np.zeros(1, dtype), np.zeros(1, np.uint8), np.zeros(1, np.float32)
            kernels.pack_int8(values, data, scales)
            kernels.unpack_int8(data, scales, values)
            kernels.pack_int4(values, data, scales)
            kernels.unpack_int4(data, scales, values)
        _active = kernels


def load_kernels_in_background(wire: str, *, size_bytes: int = LARGE_BYTES) -> None:
    """Do what `load_kernels` does in a background thread, if `wire` needs them; for a small model later.

    The rules' kernels have the same delay (`rules.kernels.warm_up_in_background`).
    """
    if isinstance(get_codec(wire), _Quantized) and _active is quantized:
        delay_s = 0.0 if size_bytes >= LARGE_BYTES else SMALL_DELAY_S
        _load_once(delay_s)


@functools.cache
def _load_once(delay_s: float) -> None:
    load_in_background(load_kernels, name="maniple-codecs", delay_s=delay_s)


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
