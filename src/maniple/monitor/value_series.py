"""The series of a logged value of a whole run: of the center if it was logged, else the mean over the workers.

Every figure that refers to a value of the run uses this series: the thick line of a plot, the last value and the time
to a target of `maniple compare`, and the time to a target that is shown live.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from maniple.monitor.series import CENTER, Series
from maniple.monitor.worker_state import BAD, WorkerState

if TYPE_CHECKING:
    from maniple.monitor.run_state import RunState

WINDOW = 10  # logged values in a running mean: smooth enough to read, and a target is reached only a little late
_MAX_MOMENTS = 20_000  # at which a mean over workers is computed; more than any chart has pixels


@dataclass(frozen=True)
class ValueSeries:
    """A logged value of a whole run against time since 1970.

    Attributes:
        name: of the value.
        low, high: the lowest and the highest of the workers' running means; equal to `ys` for the center.
        is_center: it is the center's, and not the mean of the workers.
    """

    name: str
    xs: np.ndarray
    ys: np.ndarray
    low: np.ndarray
    high: np.ndarray
    is_center: bool = False

    def __len__(self) -> int:
        return len(self.xs)


def value_series(state: "RunState", value: str, *, window: int = WINDOW) -> ValueSeries:
    """The series of `value`, empty if it was never logged.

    Of the center, if it was logged; else the mean over the workers of each one's running mean.
    """
    if center := state.logged.named.get(value, {}).get(CENTER):
        xs, ys = _arrays(center)
        return ValueSeries(value, xs, ys, ys, ys, is_center=True)
    return workers_series(state, value, window=window)


def workers_series(state: "RunState", value: str, *, window: int = WINDOW) -> ValueSeries:
    """The mean, the lowest and the highest over the workers of each one's running mean, whatever the center's value.

    It includes the workers that have logged so far; a dead or lost one does not count until it logs again.
    """
    by_rank = state.logged.named.get(value, {})
    own = {rank: _arrays(series) for rank, series in by_rank.items() if len(series) and rank != CENTER}
    if not own:
        empty = np.empty(0)
        return ValueSeries(value, empty, empty, empty, empty)
    moments = _thinned(np.unique(np.concatenate([xs for xs, _ in own.values()])))
    total, count = np.zeros(len(moments)), np.zeros(len(moments))
    low, high = np.full(len(moments), np.inf), np.full(len(moments), -np.inf)
    for means, counts in _running_means(own, state.workers, moments, window):
        total += np.where(counts, means, 0.0)
        count += counts
        low = np.where(counts, np.minimum(low, means), low)
        high = np.where(counts, np.maximum(high, means), high)
    known = count > 0
    return ValueSeries(value, moments[known], total[known] / count[known], low[known], high[known])


def _running_means(
    own: Mapping[int, tuple[np.ndarray, np.ndarray]],
    workers: Mapping[int, WorkerState],
    moments: np.ndarray,
    window: int,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each worker: its running mean at each of `moments`, and whether it counts then."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for rank, (xs, ys) in own.items():
        place = np.searchsorted(xs, moments, side="right") - 1
        counts = (place >= 0) & ~_absent(workers.get(rank), xs, place, moments)
        found.append((running_mean(ys, window)[place], counts))
    return found


def running_mean(ys: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and the `window - 1` before it, or fewer at the beginning.

    Each window is summed separately: in a running sum one huge value would destroy the precision of all later ones.
    """
    if window <= 1 or len(ys) == 0:
        return ys
    first = np.cumsum(ys[: window - 1]) / np.arange(1, len(ys[: window - 1]) + 1)
    if len(ys) < window:
        return first
    return np.concatenate([first, np.lib.stride_tricks.sliding_window_view(ys, window).mean(axis=1)])


def _absent(worker: WorkerState | None, xs: np.ndarray, place: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """The moments at which the worker was dead or lost and had not logged since."""
    gone = np.zeros(len(moments), bool)
    for when, state in worker.states if worker else ():
        if state in BAD:
            gone |= (moments >= when) & (xs[place] < when)
    return gone


def _arrays(series: Series) -> tuple[np.ndarray, np.ndarray]:
    xs, ys = np.array(series.xs), np.array(series.ys)
    order = np.argsort(xs, kind="stable")  # a clock may have been set back
    return xs[order], ys[order]


def _thinned(moments: np.ndarray) -> np.ndarray:
    step = -(-len(moments) // _MAX_MOMENTS)
    return np.unique(np.r_[moments[::step], moments[-1]])
