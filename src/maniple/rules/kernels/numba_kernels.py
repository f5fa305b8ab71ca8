"""Compiled kernels: one pass over memory, compiled by numba and cached on disk; bit-equal to `numpy_kernels`.

The check for non-finite values is part of the same pass: a value `v` is finite exactly when `v - v` is 0. Results are
selected by that test, not branched on, so that the loop vectorises; the sum of the tests, `doubt`, is 0 if all values
were finite. Where the test fails, the replica becomes non-finite, by which these elements are found afterwards.
"""

from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from maniple.contracts import Array

STAGED_BYTES = 1 << 12  # a block, its result, and both values stay in the L1 cache, also if all are aligned to pages

# Of fast maths, only sums may be reordered. The one sum is `doubt`, which needs it to vectorise. Every other operation
# is rounded as written, so that the results are bit-equal to those of NumPy.
_compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc"})
_exact: Any = numba.njit(cache=True, nogil=True, error_model="numpy")  # for kernels with sums of their own


@_compiled
def _elastic(x: Any, c: Any, alpha_center: Any, alpha_worker: Any, zero: Any) -> Any:
    doubt = zero
    for i in range(x.size):
        old_x, old_c = x[i], c[i]
        d = old_x - old_c
        test = d - d
        doubt += test
        new_x, new_c = old_x - alpha_worker * d, old_c + alpha_center * d
        x[i] = new_x if test == zero else test
        c[i] = new_c if test == zero else old_c
    return doubt


@_compiled
def _blend(x: Any, c: Any, alpha: Any, beta: Any, zero: Any) -> Any:
    doubt = zero
    for i in range(x.size):
        old_c = c[i]
        new = alpha * old_c + beta * x[i]
        test = new - new
        doubt += test
        c[i] = new if test == zero else old_c
        x[i] = new
    return doubt


@_compiled
def _difference(x: Any, c: Any, old: Any, scale: Any, zero: Any) -> Any:
    doubt = zero
    is_whole = scale == 1
    for i in range(x.size):
        old_c = c[i]
        # Without scaling it is exact if no other worker has written: then old_c - old is 0.
        new = x[i] + (old_c - old[i]) if is_whole else old_c + scale * (x[i] - old[i])
        test = new - new
        doubt += test
        x[i] = new
        new = new if test == zero else old_c
        c[i] = new
        old[i] = new
    return doubt


@_exact
def _nesterov(  # noqa: PLR0917 - compiled code has no keywords
    x: Any, c: Any, gathered: Any, momentum: Any, lr: Any, beta: Any, share: Any, is_full: Any, zero: Any
) -> Any:
    refused = 0
    for i in range(x.size):
        change = x[i] * share
        old_sum, old_momentum, old_c = gathered[i], momentum[i], c[i]
        new_sum, new_momentum = old_sum + change, old_momentum
        if is_full:
            new_momentum = beta * old_momentum + new_sum
            new = old_c + lr * (beta * new_momentum + change)
            new_sum = zero
        else:
            new = old_c + lr * change
        test = (new - new) + (new_momentum - new_momentum) + (new_sum - new_sum)
        refused |= test != zero
        gathered[i] = new_sum if test == zero else old_sum
        momentum[i] = new_momentum if test == zero else old_momentum
        c[i] = new if test == zero else old_c
        x[i] = new if test == zero else test
    return refused


def _fence_code(typing: Any) -> Any:
    """Neither compiler nor processor may move a write across it: another process sees writes in this order."""
    del typing

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature, arguments
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), code


fence: Any = intrinsic(_fence_code)


@_compiled
def _staged(  # noqa: PLR0912, PLR0917 - compiled code has its branches outside of the loops, and no keywords
    x: Any, c: Any, block: Any, progress: Any, operation: Any, a: Any, b: Any, answer: Any, zero: Any
) -> Any:
    doubt = zero
    step = block.size
    scratch = np.empty(step, x.dtype)
    for start in range(progress[0] // 2 * step, c.size, step):
        count = min(step, c.size - start)
        xs, cs = x[start : start + count], c[start : start + count]
        if progress[0] % 2 == 0:
            if operation == 2:
                for i in range(count):
                    scratch[i] = xs[i]
                    block[i] = xs[i]
            elif operation == 1:
                for i in range(count):
                    old_c = cs[i]
                    new = a * old_c + b * xs[i]
                    test = new - new
                    doubt += test
                    new = new if test == zero else old_c
                    scratch[i] = new
                    block[i] = new
            else:
                for i in range(count):
                    old_x, old_c = xs[i], cs[i]
                    d = old_x - old_c
                    test = d - d
                    doubt += test
                    new_x, new_c = old_x - b * d, old_c + a * d
                    scratch[i] = new_x if test == zero else old_c
                    block[i] = new_c if test == zero else old_c
            fence()
            progress[0] += 1
            fence()
        for i in range(count):
            cs[i] = block[i]
        if answer == 1:
            for i in range(count):
                xs[i] = scratch[i]
        elif answer == 2:
            for i in range(count):
                xs[i] = scratch[i] - xs[i]
        fence()
        progress[0] += 1
        fence()
    return doubt


def elastic(x: Array, c: Array, alpha_center: float, alpha_worker: float) -> Array | None:
    """`d = x - c; x -= alpha_worker d; c += alpha_center d`."""
    real = x.dtype.type
    doubt = _elastic(x, c, real(alpha_center), real(alpha_worker), real(0))
    return None if doubt == 0 else _refuse(x, c)


def blend(x: Array, c: Array, alpha: float, beta: float) -> Array | None:
    """`c = alpha c + beta x; x = c`."""
    real = x.dtype.type
    doubt = _blend(x, c, real(alpha), real(beta), real(0))
    return None if doubt == 0 else _refuse(x, c)


def difference(x: Array, c: Array, old: Array, scale: float) -> Array | None:
    """`c += scale (x - old); x = c; old = c`."""
    real = x.dtype.type
    doubt = _difference(x, c, old, real(scale), real(0))
    return None if doubt == 0 else _refuse(x, c)


def nesterov(
    x: Array, c: Array, gathered: Array, momentum: Array, *, lr: float, beta: float, count: float, is_full: bool
) -> Array | None:
    """The delayed Nesterov step for a change `x` of the replica; afterwards `x` holds the center."""
    real = x.dtype.type
    refused = _nesterov(x, c, gathered, momentum, real(lr), real(beta), real(1 / count), is_full, real(0))
    return _refuse(x, c) if refused else None


def _refuse(x: Array, c: Array) -> Array:
    """Give the replica the center's value where it is not finite; return the positions."""
    (refused,) = np.nonzero(~np.isfinite(x))
    x[refused] = c[refused]
    return refused


def staged(
    x: Array, c: Array, block: Array, progress: Array, *, operation: int, a: float, b: float, answer: int
) -> bool:
    """`elastic`, `blend` or a replacement, in steps that can be repeated."""
    real = x.dtype.type
    return bool(_staged(x, c, block, progress, operation, real(a), real(b), answer, real(0)) == 0)
