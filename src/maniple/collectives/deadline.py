"""How long a worker waits for the others in a round: a fixed time, or one that is learned from the rounds before.

A learned limit names a worker that hangs sooner than a fixed one, which has to be longer than any step, checkpoint or
validation. From the times t between the last rounds, computing included:

    limit = max(median(t) + 10 max(MAD, median(t) / 10), longest t)        (see `outliers`)

between 30 s and the fixed default. The longest of them counts because calls may come in bursts, whose median says
nothing about the time between two bursts.
"""

from collections import deque

import numpy as np

from maniple.clock import clock
from maniple.outliers import learned_limit
from maniple.settings.options import AUTO, COLLECTIVES_DEADLINE_S

_K = 10.0
_WINDOW, _MINIMUM = 64, 16  # rounds: remembered, and needed before anything is learned
FLOOR_S = 30.0  # longer than a garbage collection, a slow batch or a busy disk


class RoundDeadline:
    """The limit of waits in the rounds of one group.

    Attributes:
        longest_s: what a learned limit never exceeds.
    """

    def __init__(self, setting: float | str) -> None:
        """`setting` is a number of seconds, or "auto"."""
        self._is_learned = setting == AUTO
        self.longest_s = start_deadline_s(setting)
        self._intervals: deque[float] = deque(maxlen=_WINDOW)
        self._last: float | None = None

    def count_round(self) -> None:
        """Note that all workers have arrived at a round."""
        if self._is_learned:
            now = clock.monotonic()
            if self._last is not None:
                self._intervals.append(now - self._last)
            self._last = now

    @property
    def limit_s(self) -> float:
        """How long to wait for others now."""
        intervals = np.array(tuple(self._intervals))
        if intervals.size < _MINIMUM:
            return self.longest_s
        learned = max(learned_limit(intervals, _K)[0], float(intervals.max()))
        return min(self.longest_s, max(FLOOR_S, learned))

    def __str__(self) -> str:
        """The limit and where it comes from, for errors."""
        text, intervals = f"limit {self.limit_s:.3g} s", np.array(tuple(self._intervals))
        if intervals.size < _MINIMUM:
            return text + (f", until {_MINIMUM} rounds were made" if self._is_learned else "")
        return (
            f"{text}, learned from the last {intervals.size} rounds: median {np.median(intervals):.2g} s, longest "
            f"{intervals.max():.2g} s"
        )


def start_deadline_s(setting: float | str) -> float:
    """The limit of waits before the first round, from which nothing can be learned."""
    return COLLECTIVES_DEADLINE_S if isinstance(setting, str) else setting
