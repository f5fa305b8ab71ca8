"""The acts: what a host does with a value `x` of a worker and a parameter `c`, in place (`contracts.Act`)."""

import numpy as np

from maniple.contracts import Array
from maniple.rules.kernels import kernels

ACTS = ("elastic", "blend", "compensated", "replace", "swap")


def apply(act: str, x: Array, c: Array, a: float, b: float) -> bool:
    """Change `x` and `c`; False if some proposed values were not finite."""
    if act in {"replace", "swap"}:
        c[:] = x
        return True
    is_real = c.dtype.kind == "f"
    if act == "elastic":
        return kernels().elastic(x, c, a, b)
    return kernels().blend(x, c, a, b) if is_real else weigh(x, c, a, b)


def weigh(x: Array, c: Array, alpha: float, beta: float) -> bool:
    """`c = alpha c + beta x; x = c` for any kind of number; whole numbers wrap around as NumPy's do."""
    with np.errstate(all="ignore"):
        new = c * np.asarray(alpha).astype(c.dtype) + x * np.asarray(beta).astype(c.dtype)
    finite = np.isfinite(new)
    np.copyto(c, new, where=finite)
    x[:] = c
    return bool(finite.all())
