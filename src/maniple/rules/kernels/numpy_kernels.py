"""Kernels in NumPy, in blocks that stay in cache, without temporaries of the model's size."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from maniple.contracts import Array, State

STAGED_BYTES = 1 << 15  # a block, its value and its result stay in the L2 cache
BLOCK = 1 << 16  # elements: small enough for the cache, large enough that NumPy's cost per call does not count

ELASTIC, BLEND, REPLACE = range(3)  # operations of `staged`
NOTHING, VALUE, MOVE = range(3)  # what `staged` writes over the worker's value

_QUIET = np.errstate(all="ignore")  # non-finite values are checked for explicitly

Mix = Callable[[Array, Array, State], tuple[Array, Array]]


@_QUIET
def elastic(x: Array, c: Array, alpha_center: float, alpha_worker: float) -> Array | None:
    """`d = x - c; x -= alpha_worker d; c += alpha_center d`."""
    refused = _Refused()
    center, worker = x.dtype.type(alpha_center), x.dtype.type(alpha_worker)
    scratch = np.empty(min(BLOCK, x.size), x.dtype)
    for start, a, b, _ in _blocks(x, c, None):
        d = scratch[: a.size]
        np.subtract(a, b, out=d)
        if not _all_finite(d):
            finite = np.isfinite(d)
            refused.add(start, ~finite)
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
    return refused.positions()


@_QUIET
def blend(x: Array, c: Array, alpha: float, beta: float) -> Array | None:
    """`c = alpha c + beta x; x = c`."""
    refused = _Refused()
    real = x.dtype.type
    scratch = np.empty(min(BLOCK, x.size), x.dtype)
    for start, a, b, _ in _blocks(x, c, None):
        new = scratch[: a.size]
        np.multiply(b, real(alpha), out=new)
        a *= real(beta)
        new += a
        _commit(new, b, start, refused)
        a[:] = b
    return refused.positions()


@_QUIET
def difference(x: Array, c: Array, old: Array, scale: float) -> Array | None:
    """`c += scale (x - old); x = c; old = c`, as `c = x + (c - old)` for a scale of 1: exact if no one else wrote."""
    refused = _Refused()
    for start, a, b, o in _blocks(x, c, old):
        assert o is not None
        if scale == 1:
            np.subtract(b, o, out=o)
            o += a
        else:
            np.subtract(a, o, out=o)
            o *= x.dtype.type(scale)
            o += b
        _commit(o, b, start, refused)
        a[:] = b
        o[:] = b
    return refused.positions()


@_QUIET
def nesterov(
    x: Array, c: Array, gathered: Array, momentum: Array, *, lr: float, beta: float, count: float, is_full: bool
) -> Array | None:
    """The delayed Nesterov step for a change `x` of the replica; afterwards `x` holds the center.

    s += x / n;   if is_full:  m = beta m + s;  c += lr (beta m + x / n);  s = 0
                  else:        c += lr x / n
    x = c
    """
    refused, real = _Refused(), x.dtype.type
    rate, decay, share = real(lr), real(beta), real(1 / count)
    for start in range(0, x.size, BLOCK):
        part = slice(start, start + BLOCK)
        a, b, s, m = x[part], c[part], gathered[part], momentum[part]
        a *= share
        new_sum, new_momentum = s + a, m
        if is_full:
            new_momentum = decay * m + new_sum
            new = b + rate * (decay * new_momentum + a)
            new_sum = np.zeros_like(s)
        else:
            new = b + rate * a
        finite = np.isfinite(new) & np.isfinite(new_momentum) & np.isfinite(new_sum)
        if not finite.all():
            refused.add(start, ~finite)
        for target, value in ((s, new_sum), (m, new_momentum), (b, new)):
            np.copyto(target, value, where=finite)
        a[:] = b
    return refused.positions()


@_QUIET
def mixed(x: Array, c: Array, state: State, mix: Mix) -> Array | None:
    """Apply `new_x, new_c = mix(x, c, state)` block by block; to the whole if there are scalars in the state.

    `mix` changes copies of the state, so that each element in shared memory is the old or the new one at any instant.
    Elements whose new center or state is not finite are refused: center and state stay, and the replica takes the
    center's value.
    """
    refused = _Refused()
    vectors = {name: value for name, value in state.items() if value.shape == x.shape}
    scalars = {name: value for name, value in state.items() if value.shape != x.shape}
    size = max(1, x.size) if scalars else BLOCK
    for start in range(0, x.size, size):
        part = slice(start, start + size)
        a, b, kept = x[part], c[part], {name: value[part] for name, value in vectors.items()} | scalars
        new = {name: value.copy() for name, value in kept.items()}
        # Copies in the center's dtype: `mix` may return its own arguments, or values of a wider dtype.
        new_x, new_c = (np.array(value, x.dtype, copy=True) for value in mix(a, b, new))
        if all(_all_finite(value) for value in (new_c, *new.values())):
            a[:], b[:] = new_x, new_c
            for name, value in kept.items():
                value[:] = new[name]
            continue
        finite = np.isfinite(new_c)
        for name in vectors:
            finite &= np.isfinite(new[name])
        finite &= all(np.isfinite(new[name]).all() for name in scalars)
        refused.add(start, ~finite)
        a[:] = np.where(finite, new_x, b)
        np.copyto(b, new_c, where=finite)
        for name in vectors:
            np.copyto(kept[name], new[name], where=finite)
        for name in scalars if finite.any() else ():
            kept[name][:] = new[name]
    return refused.positions()


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
                clean &= elastic(new_x, new_c, a, b) is None
            elif operation == REPLACE:
                pass
            elif x.dtype.kind == "f":
                clean &= blend(new_x, new_c, a, b) is None
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


class _Refused:
    """The positions of elements that the center has refused."""

    def __init__(self) -> None:
        self._found: list[Array] = []

    def add(self, start: int, where: Array) -> None:
        """Note the elements of a block that begins at `start` for which `where` is true."""
        self._found.append(start + np.flatnonzero(where))

    def positions(self) -> Array | None:
        return np.concatenate(self._found) if self._found else None


def _blocks(x: Array, c: Array, memory: Array | None) -> Iterator[tuple[int, Array, Array, Array | None]]:
    for start in range(0, x.size, BLOCK):
        part = slice(start, start + BLOCK)
        yield start, x[part], c[part], None if memory is None else memory[part]


def _all_finite(values: Array) -> bool:
    # A finite sum proves that all terms are finite, in one fast pass. A sum of finite terms may overflow.
    return math.isfinite(values.sum()) or bool(np.isfinite(values).all())


def _commit(new: Array, c: Array, start: int, refused: _Refused) -> None:
    """Write the finite values of `new` to the center."""
    if _all_finite(new):
        c[:] = new
    else:
        finite = np.isfinite(new)
        refused.add(start, ~finite)
        np.copyto(c, new, where=finite)
