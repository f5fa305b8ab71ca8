"""Loads the modules that numba compiles (the extra `fast`), also in the background.

Without numba their NumPy twins serve. To load one takes half a second, and seconds on first use, when it is compiled
and cached on disk.
"""

import functools
import importlib
import importlib.util
import logging  # noqa: F401  # pyright: ignore[reportUnusedImport] - see _ForkGuard
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

LARGE_BYTES = 4 << 20  # of a model for which compiled code saves 0.4 ms in an exchange
SMALL_DELAY_S = 20.0  # a run that has lasted that long probably lasts much longer; loading takes 5 % of that at most
_FORK_S = 10.0  # for which a fork waits for that: to compile the kernels takes 5 s on a busy machine
loading = threading.RLock()  # held while compiled code is being loaded


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


def load_in_background(load: Callable[[], None], *, name: str, delay_s: float = 0.0) -> None:
    """Call `load` in a thread `name`, after `delay_s`.

    The end of the process waits for the thread, since a thread that is stopped inside of the compiler may crash it.
    """
    thread = threading.Thread(target=load, name=name)
    if not delay_s:
        thread.start()
        return
    # A daemon, since the end of the process need not wait for a thread that only sleeps.
    timer = threading.Timer(delay_s, thread.start)
    timer.daemon = True
    timer.start()


class _ForkGuard:
    """Lets a fork wait until the kernels are loaded: a child that was forked during an import could never repeat it.

    The wait is limited, in case that another hook of the fork holds a lock that the import needs. `logging` has such a
    hook. It is imported above, and so its hook runs after this one.
    """

    def __init__(self) -> None:
        self._is_held = False
        os.register_at_fork(before=self._acquire, after_in_parent=self._release, after_in_child=self._release)

    def _acquire(self) -> None:
        self._is_held = loading.acquire(timeout=_FORK_S)

    def _release(self) -> None:
        if self._is_held:
            loading.release()


_ForkGuard()
