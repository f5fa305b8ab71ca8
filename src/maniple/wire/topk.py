"""The largest values of each chunk of 4096, as 12-bit positions and 2-bit values: the codec topk.

Of a chunk, the 64 values of largest magnitude are sent (ties: those that come first), of a shorter last chunk of n
values ceil(64 n / 4096); the others decode to 0. A sent value is a sign and one of two levels, the means of the larger
and the smaller magnitudes. The division into larger and smaller ones is that of least squared error (2-means).
SparseLoCo (arXiv:2508.15706) sends as many of equally many, in the same number of bits.

    positions   12 bits each, two in 3 bytes      of all chunks
    values      2 bits each: sign (bit 1), level  of all chunks
    levels      two float32: smaller, larger      of each chunk

A chunk with a value that is not finite gets levels that are not finite, and so become all of its values.
"""

import numpy as np

from maniple.contracts import Array

CHUNK = 4096
KEPT = 64  # of each chunk
_ROWS = 8  # chunks at once, so that temporaries stay in the cache
_INFINITY = 0x7F800000  # its bits; those of a NaN are larger


def size_bytes(count: int) -> int:
    """The bytes of `count` values: 120 for 4096."""
    kept = _kept(count)
    return _positions_bytes(kept) + -(-kept // 4) + 8 * -(-count // CHUNK)


def pack(values: Array, data: Array) -> None:
    """Convert values to bytes."""
    kept, whole = _kept(values.size), values.size // CHUNK * CHUNK
    positions, codes = np.zeros(kept + kept % 2, np.uint16), np.zeros(kept + -kept % 4, np.uint8)
    levels, picked = np.empty((-(-values.size // CHUNK), 2), np.float32), np.empty(kept, np.float32)
    most = np.empty(len(levels), np.uint32)  # the bits of the largest magnitude of each chunk
    for start in range(0, whole, _ROWS * CHUNK):
        rows = values[start : min(start + _ROWS * CHUNK, whole)].astype(np.float32).reshape(-1, CHUNK)
        first = start // CHUNK
        sent = slice(KEPT * first, KEPT * (first + len(rows)))
        positions[sent], picked[sent], most[first : first + len(rows)] = _pick(rows, KEPT)
    end = KEPT * (whole // CHUNK)
    codes[:end], levels[: whole // CHUNK] = _quantize(picked[:end].reshape(-1, KEPT), most[: whole // CHUNK])
    if whole < values.size:
        rest = values[whole:].astype(np.float32).reshape(1, -1)
        positions[end:kept], picked[end:], most[-1:] = _pick(rest, kept - end)
        codes[end:kept], levels[-1:] = _quantize(picked[end:].reshape(1, -1), most[-1:])
    pairs = positions.reshape(-1, 2)
    triples = np.empty((len(pairs), 3), np.uint8)
    triples[:, 0] = pairs[:, 0] & 0xFF
    triples[:, 1] = (pairs[:, 0] >> 8) | ((pairs[:, 1] & 0xF) << 4)
    triples[:, 2] = pairs[:, 1] >> 4
    fours = codes.reshape(-1, 4)
    quads = fours[:, 0] | (fours[:, 1] << 2) | (fours[:, 2] << 4) | (fours[:, 3] << 6)
    end = _positions_bytes(kept)
    data[:end] = triples.reshape(-1)[:end]
    data[end : end + quads.size] = quads
    data[end + quads.size :] = levels.reshape(-1).view(np.uint8)


def unpack(data: Array, values: Array) -> None:
    """Convert bytes to values."""
    data = data.copy()
    kept, count = _kept(values.size), values.size
    end = _positions_bytes(kept)
    triples = np.append(data[:end], np.zeros(-end % 3, np.uint8)).reshape(-1, 3).astype(np.uint16)
    positions = np.empty((len(triples), 2), np.intp)
    positions[:, 0] = triples[:, 0] | ((triples[:, 1] & 0xF) << 8)
    positions[:, 1] = (triples[:, 1] >> 4) | (triples[:, 2] << 4)
    quads = data[end : end + -(-kept // 4), None]
    codes = ((quads >> np.array([0, 2, 4, 6], np.uint8)) & 3).reshape(-1)[:kept]
    levels = data[end + quads.size :].view(np.float32).reshape(-1, 2)
    chunks = np.arange(kept) // KEPT
    found = levels[chunks, codes & 1]
    np.negative(found, out=found, where=codes >= 2)
    places = positions.reshape(-1)[:kept] + chunks * CHUNK
    is_inside = places < count  # else a sender has not followed the format
    values[:] = 0
    values[places[is_inside]] = found[is_inside]
    for chunk in np.nonzero(~np.isfinite(levels).all(axis=1))[0]:
        low, high = levels[chunk]
        values[CHUNK * chunk : CHUNK * (chunk + 1)] = low if not np.isfinite(low) else high


def _kept(count: int) -> int:
    """How many of `count` values are sent."""
    return KEPT * (count // CHUNK) + -(-KEPT * (count % CHUNK) // CHUNK)


def _positions_bytes(kept: int) -> int:
    return -(-12 * kept // 8)


def _pick(rows: Array, kept: int) -> tuple[Array, Array, Array]:
    """The positions of the largest of each row, in order, their values, and the bits of the rows' largest magnitudes.

    Magnitudes are compared as integers, where a NaN is larger than infinity. Of equal ones, the first are taken.
    """
    bits, size = rows.view(np.uint32) & np.uint32(0x7FFFFFFF), rows.shape[1]
    least = np.partition(bits, size - kept, axis=1)[:, size - kept, None]
    is_sent = bits >= least
    places = np.flatnonzero(is_sent)
    if places.size > kept * len(rows):
        is_equal = bits == least
        is_sent &= ~is_equal
        missing = kept - is_sent.sum(axis=1, keepdims=True)
        is_sent |= is_equal & (np.cumsum(is_equal, axis=1, dtype=np.int32) <= missing)
        places = np.flatnonzero(is_sent)
    return places % size, rows.reshape(-1)[places], bits.max(axis=1)


def _quantize(picked: Array, most: Array) -> tuple[Array, Array]:
    """The codes of the values that are sent, a row of each chunk, and the chunks' levels."""
    kept = picked.shape[1]
    magnitudes = np.abs(picked)
    order = np.argsort(~magnitudes.view(np.uint32), axis=1, kind="stable")  # the largest first
    count = np.arange(1, kept + 1)
    with np.errstate(all="ignore"):
        sums = np.cumsum(np.take_along_axis(magnitudes, order, axis=1), axis=1, dtype=np.float64)
        rest = sums[:, -1:] - sums
        larger = np.argmax(sums * sums / count + rest * rest / np.maximum(kept - count, 1), axis=1)[:, None]
        low = np.take_along_axis(rest, larger, axis=1) / np.maximum(kept - 1 - larger, 1)
        high = np.take_along_axis(sums, larger, axis=1) / (larger + 1)
        levels = np.concatenate([low, high], axis=1).astype(np.float32)
    levels[most == _INFINITY] = np.inf
    levels[most > _INFINITY] = np.nan
    codes = np.empty(picked.shape, np.uint8)
    np.put_along_axis(codes, order, (np.arange(kept) <= larger).astype(np.uint8), axis=1)
    codes |= np.signbit(picked).astype(np.uint8) << 1
    return codes.reshape(-1), levels
