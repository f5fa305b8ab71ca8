"""The kernels in NumPy, in blocks that stay in cache, without model-sized temporaries. Twin of `fused`."""

import math
from collections.abc import Callable, Iterator

import numpy as np

from maniple.contracts import Array

BLOCK = 1 << 16  # elements: a block of replica, center and scratch together fit the second-level cache

_QUIET = np.errstate(all="ignore")  # what is not finite is looked for, not warned of

Mix = Callable[[Array, Array, Array | None], tuple[Array, Array]]


@_QUIET
def elastic(x: Array, c: Array, alpha_center: float, alpha_worker: float) -> bool:
    """`d = x - c; x -= alpha_worker d; c += alpha_center d`."""
    clean = True
    real = x.dtype.type
    scratch = np.empty(min(BLOCK, x.size), x.dtype)
    for a, b, _ in _blocks(x, c, None):
        d = scratch[: a.size]
        np.subtract(a, b, out=d)
        if not _all_finite(d):
            clean = False
            bad = ~np.isfinite(d)
            np.copyto(a, b, where=bad)
            d[bad] = 0
        if alpha_worker == alpha_center:
            d *= real(alpha_worker)
            a -= d
            b += d
        else:
            a -= real(alpha_worker) * d
            d *= real(alpha_center)
            b += d
    return clean


@_QUIET
def blend(x: Array, c: Array, alpha: float, beta: float) -> bool:
    """`c = alpha c + beta x; x = c`."""
    clean = True
    real = x.dtype.type
    scratch = np.empty(min(BLOCK, x.size), x.dtype)
    for a, b, _ in _blocks(x, c, None):
        new = scratch[: a.size]
        np.multiply(b, real(alpha), out=new)
        a *= real(beta)
        new += a
        clean &= _commit(new, b)
        a[:] = b
    return clean


@_QUIET
def difference(x: Array, c: Array, old: Array, scale: float) -> bool:
    """`c += scale (x - old); x = c; old = c`."""
    clean = True
    real = x.dtype.type
    for a, b, o in _blocks(x, c, old):
        assert o is not None
        np.subtract(a, o, out=o)
        o *= real(scale)
        o += b
        clean &= _commit(o, b)
        a[:] = b
        o[:] = b
    return clean


@_QUIET
def mixed(x: Array, c: Array, memory: Array | None, mix: Mix) -> bool:
    """Apply `new_x, new_c = mix(x, c, memory)` block by block."""
    clean = True
    for a, b, m in _blocks(x, c, memory):
        new_x, new_c = mix(a, b, m)
        if _all_finite(new_c):
            # The new replica is written first: `mix` may hand back its argument `b` as the new center.
            a[:], b[:] = np.array(new_x, copy=True), new_c
        else:
            clean = False
            finite = np.isfinite(new_c)
            kept = np.where(finite, new_c, b)
            a[:] = np.where(finite, new_x, b)
            b[:] = kept
    return clean


def _blocks(x: Array, c: Array, memory: Array | None) -> Iterator[tuple[Array, Array, Array | None]]:
    for start in range(0, x.size, BLOCK):
        part = slice(start, start + BLOCK)
        yield x[part], c[part], None if memory is None else memory[part]


def _all_finite(values: Array) -> bool:
    # The sum is one fast pass and settles almost every case; it may overflow though all terms are finite.
    return math.isfinite(values.sum()) or bool(np.isfinite(values).all())


def _commit(new: Array, c: Array) -> bool:
    """Write the finite values of `new` to the center."""
    if _all_finite(new):
        c[:] = new
        return True
    np.copyto(c, new, where=np.isfinite(new))
    return False
