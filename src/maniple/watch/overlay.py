"""Charts of several runs: lines on one axis, shares of time, and colours. `plot` and `report` draw them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from maniple.errors import InvalidArgument
from maniple.monitor import CENTER
from maniple.monitor.series import extremes
from maniple.monitor.target import Target
from maniple.monitor.value_series import WINDOW, value_series, workers_series
from maniple.record.times import PARTS
from maniple.watch.run_reader import Run

AXES = ("time", "samples", "epochs")
# Colours, line styles and markers by which colour-blind people can tell runs and parts apart.
PART_COLOURS = {"compute": "#4477aa", "exchange": "#ee6677", "data": "#ccbb44", "others": "#bbbbbb"}
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#7a7a7a")  # of runs
# Colours mean runs, so rules differ by line style and marker: the name in matplotlib and the one in plotly.
RULE, IDEAL = "#555555", "#bbbbbb"
STYLES = (("-", "solid"), ("-.", "dashdot"), (":", "dot"), ((0, (5, 1)), "longdash"))
MARKERS = (
    ("o", "circle"), ("s", "square"), ("^", "triangle-up"), ("D", "diamond"), ("v", "triangle-down"), ("P", "cross"),
)  # fmt: skip
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_THIN_POINTS = 40_000  # of all thin lines together: a report of this size still loads and zooms quickly
_STRONG_BUCKETS = 2000  # of a strong line: more than a screen has columns
_BAND_POINTS = 1000  # of a band
MAX_WORKER_LINES = 3  # of a run: more than three lines of one colour cannot be told apart, so more become a band


@dataclass(frozen=True)
class Line:
    """One line: thin for a worker; strong for the center or the mean of the workers."""

    run: int  # index of the run
    who: str
    is_strong: bool
    xs: np.ndarray
    ys: np.ndarray


@dataclass(frozen=True)
class Band:
    """The range of the workers of one run: the lowest and the highest of their running means."""

    run: int  # index of the run
    who: str
    xs: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class TargetMark:
    """Where a run has reached the target."""

    run: int  # index of the run
    text: str
    x: float
    y: float


def lines(runs: list[Run], value: str, *, against: str = "time", window: int = WINDOW) -> list[Line]:
    """The lines of `value` of all runs. The workers of a run have lines if there are at most MAX_WORKER_LINES."""
    count = sum(len(run.state.logged.named.get(value, {})) for run in runs)
    buckets = max(20, _THIN_POINTS // 2 // max(1, count))
    found = [line for i, run in enumerate(runs) for line in _lines(i, run, value, window, buckets)]
    unit_s = time_unit(runs)[0]
    return [replace(line, xs=axis(runs[line.run], line.xs, against, unit_s=unit_s)) for line in found]


def bands(runs: list[Run], value: str, *, against: str = "time", window: int = WINDOW) -> list[Band]:
    """The ranges of `value` over the workers of those runs that have too many for lines."""
    found: list[Band] = []
    unit_s = time_unit(runs)[0]
    for i, run in enumerate(runs):
        if (number := len(_ranks(run, value))) > MAX_WORKER_LINES:
            whole = workers_series(run.state, value, window=window)
            step = -(-len(whole) // _BAND_POINTS)
            xs = axis(run, whole.xs[::step], against, unit_s=unit_s)
            low, high = whole.low[::step], whole.high[::step]
            found.append(Band(i, f"lowest to highest of {number} workers", xs, low, high))
    return found


def target_marks(runs: list[Run], target: Target, *, against: str = "time", window: int = WINDOW) -> list[TargetMark]:
    """Where each run has first reached the target; none for runs that have not."""
    found: list[TargetMark] = []
    unit_s = time_unit(runs)[0]
    for i, run in enumerate(runs):
        series = value_series(run.state, target.name, window=window)
        if (reached := target.reached(series)) is not None:
            moment = np.array([reached])
            after_s = float(run.state.elapsed_at(moment)[0])
            x, y = axis(run, moment, against, unit_s=unit_s)[0], series.ys[np.searchsorted(series.xs, reached)]
            found.append(TargetMark(i, f"reached after {after_s:,.1f} s", float(x), float(y)))
    return found


def _ranks(run: Run, value: str) -> list[int]:
    """The workers that have logged `value`."""
    return sorted(rank for rank, one in run.state.logged.named.get(value, {}).items() if rank != CENTER and len(one))


def _lines(i: int, run: Run, value: str, window: int, buckets: int) -> Iterator[Line]:
    """The lines of one run, against time since 1970."""
    curves, ranks = run.state.logged.named.get(value, {}), _ranks(run, value)
    if len(ranks) <= MAX_WORKER_LINES:
        for rank in ranks:
            xs, ys = _thinned(np.array(curves[rank].xs), np.array(curves[rank].ys), buckets)
            yield Line(i, f"worker {rank}", False, xs, ys)
    whole = value_series(run.state, value, window=window)
    if len(whole):
        who = "center" if whole.is_center else "mean of the workers" if len(curves) > 1 else "running mean"
        if non_finite := run.state.logged.non_finite.get(value):
            who += f"; {non_finite:,} values were not finite"
        xs, ys = _thinned(whole.xs, whole.ys, _STRONG_BUCKETS)
        yield Line(i, who, True, xs, ys)


def axis(run: Run, moments: np.ndarray, against: str, *, unit_s: float = 1.0) -> np.ndarray:
    """Positions of `moments` on the axis `against`; on that of time, in units of `unit_s` seconds."""
    if against == "time":
        return run.state.elapsed_at(moments) / unit_s
    samples = run.state.samples_at(moments)
    return samples if against == "samples" else samples / max(1, run.state.epoch_size)


def time_unit(runs: list[Run]) -> tuple[float, str]:
    """The unit of time that suits the longest of `runs`: its seconds and its name."""
    longest = max((run.state.totals().elapsed_s for run in runs), default=0.0)
    return next((seconds, name) for least, seconds, name in _UNITS if longest >= least)


def axis_title(against: str, unit: str) -> str:
    """The title of an axis."""
    titles = {"time": f"{unit} since the first step", "samples": "samples of all workers", "epochs": "epochs"}
    return titles[against]


def known_axes(runs: list[Run]) -> list[str]:
    """The axes that all of `runs` can be drawn against."""
    has_samples = all(run.overall.unit == "samples" and run.state.samples_seen for run in runs)
    has_epochs = has_samples and all(run.state.epoch_size for run in runs)
    return ["time", *(["samples"] if has_samples else []), *(["epochs"] if has_epochs else [])]


def check_axis(runs: list[Run], against: str) -> None:
    """Raise InvalidArgument unless all of `runs` can be drawn against the axis."""
    if against in known_axes(runs):
        return
    without = next(run for run in runs if against not in known_axes([run]))
    lack = "without worker.sampler the epoch size is unknown" if against == "epochs" else "it counted none"
    raise InvalidArgument(
        f"{without.name} cannot be drawn against {against}: {lack}. Use --against {known_axes(runs)[-1]}, or leave the "
        "run out."
    )


def shares(run: Run) -> dict[str, float]:
    """Shares of all workers' time, by what it was spent on."""
    whole = sum(run.overall.split.values())
    return {part: run.overall.split[part] / whole if whole else 0.0 for part in PARTS}


def colour(i: int) -> str:
    """The colour of run number `i`; of a recorded baseline that is not among the runs if it is negative."""
    return CYCLE[i % len(CYCLE)] if i >= 0 else RULE


def _thinned(xs: np.ndarray, ys: np.ndarray, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    if len(xs) <= 2 * buckets:
        return xs, ys
    kept = extremes(xs, ys, buckets)
    return xs[kept], ys[kept]
