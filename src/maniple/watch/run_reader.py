"""Runs to draw or compare: each with its state, a name and its settings."""

import re
from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from maniple.errors import InvalidArgument
from maniple.monitor import CENTER, Overall, RunState, Series, WorkerState
from maniple.monitor.worker_state import BAD
from maniple.record import RunFolder

WINDOW = 10  # logged values in a running mean: smooth enough to read, and a target is reached only a little late
_MAX_MOMENTS = 20_000  # at which a mean over workers is computed; more than any chart has pixels
_NOT_SETTINGS = {"launcher", "session"}  # entries of run.json that do not affect training


@dataclass
class Run:
    """One run, read up to its newest row."""

    name: str
    state: RunState
    description: dict[str, Any]  # run.json

    @cached_property
    def overall(self) -> Overall:
        """Its numbers as a whole."""
        return self.state.overall()

    @property
    def workers(self) -> int:
        """The number of workers that ever took part."""
        return len(self.state.workers)

    @property
    def asked(self) -> dict[str, Any]:
        """All options that it was started with."""
        asked = cast(dict[str, Any], self.description.get("asked") or {})
        return {name: value for name, value in asked.items() if name not in _NOT_SETTINGS}

    @property
    def settings(self) -> dict[str, Any]:
        """The same, without empty ones."""
        return {name: value for name, value in self.asked.items() if value not in (None, [], 0, "")}

    @property
    def rule(self) -> str:
        """The name of its rule, as on the command line: `easgd`."""
        text = str(self.state.shared.get("rule") or self.settings.get("rule") or "")
        return re.split(r"[(:]", text)[0].lower()


def open_runs(paths: list[Path], value: str) -> list[Run]:
    """Read run folders, keeping many points of `value`. Names are as short as they can be and still differ."""
    names = _names(paths)
    return [_open(path, name, value) for path, name in zip(paths, names, strict=True)]


def check_run(path: Path) -> None:
    """Raise InvalidArgument unless `path` is a run folder."""
    if not (path / "events").is_dir():
        raise InvalidArgument(f"{path} is not a run folder: it has no events. Give runs/NAME or runs/last.")


def check_value(runs: list[Run], value: str) -> None:
    """Raise InvalidArgument unless at least one run has logged `value`."""
    logged = sorted({name for run in runs for name in run.state.logged.named})
    if value in logged:
        return
    if any(value in run.state.logged.non_finite for run in runs):
        raise InvalidArgument(f"all logged values of {value!r} are NaN or infinite. {_others(logged)}")
    near = get_close_matches(value, logged, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InvalidArgument(f"no value named {value!r} was logged in {_listed(runs)}. {_others(logged)}{hint}")


def _open(path: Path, name: str, value: str) -> Run:
    check_run(path)
    folder = RunFolder(path.resolve())
    state = RunState(folder, fine=value)
    state.refresh()
    if not state.until:
        raise InvalidArgument(f"{path} has no rows yet. Wait until its workers have started.")
    try:
        description = folder.read()
    except (msgspec.DecodeError, OSError):  # another launcher is about to write it
        description = {}
    return Run(name, state, description)


def _names(paths: list[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to make them differ."""
    whole = [path.resolve().parts for path in paths]
    names = [parts[-1] if parts else "run" for parts in whole]
    for length in range(2, max(map(len, whole), default=0) + 1):
        twice = Counter(names)
        names = [
            "/".join(parts[-length:]) if twice[name] > 1 else name for parts, name in zip(whole, names, strict=True)
        ]
    return names


def _others(logged: list[str]) -> str:
    if not logged:
        return "No values were logged: call worker.log(loss=loss) in the script."
    shown = ", ".join(logged[:20]) + (f" and {len(logged) - 20} more" if len(logged) > 20 else "")
    return f"Logged values: {shown}."


def _listed(runs: list[Run]) -> str:
    names = ", ".join(run.name for run in runs[:3])
    return names + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")


@dataclass(frozen=True)
class ValueSeries:
    """A logged value of a whole run against time since 1970: of the center, or the mean over the workers."""

    xs: np.ndarray
    ys: np.ndarray
    is_center: bool

    def __len__(self) -> int:
        return len(self.xs)

    @property
    def is_falling(self) -> bool:
        """True if it ends at or below its start."""
        return len(self) < 2 or bool(self.ys[-1] <= self.ys[0])

    def reaches(self, target: float, *, falling: bool) -> float | None:
        """The first time at or below `target`, or at or above it if not `falling`; None if never."""
        reached = np.flatnonzero(self.ys <= target if falling else self.ys >= target)
        return float(self.xs[reached[0]]) if len(reached) else None


def value_series(state: RunState, value: str, *, window: int = WINDOW) -> ValueSeries:
    """The series of `value`, empty if it was never logged.

    Of the center, if it was logged; else the mean over the workers of each one's running mean.
    """
    by_rank = state.logged.named.get(value, {})
    if center := by_rank.get(CENTER):
        return ValueSeries(*_arrays(center), is_center=True)
    own = {rank: _arrays(series) for rank, series in by_rank.items() if len(series)}
    if not own:
        return ValueSeries(np.empty(0), np.empty(0), is_center=False)
    moments = _thinned(np.unique(np.concatenate([xs for xs, _ in own.values()])))
    total, count = np.zeros(len(moments)), np.zeros(len(moments))
    for rank, (xs, ys) in own.items():
        place = np.searchsorted(xs, moments, side="right") - 1
        counts = (place >= 0) & ~_absent(state.workers.get(rank), xs, place, moments)
        total += np.where(counts, running_mean(ys, window)[place], 0.0)
        count += counts
    known = count > 0
    return ValueSeries(moments[known], total[known] / count[known], is_center=False)


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
