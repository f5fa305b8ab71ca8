"""What is drawn of several runs on one clock: lines, speed-ups, shares of time. Numbers only; others draw them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from maniple.errors import InvalidArgument
from maniple.record.times import PARTS
from maniple.story import CENTER
from maniple.story.clock import samples_at
from maniple.story.series import extremes
from maniple.watch.course import WINDOW, course
from maniple.watch.runs import Run

AXES = ("time", "samples", "epochs")
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_POINTS = 40_000  # of all thin lines together
_STRONG = 2000  # stretches of a strong line


@dataclass(frozen=True)
class Line:
    """One curve: thin for a worker; strong for the center, or for the mean of the workers."""

    run: int  # its place among the runs
    who: str
    is_strong: bool
    xs: np.ndarray
    ys: np.ndarray


@dataclass(frozen=True)
class Speedup:
    """How many times as fast as the baseline runs of one rule are, by their numbers of workers.

    Attributes:
        runs: the places of these runs among all.
    """

    rule: str
    workers: list[int]
    times: list[float]
    runs: list[int]


@dataclass(frozen=True)
class Baseline:
    """What others are compared with: the run `name`, with so many workers. Only with one it is called a speed-up."""

    name: str
    workers: int
    rate: float

    @property
    def title(self) -> str:
        """What a chart of times as fast is called."""
        if self.workers == 1:
            return "speed-up over one worker"
        return f"speed over that of {self.workers} workers, as no run with one was given"


def lines(runs: list[Run], value: str, *, against: str = "time", window: int = WINDOW) -> list[Line]:
    """The curves of `value` of all runs."""
    count = sum(len(run.story.logged.named.get(value, {})) for run in runs)
    stretches = max(20, _POINTS // 2 // max(1, count))
    found = [line for i, run in enumerate(runs) for line in _lines(i, run, value, window, stretches)]
    unit_s = time_unit(runs)[0]
    return [replace(line, xs=axis(runs[line.run], line.xs, against, unit_s=unit_s)) for line in found]


def _lines(i: int, run: Run, value: str, window: int, stretches: int) -> Iterator[Line]:
    """Those of one run, still against time since 1970."""
    curves = run.story.logged.named.get(value, {})
    for rank, series in sorted(curves.items()):
        if rank != CENTER and len(series):
            xs, ys = _shortened(np.array(series.xs), np.array(series.ys), stretches)
            yield Line(i, f"worker {rank}", False, xs, ys)
    whole = course(run.story, value, window=window)
    if len(whole):
        who = "center" if whole.is_center else "mean of the workers" if len(curves) > 1 else "running mean"
        if broken := run.story.logged.broken.get(value):
            who += f"; {broken:,} values were not finite"
        xs, ys = _shortened(whole.xs, whole.ys, _STRONG)
        yield Line(i, who, True, xs, ys)


def axis(run: Run, moments: np.ndarray, against: str, *, unit_s: float = 1.0) -> np.ndarray:
    """Where `moments` lie on the axis `against`; if that is time, in units of so many seconds."""
    if against == "time":
        return run.story.ran(moments) / unit_s
    samples = samples_at(moments, run.story.seen.values())
    return samples if against == "samples" else samples / max(1, run.story.epoch_size)


def time_unit(runs: list[Run]) -> tuple[float, str]:
    """The seconds of the unit that fits the longest of `runs`, and its name."""
    longest = max((run.story.totals().elapsed_s for run in runs), default=0.0)
    return next((seconds, name) for least, seconds, name in _UNITS if longest >= least)


def axis_words(against: str, unit: str) -> str:
    """What an axis is called."""
    words = {"time": f"{unit} since the first worker's start", "samples": "samples of all workers", "epochs": "epochs"}
    return words[against]


def known_axes(runs: list[Run]) -> list[str]:
    """The axes that all of `runs` can be drawn against."""
    has_samples = all(run.overall.unit == "samples" and run.story.seen for run in runs)
    has_epochs = has_samples and all(run.story.epoch_size for run in runs)
    return ["time", *(["samples"] if has_samples else []), *(["epochs"] if has_epochs else [])]


def check_axis(runs: list[Run], against: str) -> None:
    """All of `runs` can be drawn against it."""
    if against in known_axes(runs):
        return
    without = next(run for run in runs if against not in known_axes([run]))
    lack = "the size of an epoch is not known without worker.sampler" if against == "epochs" else "none were counted"
    raise InvalidArgument(
        f"{without.name} cannot be drawn against {against}: {lack}. Use --against {known_axes(runs)[-1]}, or leave the "
        "run out."
    )


def baseline(runs: list[Run]) -> Baseline | None:
    """The fastest of the runs with the fewest workers; None if none has made a step."""
    able = [run for run in runs if run.overall.rate > 0]
    if not able:
        return None
    first = min(able, key=lambda run: (run.workers, -run.overall.rate))
    return Baseline(first.name, first.workers, first.overall.rate)


def speedups(runs: list[Run]) -> list[Speedup]:
    """A curve for each rule; nothing if all runs have the same number of workers, or count different things."""
    base = baseline(runs)
    able = [run for run in runs if run.overall.rate > 0]
    if base is None or len({run.workers for run in able}) < 2 or len({run.overall.unit for run in able}) > 1:
        return []
    first = next(i for i, run in enumerate(runs) if run.name == base.name)
    rules: dict[str, list[tuple[int, float, int]]] = {}
    for i, run in enumerate(runs):
        if run.overall.rate > 0:
            rules.setdefault(run.rule, []).append((run.workers, run.overall.rate / base.rate, i))
    for points in rules.values():  # all begin where the baseline is, also those of other rules
        if base.workers not in (workers for workers, _, _ in points):
            points.append((base.workers, 1.0, first))
    return [Speedup(rule, *map(list, zip(*sorted(points), strict=True))) for rule, points in rules.items()]


def shares(run: Run) -> dict[str, float]:
    """Of all workers' time, the part that went for each of PARTS."""
    whole = sum(run.overall.split.values())
    return {part: run.overall.split[part] / whole if whole else 0.0 for part in PARTS}


def _shortened(xs: np.ndarray, ys: np.ndarray, stretches: int) -> tuple[np.ndarray, np.ndarray]:
    if len(xs) <= 2 * stretches:
        return xs, ys
    kept = extremes(xs, ys, stretches)
    return xs[kept], ys[kept]
