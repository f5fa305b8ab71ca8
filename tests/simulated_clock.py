"""A clock for tests: time passes when a test says so, and when somebody sleeps."""

import threading
import time


class SimulatedClock:
    """Use it with `maniple.clock.clock.replaced(...)`; set `now` to let time pass.

    It is the clock of the thread that created it. Background threads that earlier tests have left in the process keep
    the real time: their sleeps would let the time of this test pass.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._thread = threading.get_ident()

    def time(self) -> float:
        return self.now if self._is_current() else time.time()

    def monotonic(self) -> float:
        if not self._is_current():
            return time.monotonic()
        self.on_look()
        return self.now

    def sleep(self, seconds: float, /) -> None:
        if not self._is_current():
            time.sleep(seconds)
            return
        self.now += seconds
        self.on_sleep()

    def on_look(self) -> None:
        """Called before the monotonic time is read; for subclasses."""

    def on_sleep(self) -> None:
        """Called after each sleep; for subclasses."""

    def _is_current(self) -> bool:
        return threading.get_ident() == self._thread
