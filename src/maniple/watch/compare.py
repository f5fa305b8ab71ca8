"""Runs side by side: the same numbers of each, and in which settings they differ."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from maniple.watch.course import WINDOW, Course, course
from maniple.watch.overlay import axis, baseline
from maniple.watch.runs import Run

_NOTHING = "–"


@dataclass(frozen=True)
class Target:
    """A value to be reached. If it is not `falling`, by rising to it."""

    value: float
    falling: bool = True

    @property
    def words(self) -> str:
        """`at or below 0.5`."""
        return f"at or {'below' if self.falling else 'above'} {self.value:g}"


@dataclass(frozen=True)
class Summary:
    """One run in the numbers that runs are compared by; None is not known.

    Attributes:
        rate: samples (or steps: `unit`) of all workers per second, from the first step to the last.
        busy_workers: how many workers were busy computing, in the mean.
        speedup: against the fastest run with one worker; not known without one.
        final: the last of the course of the value (see `course`), of the center or of the workers (`final_of`).
        target_s, target_samples: when the course first reached the target, since the first worker's start.
        target_speedup: the time that the baseline needed for it / this run's.
    """

    name: str
    path: str
    workers: int
    rule: str
    pace: str
    seconds: float
    samples: int
    steps: int
    unit: str
    rate: float
    busy_workers: float
    speedup: float | None
    sync_share: float
    staleness: float | None
    goodput: float
    final: float | None
    final_of: str
    not_finite: int
    target_s: float | None
    target_samples: float | None
    target_speedup: float | None
    exit_code: int | None

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def settle_target(runs: list[Run], value: str, target: float, falling: bool | None, *, window: int = WINDOW) -> Target:
    """The target with its direction: as told, else that in which the first run's course goes."""
    if falling is None:
        courses = [course(run.story, value, window=window) for run in runs]
        falling = next((one.is_falling for one in courses if len(one)), True)
    return Target(target, falling)


def summarize(runs: list[Run], value: str, *, target: Target | None = None, window: int = WINDOW) -> list[Summary]:
    """The numbers of each run."""
    base = baseline(runs)
    found = [_summary(run, course(run.story, value, window=window), value, target) for run in runs]
    if base is None or base.workers != 1:
        return found
    first = next(one for one in found if one.name == base.name)
    return [_measured(one, first) for one in found]


def _measured(one: Summary, base: Summary) -> Summary:
    """With speed-ups over the run `base`, which has one worker."""
    if one.target_s and base.target_s:
        one = replace(one, target_speedup=base.target_s / one.target_s)
    if one.unit != base.unit or not one.rate:
        return one
    return replace(one, speedup=one.rate / base.rate)


def _summary(run: Run, whole: Course, value: str, target: Target | None) -> Summary:
    story, overall, totals = run.story, run.overall, run.story.totals()
    reached = whole.reaches(target.value, falling=target.falling) if target and len(whole) else None
    exit_code = run.about.get("exit_code")
    return Summary(
        name=run.name,
        path=str(story.folder.path),
        workers=run.workers,
        rule=run.rule,
        pace=str(story.shared.get("pace", "")),
        seconds=totals.elapsed_s,
        samples=totals.samples,
        steps=totals.steps,
        unit=overall.unit,
        rate=overall.rate,
        busy_workers=overall.busy_workers,
        speedup=None,
        sync_share=totals.sync_share,
        staleness=story.staleness,
        goodput=totals.goodput,
        final=float(whole.ys[-1]) if len(whole) else None,
        final_of="center" if whole.is_center else "workers",
        not_finite=story.logged.broken.get(value, 0),
        target_s=None if reached is None else float(story.ran(np.array([reached]))[0]),
        target_samples=None if reached is None else _samples(run, reached),
        target_speedup=None,
        exit_code=story.host_exit_code if exit_code is None else exit_code,
    )


def _samples(run: Run, moment: float) -> float | None:
    return float(axis(run, np.array([moment]), "samples")[0]) if run.story.seen else None


def cells(one: Summary, value: str, target: Target | None) -> dict[str, str]:
    """The same as words, by the names of rows."""
    rows = {
        "run": one.name,
        "workers": str(one.workers),
        "rule": one.rule or _NOTHING,
        "pace": one.pace or _NOTHING,
        "time": f"{one.seconds:,.1f} s",
        "samples": f"{one.samples:,}" if one.samples else _NOTHING,
        "speed": f"{one.rate:,.0f} {one.unit}/s",
        "busy workers": f"{one.busy_workers:.2f}",
        "speed-up": _NOTHING if one.speedup is None else f"{one.speedup:.2f}",
        "sync share": f"{one.sync_share:.1%}",
        "staleness": _NOTHING if one.staleness is None else f"{one.staleness:.1f}",
        "goodput": f"{one.goodput:.0%}",
        f"last {value}": _final(one),
    }
    if target is not None:
        rows |= {
            f"time to {value} {target.words}": "never" if one.target_s is None else f"{one.target_s:,.1f} s",
            "samples to it": _NOTHING if one.target_samples is None else f"{one.target_samples:,.0f}",
            "speed-up to it": _NOTHING if one.target_speedup is None else f"{one.target_speedup:.2f}",
        }
    return rows | {"exit code": "none yet" if one.exit_code is None else str(one.exit_code)}


def _final(one: Summary) -> str:
    broken = f", {one.not_finite:,} not finite" if one.not_finite else ""
    return _NOTHING + broken if one.final is None else f"{one.final:.4g} ({one.final_of}{broken})"


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """The settings in which the runs are not all the same, with what each has."""
    told = [_told(run) for run in runs]
    names = dict.fromkeys(name for settings in told for name in settings)
    found = {name: [settings.get(name) for settings in told] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _told(run: Run) -> dict[str, Any]:
    """What was asked, what the workers shared by, and the versions that they had."""
    shared = {name: run.story.shared[name] for name in ("rule", "pace", "wire") if name in run.story.shared}
    versions = {f"version of {name}": version for name, version in (run.about.get("versions") or {}).items()}
    return run.asked | shared | versions
