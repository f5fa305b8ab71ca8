"""The kernels in use: compiled ones where numba is installed (the extra `fast`), else NumPy.

Both give the same results to the bit.
"""

import functools
import importlib
import importlib.util
import logging  # noqa: F401  # pyright: ignore[reportUnusedImport] - see _ForkGuard
import os
import threading
import warnings
from collections.abc import Iterable
from typing import Any, Protocol, cast

import numpy as np

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
_loading = threading.RLock()  # held meanwhile
LARGE_BYTES = 4 << 20  # of a model for which the compiled kernels save 0.4 ms in an exchange
SMALL_DELAY_S = 20.0  # a run that has lasted that long probably lasts much longer; loading takes 5 % of that at most
_FORK_S = 10.0  # for which a fork waits for that: to compile the kernels takes 5 s on a busy machine
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

    The end of the process waits for the thread, since a thread that is stopped inside of the compiler may crash it.
    """
    global active  # noqa: PLW0603 - there is one set of kernels in a process
    if not (missing := set(dtypes) - _loaded):
        return
    active = cast(Kernels, blocks)
    loading = threading.Thread(target=warm_up, args=(missing,), name="maniple-kernels")
    if size_bytes >= LARGE_BYTES:
        loading.start()
        return
    # A daemon, since the end of the process need not wait for a thread that only sleeps.
    timer = threading.Timer(SMALL_DELAY_S, loading.start)
    timer.daemon = True
    timer.start()


def _call_all(kernels: Kernels, dtype: str) -> None:
    x, c, old = (np.zeros(1, dtype) for _ in range(3))
    kernels.elastic(x, c, 0.5, 0.5)
    kernels.blend(x, c, 0.5, 0.5)
    kernels.difference(x, c, old, 1.0)
    kernels.nesterov(x, c, old, np.zeros(1, dtype), lr=0.7, beta=0.9, count=4, is_full=True)
    kernels.staged(x, c, old, np.zeros(1, np.int64), operation=blocks.BLEND, a=1, b=1, answer=0)


class _ForkGuard:
    """Lets a fork wait until the kernels are loaded: a child that was forked during an import could never repeat it.

    The wait is limited, in case that another hook of the fork holds a lock that the import needs. `logging` has such a
    hook. It is imported above, and so its hook runs after this one.
    """

    def __init__(self) -> None:
        self._is_held = False
        os.register_at_fork(before=self._acquire, after_in_parent=self._release, after_in_child=self._release)

    def _acquire(self) -> None:
        self._is_held = _loading.acquire(timeout=_FORK_S)

    def _release(self) -> None:
        if self._is_held:
            _loading.release()


_ForkGuard()
