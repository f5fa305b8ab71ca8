"""How fast the workers of a run train, from the steps that their heartbeats report.

A worker whose speed is a fraction of the others' may make that fraction of their steps between two exchanges, so that
its contributions are no staler than theirs (`DiLoCo(dynamic=True)`; dynamic local updates, arXiv:2401.09135).
"""

import threading
from collections import deque

import numpy as np

_WINDOW_S = 30.0  # long enough for a few steps of a second, short enough to notice a machine that slows down
_REFERENCE = 90  # percentile: one worker whose speed is mismeasured cannot slow all others down

Who = tuple[int, int]  # rank and incarnation


class WorkerSpeeds:
    """The steps per second of each worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Who, deque[tuple[float, int]]] = {}  # the time and the steps until then

    def count(self, who: Who, steps: int, now: float, *, is_last: bool = False) -> None:
        """Note how many steps a worker has made by `now`; after its last heartbeat it is forgotten."""
        with self._lock:
            if is_last:
                self._counts.pop(who, None)
                return
            for other in [other for other in self._counts if other[0] == who[0] and other[1] < who[1]]:
                del self._counts[other]  # its successor has come
            counts = self._counts.setdefault(who, deque())
            if steps:  # the time before the first step is start-up
                counts.append((now, steps))
            while len(counts) > 2 and now - counts[1][0] >= _WINDOW_S:
                counts.popleft()

    def relative(self, who: Who) -> float:
        """A worker's speed divided by that of the fast workers, at most 1; 1 while it is not known."""
        with self._lock:
            speeds = {one: speed for one, counts in self._counts.items() if (speed := _speed(counts)) > 0}
        if who not in speeds:
            return 1.0
        return min(1.0, speeds[who] / float(np.percentile(list(speeds.values()), _REFERENCE, method="inverted_cdf")))


def _speed(counts: "deque[tuple[float, int]]") -> float:
    """Steps per second over the window; 0 if it is not known."""
    if len(counts) < 2 or counts[-1][0] <= counts[0][0]:
        return 0.0
    return (counts[-1][1] - counts[0][1]) / (counts[-1][0] - counts[0][0])
