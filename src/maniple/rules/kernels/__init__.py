"""The kernels in use: compiled ones where numba is installed (the extra `fast`), else NumPy.

Both give the same results to the bit.
"""

import functools
import threading
from collections.abc import Iterable
from typing import Any, Protocol, cast

import numpy as np

from maniple.compiled import LARGE_BYTES, SMALL_DELAY_S, compiled, load_in_background
from maniple.compiled import loading as _loading
from maniple.contracts import Array
from maniple.rules.kernels import numpy_kernels as blocks


class Kernels(Protocol):
    """The elementwise updates of a replica `x` and a center `c`, in place, one flat array at a time.

    Where the new value of the center would not be finite, the center keeps its value and the replica takes it. The
    kernels return the positions of these elements, or None if there are none.
    """

    STAGED_BYTES: int  # of the blocks with which `staged` is fastest

    def elastic(self, x: Array, c: Array, alpha_center: float, alpha_worker: float) -> Array | None: ...
    def blend(self, x: Array, c: Array, alpha: float, beta: float) -> Array | None: ...
    def difference(self, x: Array, c: Array, old: Array, scale: float) -> Array | None: ...
    def nesterov(
        self,
        x: Array,
        c: Array,
        gathered: Array,
        momentum: Array,
        *,
        lr: float,
        beta: float,
        count: float,
        is_full: bool,
    ) -> Array | None: ...
    def staged(
        self, x: Array, c: Array, block: Array, progress: Any, *, operation: int, a: float, b: float, answer: int
    ) -> bool:
        """Return False if elements were refused."""
        ...


_wanted: set[str] = set()  # dtypes whose kernels are to be loaded
_loaded: set[str] = set()
active: Kernels | None = None  # None before the first use; NumPy's while the compiled ones are being loaded


def kernels() -> Kernels:
    """The fastest kernels of this installation; NumPy's while another thread loads the compiled ones."""
    return active or activate()


def activate() -> Kernels:
    """Load the fastest kernels."""
    global active  # noqa: PLW0603 - there is one set of kernels in a process
    active = cast(Kernels, compiled("maniple.rules.kernels.numba_kernels") or blocks)
    return active


def warm_up(dtypes: Iterable[str]) -> None:
    """Compile or load the kernels for `dtypes` now, so that the first exchange is as fast as the others.

    Other threads use the NumPy kernels until that is done.
    """
    global active  # noqa: PLW0603 - there is one set of kernels in a process
    _wanted.update(dtypes)
    with _loading:
        active = cast(Kernels, blocks)
        try:
            fastest = cast(Kernels, compiled("maniple.rules.kernels.numba_kernels") or blocks)
            while _wanted and threading.main_thread().is_alive():  # else the process is ending
                _call_all(fastest, dtype := _wanted.pop())
                _loaded.add(dtype)
        finally:
            activate()


def warm_up_in_background(dtypes: Iterable[str], *, size_bytes: int = LARGE_BYTES) -> None:
    """Do what `warm_up` does in a background thread: that takes half a second, and seconds on first use.

    For models smaller than LARGE_BYTES (`size_bytes`) it begins after SMALL_DELAY_S: NumPy needs little time for them,
    and a run of seconds would lose more to the loading than it could gain.
    """
    global active  # noqa: PLW0603 - there is one set of kernels in a process
    if not (missing := set(dtypes) - _loaded):
        return
    active = cast(Kernels, blocks)
    load = functools.partial(warm_up, missing)
    load_in_background(load, name="maniple-kernels", delay_s=0.0 if size_bytes >= LARGE_BYTES else SMALL_DELAY_S)


def _call_all(kernels: Kernels, dtype: str) -> None:
    x, c, old = (np.zeros(1, dtype) for _ in range(3))
    kernels.elastic(x, c, 0.5, 0.5)
    kernels.blend(x, c, 0.5, 0.5)
    kernels.difference(x, c, old, 1.0)
    kernels.nesterov(x, c, old, np.zeros(1, dtype), lr=0.7, beta=0.9, count=4, is_full=True)
    kernels.staged(x, c, old, np.zeros(1, np.int64), operation=blocks.BLEND, a=1, b=1, answer=0)
