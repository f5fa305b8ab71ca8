"""Kernels in NumPy, in blocks that stay in cache, without temporaries of the model's size."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from maniple.contracts import Array

BLOCK = 1 << 16  # elements: small enough for the cache, large enough that NumPy's cost per call does not count

ELASTIC, BLEND, REPLACE = range(3)  # operations of `staged`
NOTHING, VALUE, MOVE = range(3)  # what `staged` writes over the worker's value

_QUIET = np.errstate(all="ignore")  # non-finite values are checked for explicitly

Mix = Callable[[Array, Array, Array | None], tuple[Array, Array]]


@_QUIET
def elastic(x: Array, c: Array, alpha_center: float, alpha_worker: float) -> bool:
    """`d = x - c; x -= alpha_worker d; c += alpha_center d`."""
    clean = True
    center, worker = x.dtype.type(alpha_center), x.dtype.type(alpha_worker)
    scratch = np.empty(min(BLOCK, x.size), x.dtype)
    for a, b, _ in _blocks(x, c, None):
        d = scratch[: a.size]
        np.subtract(a, b, out=d)
        if not _all_finite(d):
            clean = False
            finite = np.isfinite(d)
            np.copyto(a, np.where(finite, a - worker * d, b))
            np.add(b, center * d, out=b, where=finite)
        elif center == worker:
            d *= worker
            a -= d
            b += d
        else:
            a -= worker * d
            d *= center
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
    """`c += scale (x - old); x = c; old = c`, as `c = x + (c - old)` for a scale of 1: exact if no one else wrote."""
    clean = True
    for a, b, o in _blocks(x, c, old):
        assert o is not None
        if scale == 1:
            np.subtract(b, o, out=o)
            o += a
        else:
            np.subtract(a, o, out=o)
            o *= x.dtype.type(scale)
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
        # Copies in the center's dtype: `mix` may return its own arguments, or values of a wider dtype.
        new_x, new_c = (np.array(value, x.dtype, copy=True) for value in mix(a, b, m))
        finite = np.isfinite(new_c)
        if finite.all():
            a[:], b[:] = new_x, new_c
        else:
            clean = False
            a[:] = np.where(finite, new_x, b)
            np.copyto(b, new_c, where=finite)
    return clean


@_QUIET
def staged(x: Array, c: Array, block: Array, progress: Any, *, operation: int, a: float, b: float, answer: int) -> bool:
    """ELASTIC (center a, worker b), BLEND (weights a, b) or REPLACE, in steps that can each be repeated.

    `progress[0]` is 2 k when block k is next, and 2 k + 1 while its new center values, complete in `block`, are copied
    to `c`. After a kill at any instant the same call continues from there. `answer` says what is written to `x`:
    NOTHING, the replica's new VALUE, or its MOVE (the new value minus the old one).
    """
    clean = True
    for start in range(progress[0] // 2 * block.size, c.size, block.size):
        part = slice(start, start + block.size)
        old_x, old_c = x[part], c[part]
        new_x, new_c = old_x.copy(), block[: old_c.size]
        if progress[0] % 2 == 0:
            new_c[:] = old_x if operation == REPLACE else old_c
            if operation == ELASTIC:
                clean &= elastic(new_x, new_c, a, b)
            elif operation == REPLACE:
                pass
            elif x.dtype.kind == "f":
                clean &= blend(new_x, new_c, a, b)
            else:
                clean &= weigh(new_x, new_c, a, b)
            progress[0] += 1
        old_c[:] = new_c
        if answer == VALUE:
            old_x[:] = new_x
        elif answer == MOVE:
            np.subtract(new_x, old_x, out=old_x)
        progress[0] += 1
    return clean


@_QUIET
def weigh(x: Array, c: Array, alpha: Any, beta: Any) -> bool:
    """`c = alpha c + beta x; x = c` for any dtype; integers wrap around as in NumPy."""
    alpha, beta = np.asarray(alpha).astype(c.dtype), np.asarray(beta).astype(c.dtype)
    if c.dtype.kind in "iu":
        np.multiply(c, alpha, out=c)
        np.multiply(x, beta, out=x)
        c += x
        x[:] = c
        return True
    new = c * alpha + x * beta
    finite = np.isfinite(new)
    np.copyto(c, new, where=finite)
    x[:] = c
    return bool(finite.all())


def _blocks(x: Array, c: Array, memory: Array | None) -> Iterator[tuple[Array, Array, Array | None]]:
    for start in range(0, x.size, BLOCK):
        part = slice(start, start + BLOCK)
        yield x[part], c[part], None if memory is None else memory[part]


def _all_finite(values: Array) -> bool:
    # A finite sum proves that all terms are finite, in one fast pass. A sum of finite terms may overflow.
    return math.isfinite(values.sum()) or bool(np.isfinite(values).all())


def _commit(new: Array, c: Array) -> bool:
    """Write the finite values of `new` to the center."""
    if _all_finite(new):
        c[:] = new
        return True
    np.copyto(c, new, where=np.isfinite(new))
    return False
