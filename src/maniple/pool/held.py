"""Held: Ctrl-C at a moment when it does no harm."""

import functools
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Self

_INSISTING_S = 3.0
# What the functions of `signal` call. Those make enums of handlers, which takes longer than all else here.
_plainly: Any = getattr(signal, "_signal", signal)


class Held:
    """While it is entered, what the handler of SIGINT raises is kept; it is raised at the end.

    So no message is left half sent or half read. Who is inside looks at it now and then; if that takes too long, the
    next Ctrl-C is raised at once.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._since = 0.0
        self._old: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and _is_known():  # others get no signals
            self._old = _plainly.getsignal(signal.SIGINT)  # before it is needed
            _plainly.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            _plainly.signal(signal.SIGINT, self._old)
        if self.raised is not None:
            raise self.raised

    def _hold(self, *args: Any) -> None:
        if callable(self._old):
            self.run(self._old, *args)
        elif self._old == signal.SIG_DFL:  # the program is to end
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

    def run(self, act: Callable[..., Any], *args: Any) -> None:
        """Do something, and keep what it raises."""
        try:
            act(*args)
        except BaseException as error:
            if self.is_over(_INSISTING_S):
                raise
            if self.raised is None:
                self.raised, self._since = error, time.monotonic()

    def is_over(self, patience_s: float) -> bool:
        """Something was raised, so long ago."""
        return self.raised is not None and time.monotonic() - self._since >= patience_s


@functools.cache
def _is_known() -> bool:
    """The handler is one that can be put back; a program around Python may have its own."""
    return signal.getsignal(signal.SIGINT) is not None
