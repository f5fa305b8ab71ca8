"""The kernels in use: compiled ones where numba is installed (the extra `fast`), else NumPy.

Both give the same results to the bit.
"""

import functools
import importlib
import importlib.util
import warnings
from typing import Any, Protocol, cast

import numpy as np

from maniple.contracts import Array
from maniple.rules.kernels import numpy_kernels as blocks


class Kernels(Protocol):
    """The elementwise updates of a replica `x` and a center `c`, in place, one flat array at a time.

    Where the new value of the center would not be finite, the center keeps its value and the replica takes it. The
    kernels return the positions of these elements, or None if there are none.
    """

    def elastic(self, x: Array, c: Array, alpha_center: float, alpha_worker: float) -> Array | None: ...
    def blend(self, x: Array, c: Array, alpha: float, beta: float) -> Array | None: ...
    def difference(self, x: Array, c: Array, old: Array, scale: float) -> Array | None: ...
    def staged(
        self, x: Array, c: Array, block: Array, progress: Any, *, operation: int, a: float, b: float, answer: int
    ) -> bool:
        """Return False if elements were refused."""
        ...


active: Kernels | None = None  # None before the first use; NumPy's while the compiled ones are being loaded


def kernels() -> Kernels:
    """The fastest kernels of this installation; NumPy's while another thread loads the compiled ones."""
    return active or activate()


def activate() -> Kernels:
    """Load the fastest kernels."""
    global active  # noqa: PLW0603 - there is one set of kernels in a process
    active = cast(Kernels, compiled("maniple.rules.kernels.numba_kernels") or blocks)
    return active


@functools.cache
def compiled(module: str) -> Any:
    """A module of maniple that needs numba; None if numba is missing or unusable."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # a broken install, or nowhere to keep the compiled code
        warnings.warn(
            f"numba is installed but cannot be used ({error}); the slower NumPy kernels are used", stacklevel=2
        )
        return None


def warm_up(dtypes: list[str]) -> None:
    """Compile or load the kernels for `dtypes` now, so that the first exchange is as fast as the others.

    Other threads use the NumPy kernels until that is done.
    """
    global active  # noqa: PLW0603 - there is one set of kernels in a process
    active = cast(Kernels, blocks)
    try:
        fastest = cast(Kernels, compiled("maniple.rules.kernels.numba_kernels") or blocks)
        for dtype in dtypes:
            x, c, old = (np.zeros(1, dtype) for _ in range(3))
            fastest.elastic(x, c, 0.5, 0.5)
            fastest.blend(x, c, 0.5, 0.5)
            fastest.difference(x, c, old, 1.0)
            fastest.staged(x, c, old, np.zeros(1, np.int64), operation=blocks.BLEND, a=1, b=1, answer=0)
    finally:
        activate()
