"""The kernels in use: `fused` where numba is installed (the extra `fast`), else `blocks`."""

import functools
import importlib
import importlib.util
import warnings
from typing import Any, Protocol, cast

import numpy as np

from maniple.contracts import Array
from maniple.rules import blocks


class Kernels(Protocol):
    """The elementwise updates of a replica `x` and a center `c`, in place, one flat array at a time.

    Where the value proposed for the center is not finite, the center keeps its own and the replica takes
    it; the kernel then answers False.
    """

    def elastic(self, x: Array, c: Array, alpha_center: float, alpha_worker: float) -> bool: ...
    def blend(self, x: Array, c: Array, alpha: float, beta: float) -> bool: ...
    def difference(self, x: Array, c: Array, old: Array, scale: float) -> bool: ...
    def staged(
        self, x: Array, c: Array, block: Array, progress: Any, *, act: int, a: float, b: float, answer: int
    ) -> bool: ...


_is_loading = False


def kernels() -> Kernels:
    """The fastest kernels that this installation has, and that are not being loaded yet."""
    return cast(Kernels, blocks) if _is_loading else _fastest()


def _fastest() -> Kernels:
    return cast(Kernels, compiled("maniple.rules.fused") or blocks)


@functools.cache
def compiled(module: str) -> Any:
    """A module of ours that needs numba; None where there is none, or it cannot be used."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # a broken install, or nowhere to keep the compiled code
        warnings.warn(f"numba is installed but cannot be used ({error}); NumPy does it, slower", stacklevel=2)
        return None


def warm_up(dtypes: list[str]) -> None:
    """Compile or load the kernels for `dtypes` now, so that the first exchange is as fast as the rest.

    Other threads compute with the slower twins meanwhile, whose results are the same to the bit.
    """
    global _is_loading  # noqa: PLW0603 - there is one set of kernels in a process
    _is_loading = True
    try:
        for dtype in dtypes:
            x, c, old = (np.zeros(1, dtype) for _ in range(3))
            _fastest().elastic(x, c, 0.5, 0.5)
            _fastest().blend(x, c, 0.5, 0.5)
            _fastest().difference(x, c, old, 1.0)
            _fastest().staged(x, c, old, np.zeros(1, np.int64), act=blocks.BLEND, a=1, b=1, answer=0)
    finally:
        _is_loading = False
