"""Fused kernels: one pass over memory, compiled by numba and cached on disk. Twin of `blocks`.

The guard against non-finite values rides in the same pass: a proposed value `v` is finite exactly when
`v - v` is 0, and the sum of those differences tells at the end whether all were. Only that sum may be
reordered by the compiler (`_add`), so that it can use whole vector registers; every other operation is
rounded as written, which keeps the results bit-equal to `blocks`.
"""

from typing import Any

import numba

from maniple.contracts import Array

_compiled: Any = numba.njit(cache=True, error_model="numpy")


@numba.njit(cache=True, fastmath={"reassoc"})
def _add(a: Any, b: Any) -> Any:
    return a + b


@_compiled
def _elastic(x: Any, c: Any, alpha_center: Any, alpha_worker: Any, zero: Any) -> Any:
    doubt = zero
    for i in range(x.size):
        d = x[i] - c[i]
        test = d - d
        doubt = _add(doubt, test)
        if test == zero:
            x[i] -= alpha_worker * d
            c[i] += alpha_center * d
        else:
            x[i] = c[i]
    return doubt


@_compiled
def _blend(x: Any, c: Any, alpha: Any, beta: Any, zero: Any) -> Any:
    doubt = zero
    for i in range(x.size):
        new = alpha * c[i] + beta * x[i]
        test = new - new
        doubt = _add(doubt, test)
        if test == zero:
            c[i] = new
        x[i] = c[i]
    return doubt


@_compiled
def _difference(x: Any, c: Any, old: Any, scale: Any, zero: Any) -> Any:
    doubt = zero
    for i in range(x.size):
        new = c[i] + scale * (x[i] - old[i])
        test = new - new
        doubt = _add(doubt, test)
        if test == zero:
            c[i] = new
        x[i] = c[i]
        old[i] = c[i]
    return doubt


def elastic(x: Array, c: Array, alpha_center: float, alpha_worker: float) -> bool:
    """`d = x - c; x -= alpha_worker d; c += alpha_center d`."""
    real = x.dtype.type
    return bool(_elastic(x, c, real(alpha_center), real(alpha_worker), real(0)) == 0)


def blend(x: Array, c: Array, alpha: float, beta: float) -> bool:
    """`c = alpha c + beta x; x = c`."""
    real = x.dtype.type
    return bool(_blend(x, c, real(alpha), real(beta), real(0)) == 0)


def difference(x: Array, c: Array, old: Array, scale: float) -> bool:
    """`c += scale (x - old); x = c; old = c`."""
    real = x.dtype.type
    return bool(_difference(x, c, old, real(scale), real(0)) == 0)
