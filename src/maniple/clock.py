"""The clock that training, pacing, records, leases and controllers read, and deadlines measured with it.

`clock` is one object per process, so that a test or a simulation can replace the time of every component at once:

    with clock.replaced(Simulated()):
        ...
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from maniple.errors import WaitedTooLong

STOPPED_HOLDER = "Its holder is alive but makes no progress: check whether that process is stopped or swapping."


class TimeSource(Protocol):
    """What a replacement must offer. The module `time` is the default source."""

    def time(self) -> float: ...
    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class Clock:
    """Wall time, monotonic time and sleep.

    The three are attributes that hold the source's own functions, so reading the time costs no extra call.
    """

    def __init__(self, source: TimeSource = time) -> None:
        self._use(source)

    @contextmanager
    def replaced(self, source: TimeSource) -> Generator[None]:
        """Read the time from `source` for the length of the block."""
        before = self._source
        self._use(source)
        try:
            yield
        finally:
            self._use(before)

    def _use(self, source: TimeSource) -> None:
        self._source = source
        self.time = source.time  # seconds since the epoch, for rows that other machines read
        self.monotonic = source.monotonic  # for durations: not affected by changes of the system time
        self.sleep = source.sleep


clock = Clock()


class Deadline:
    """Limits how long to wait for another process. Time during which this process was stopped does not count.

    The clock advances while a process is stopped (SIGSTOP, a suspended job), so the wait is summed up between
    consecutive checks: a gap longer than `slice_s` counts as `slice_s`. After such a gap the deadline expires at the
    next check at the earliest, since the awaited event may have happened in the meantime.

    Args:
        timeout_s: the limit; inf to measure the time only.
        slice_s: an upper bound of the time this process blocks or sleeps between two checks.
    """

    def __init__(self, timeout_s: float, *, slice_s: float = 1.0) -> None:
        self._timeout_s, self._slice_s = timeout_s, slice_s
        self._checked = clock.monotonic()
        self._sleep_s = 20e-6  # a lock is usually free again after one short exchange
        self.waited_s = 0.0  # up to the last check

    def is_over(self) -> bool:
        """True once the deadline has expired. Call it after each unsuccessful check of the awaited event."""
        now = clock.monotonic()
        gap_s, self._checked = now - self._checked, now
        self.waited_s += min(gap_s, self._slice_s)
        return self.waited_s > self._timeout_s and gap_s <= self._slice_s

    def left_s(self) -> float:
        """The time until it expires, at least 1 ms: the timeout of a system call that may block for all of it.

        `slice_s` must then be as long as the whole limit.
        """
        self.is_over()
        return max(0.001, self._timeout_s - self.waited_s)

    def check(self, what: Callable[[], str], explain: Callable[[], str] = lambda: STOPPED_HOLDER) -> None:
        """Raise WaitedTooLong if the deadline has expired; see `wait`. For callers that block by themselves."""
        if self.is_over():
            raise WaitedTooLong(f"waited {self.waited_s:.1f} s for {what()} (limit {self._timeout_s:g} s). {explain()}")

    def wait(self, what: str, explain: Callable[[], str] = lambda: STOPPED_HOLDER) -> None:
        """Sleep before the next check: 20 microseconds at first, growing to 2 milliseconds.

        Raises:
            WaitedTooLong: the deadline has expired. `explain` says why it may take so long and what to do.
        """
        self.check(lambda: what, explain)
        self.pause()

    def pause(self) -> None:
        """Sleep before the next check, as `wait` does."""
        clock.sleep(self._sleep_s)
        self._sleep_s = min(self._sleep_s * 1.5, 2e-3)
