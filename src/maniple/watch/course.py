"""The course of one value through a run: what all workers together, or the center, had reached at any moment.

Where something was logged of the center, that is the course. Else each worker's running mean over its last `window`
values is taken, and of these the mean over all workers that have logged so far; one that is dead, lost or failed
does not count until it logs again.
"""

from dataclasses import dataclass

import numpy as np

from maniple.story import CENTER, Series, Standing, Story
from maniple.story.standing import BAD

WINDOW = 10
_MOMENTS = 20_000  # at which a mean over workers is taken, at most


@dataclass(frozen=True)
class Course:
    """A value against time since 1970."""

    xs: np.ndarray
    ys: np.ndarray
    is_center: bool

    def __len__(self) -> int:
        return len(self.xs)

    @property
    def is_falling(self) -> bool:
        """It ends below where it began."""
        return len(self) < 2 or bool(self.ys[-1] <= self.ys[0])

    def reaches(self, target: float, *, falling: bool) -> float | None:
        """When it is first at or below `target`, or at or above it if it is not `falling`; None if never."""
        there = np.flatnonzero(self.ys <= target if falling else self.ys >= target)
        return float(self.xs[there[0]]) if len(there) else None


def course(story: Story, value: str, *, window: int = WINDOW) -> Course:
    """The course of `value`; empty if it was never logged."""
    curves = story.logged.named.get(value, {})
    if center := curves.get(CENTER):
        return Course(*_arrays(center), is_center=True)
    own = {rank: _arrays(series) for rank, series in curves.items() if len(series)}
    if not own:
        return Course(np.empty(0), np.empty(0), is_center=False)
    moments = _thinned(np.unique(np.concatenate([xs for xs, _ in own.values()])))
    total, count = np.zeros(len(moments)), np.zeros(len(moments))
    for rank, (xs, ys) in own.items():
        place = np.searchsorted(xs, moments, side="right") - 1
        counts = (place >= 0) & ~_away(story.standings.get(rank), xs, place, moments)
        total += np.where(counts, running_mean(ys, window)[place], 0.0)
        count += counts
    known = count > 0
    return Course(moments[known], total[known] / count[known], is_center=False)


def running_mean(ys: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and those before it, `window` in all; of fewer at the beginning.

    Each is added up by itself: in a running sum one huge value would spoil all that follow.
    """
    if window <= 1 or len(ys) == 0:
        return ys
    first = np.cumsum(ys[: window - 1]) / np.arange(1, len(ys[: window - 1]) + 1)
    if len(ys) < window:
        return first
    return np.concatenate([first, np.lib.stride_tricks.sliding_window_view(ys, window).mean(axis=1)])


def _away(standing: Standing | None, xs: np.ndarray, place: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """At which moments the worker was gone, and had not logged since."""
    gone = np.zeros(len(moments), bool)
    for when, state in standing.states if standing else ():
        if state in BAD:
            gone |= (moments >= when) & (xs[place] < when)
    return gone


def _arrays(series: Series) -> tuple[np.ndarray, np.ndarray]:
    xs, ys = np.array(series.xs), np.array(series.ys)
    order = np.argsort(xs, kind="stable")  # clocks may have been set back
    return xs[order], ys[order]


def _thinned(moments: np.ndarray) -> np.ndarray:
    step = -(-len(moments) // _MOMENTS)
    return np.unique(np.r_[moments[::step], moments[-1]])
