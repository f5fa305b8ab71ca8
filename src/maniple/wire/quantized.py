"""Values as small integers with one float32 scale per group of 256: the kernels of int8 and int4, in NumPy.

    int8    v = scale * q,  q = -127 .. 127,  scale = max |v| / 127; nearest
    int4    E3M0: v = 0 or +- scale * 2^(L - 7),  L = 1 .. 7,  scale = max |v|; nearest by the logarithm, and 0 below
            2^-7 of the scale, the middle between 0 and the smallest level

Level L of int4 has the values from 2^(L - 7.5) to 2^(L - 6.5) of the scale. A byte holds the sign (bit 3) and level of
value j in its lower half and those of value j + n / 2 in its upper one, for a group of n values (n odd: of n + 1).
Douillard et al.: Streaming DiLoCo with overlapping communication (arXiv:2501.18512) send outer gradients in E3M0.

A group with a value that is not finite gets a scale that is not finite, and so become all of its values.
`quantized_compiled` is the compiled twin, equal to the bit. Packed values may overlap the start of the values' memory,
and packed ones may be unpacked towards their own start: both work from block to block.
"""

import numpy as np

from maniple.contracts import Array

GROUP = 256  # values per scale: 1.6 % more bytes for int8, 3 % for int4
SMALLEST = np.float32(2.0**-7)  # of the scale: smaller values become 0 in int4
ROOT_2 = np.float32(2.0**0.5)  # rounds by the logarithm: the exponent of r * sqrt(2) is log2(r), rounded to nearest
LEVELS = np.array([s * (2.0 ** (level - 7) if level else 0) for s in (1, -1) for level in range(8)], np.float32)
_BLOCK = 1 << 15  # values converted at once, so that temporaries stay in the cache; a multiple of GROUP
_INFINITY = 0x7F800000  # its bits; those of a NaN are larger


def pack_int8(values: Array, data: Array, scales: Array) -> None:
    """Set the bytes `data` and the scales, one per group, from `values`."""
    for start in range(0, values.size, _BLOCK):
        groups = _grouped(values[start : start + _BLOCK].astype(np.float32))
        count = min(_BLOCK, values.size - start)
        with np.errstate(all="ignore"):
            largest, is_finite = _largest(groups)
            scale = np.where(is_finite, largest / np.float32(127), largest)
            too_large = is_finite & ~np.isfinite(scale * np.float32(127))
            scale = np.where(too_large, np.nextafter(scale, np.float32(0)), scale)
            rounded = np.rint(groups / np.where(scale > 0, scale, np.float32(1))[:, None])
            np.clip(rounded, -127, 127, out=rounded)
            rounded[~is_finite] = 1  # decodes to the scale, which the receiver refuses
        scales[start // GROUP : start // GROUP + scale.size] = scale
        data[start : start + count] = rounded.reshape(-1)[:count].astype(np.int8).view(np.uint8)


def unpack_int8(data: Array, scales: Array, values: Array) -> None:
    """Set `values` from the bytes and scales."""
    for start in range(0, values.size, _BLOCK):
        groups = _grouped(data[start : min(start + _BLOCK, values.size)].view(np.int8).astype(np.float32))
        with np.errstate(all="ignore"):
            groups *= scales[start // GROUP : start // GROUP + len(groups), None]
        count = min(_BLOCK, values.size - start)
        values[start : start + count] = groups.reshape(-1)[:count]


def pack_int4(values: Array, data: Array, scales: Array) -> None:
    """Set the bytes `data`, two values each, and the scales, one per group, from `values`."""
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK].astype(np.float32)
        for low, groups in _equal_groups(block):
            with np.errstate(all="ignore"):
                scale, is_finite = _largest(groups)
                share = np.abs(groups) / np.where(scale > 0, scale, np.float32(1))[:, None]
                level = ((share * ROOT_2).view(np.int32) >> 23) - 120
                np.maximum(level, share >= SMALLEST, out=level)
                codes = np.where(level > 0, level | (np.signbit(groups) << 3), 0).astype(np.uint8)
                codes[~is_finite] = 7  # decodes to the scale, which the receiver refuses
            half = groups.shape[1] // 2
            first = (start + low) // GROUP
            scales[first : first + scale.size] = scale
            packed = (codes[:, :half] | (codes[:, half:] << 4)).reshape(-1)
            data[(start + low) // 2 : (start + low) // 2 + packed.size] = packed


def unpack_int4(data: Array, scales: Array, values: Array) -> None:
    """Set `values` from the bytes and scales."""
    for start in range(0, values.size, _BLOCK):
        count = min(_BLOCK, values.size - start)
        block = data[start // 2 : start // 2 + (count + 1) // 2].copy()
        whole = count // GROUP * GROUP
        for low, size, group in ((0, whole, GROUP), (whole, count - whole, count - whole)):
            if not size:
                continue
            half = (group + 1) // 2
            halves = block[low // 2 : low // 2 + (size + 1) // 2].reshape(-1, half)
            codes = np.concatenate([halves & 15, halves >> 4], axis=1)[:, :group]
            first = (start + low) // GROUP
            with np.errstate(all="ignore"):
                found = LEVELS[codes] * scales[first : first + len(codes), None]
            values[start + low : start + low + size] = found.reshape(-1)


def _largest(groups: Array) -> tuple[Array, Array]:
    """The largest magnitude of each group, and whether all of its values are finite; else it is infinity or NaN."""
    bits = (groups.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=1)
    largest = np.where(bits > _INFINITY, np.float32(np.nan), bits.view(np.float32))
    return largest, bits < _INFINITY


def _grouped(block: Array) -> Array:
    """As groups of 256 values, of which zeros fill the last."""
    missing = -block.size % GROUP
    return (np.append(block, np.zeros(missing, block.dtype)) if missing else block).reshape(-1, GROUP)


def _equal_groups(block: Array) -> list[tuple[int, Array]]:
    """The groups of 256 values, and the last one if it is smaller, of an even number of values: where each begins."""
    whole = block.size // GROUP * GROUP
    found = [(0, block[:whole].reshape(-1, GROUP))] if whole else []
    if rest := block.size - whole:
        found.append((whole, np.append(block[whole:], np.zeros(rest % 2, block.dtype)).reshape(1, -1)))
    return found
