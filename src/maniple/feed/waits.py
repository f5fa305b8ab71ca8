"""Time lost waiting for batches, as rows `wait` of this process's worker."""

import time

from maniple.record import Events

_EVERY_S = 0.5

_events = Events(None)
_lost_s = 0.0


def report_to(events: Events) -> None:
    """From now on rows go to `events`, those of the worker that has joined."""
    global _events  # noqa: PLW0603 - one process is one worker
    _events = events


def lost_s() -> float:
    """The seconds that this process has waited for batches so far."""
    return _lost_s


class Waits:
    """Adds up what one feed has cost, and tells it twice a second at most."""

    def __init__(self, feed: str) -> None:
        self._feed = feed
        self._seconds, self._batches = 0.0, 0
        self._told = time.monotonic()

    def add(self, seconds: float, batches: int = 1) -> None:
        """The loop stood still for so long to get so many batches."""
        global _lost_s  # noqa: PLW0603 - one process is one worker
        _lost_s += seconds
        self._seconds += seconds
        self._batches += batches
        if time.monotonic() - self._told >= _EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Write the row."""
        self._told = time.monotonic()
        if self._batches or self._seconds:
            _events.write("wait", feed=self._feed, seconds=self._seconds, batches=self._batches)
            self._seconds, self._batches = 0.0, 0
