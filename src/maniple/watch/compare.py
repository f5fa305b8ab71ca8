"""Comparison of runs: the table of `maniple compare`, speed-ups, and the settings in which runs differ."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from maniple.monitor.baseline import Baseline
from maniple.monitor.measures import NOTHING, RUN_MEASURES, format_value
from maniple.monitor.target import Target, TargetStatus
from maniple.monitor.value_series import WINDOW, ValueSeries, value_series
from maniple.watch.run_reader import Run

NOT_GIVEN = -1  # in place of the index of a run


@dataclass(frozen=True)
class Speedup:
    """Speeds of the runs of one rule in multiples of the baseline's, by number of workers.

    Attributes:
        runs: indices of these runs; NOT_GIVEN for a recorded baseline that is not among them.
    """

    rule: str
    workers: list[int]
    times: list[float]
    runs: list[int]


def baseline(runs: list[Run]) -> Baseline | None:
    """What the speed of the runs is compared with; None if no run has made a step.

    The fastest of the runs with one worker; without one, the fastest of the baselines that the runs have recorded;
    without any, the fastest of the runs with the fewest workers.
    """
    able = [run for run in runs if run.overall.rate > 0]
    if not able:
        return None
    first = min(able, key=lambda run: (run.workers, -run.overall.rate))
    recorded = [run.state.baseline for run in able if run.state.baseline is not None]
    if first.workers > 1 and recorded:
        return max(recorded, key=lambda one: one.rate)
    return first.as_baseline


def speedups(runs: list[Run]) -> list[Speedup]:
    """One curve per rule; none if there is one number of workers only, or if units differ."""
    base = baseline(runs)
    able = [run for run in runs if run.overall.rate > 0]
    if base is None or len({base.workers, *(run.workers for run in able)}) < 2:
        return []
    if {base.unit} != {run.overall.unit for run in able}:
        return []
    first = next((i for i, run in enumerate(runs) if run.path == base.path), NOT_GIVEN)
    rules: dict[str, list[tuple[int, float, int]]] = {}
    for i, run in enumerate(runs):
        if run.overall.rate > 0:
            rules.setdefault(run.rule, []).append((run.workers, run.overall.rate / base.rate, i))
    for points in rules.values():  # every curve starts at the baseline, also those of other rules
        if base.workers not in (workers for workers, _, _ in points):
            points.append((base.workers, 1.0, first))
    return [Speedup(rule, *map(list, zip(*sorted(points), strict=True))) for rule, points in rules.items()]


_COMPARED = [measure for measure in RUN_MEASURES if measure.is_compared]


@dataclass(frozen=True)
class Summary:
    """The numbers by which a run is compared with others; None if unknown.

    Attributes:
        rate: samples (or steps: `unit`) of all workers per second, from the first step to the last.
        speedup: relative to `baseline`, a measured run with one worker; None without one.
        measures: values of those RUN_MEASURES that are compared.
        final: the last value of the series (see `value_series`), of the center or of the workers (`final_of`).
        target_s, target_samples: when the series first reached the target, since the first step of any worker.
        target_speedup: the baseline's time to the target / this run's.
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
    speedup: float | None
    baseline: str
    measures: dict[str, float | None]
    final: float | None
    final_of: str
    not_finite: int
    target_s: float | None
    target_samples: float | None
    target_speedup: float | None
    exit_code: int | None

    def as_row(self) -> dict[str, Any]:
        """For JSON, with the measures by their own names."""
        row = asdict(self)
        return row | row.pop("measures")


def resolve_target(runs: list[Run], target: Target, *, window: int = WINDOW) -> Target:
    """The target with one direction for all runs: that of the first run that has logged the value."""
    for run in runs:
        if (resolved := target.resolve(value_series(run.state, target.name, window=window))).falling is not None:
            return resolved
    return target


def summarize(runs: list[Run], value: str, *, target: Target | None = None, window: int = WINDOW) -> list[Summary]:
    """The numbers of each run. `target` is one of `value`, with its direction."""
    base = baseline(runs)
    found = [_summary(run, value_series(run.state, value, window=window), target) for run in runs]
    if base is None or base.workers != 1:
        return found
    first = next((one for one in found if one.path == base.path), None)
    if first is not None:  # its time to the target, by the window that was asked for
        base = replace(base, target=str(target or ""), target_s=first.target_s)
    return [_with_speedups(one, base, target) for one in found]


def _with_speedups(one: Summary, base: Baseline, target: Target | None) -> Summary:
    """`one` with its speed-ups over the baseline, which has one worker."""
    speedup = base.speedup(one.rate, one.unit)
    if target is None:
        return replace(one, speedup=speedup, baseline=base.name)
    status = TargetStatus(target.name, target.value, target.falling, one.target_s)
    return replace(one, speedup=speedup, baseline=base.name, target_speedup=base.target_speedup(status))


def _summary(run: Run, series: ValueSeries, target: Target | None) -> Summary:
    state, overall, totals = run.state, run.overall, run.state.totals()
    reached = target.reached(series) if target is not None else None
    moment = None if reached is None else np.array([reached])
    exit_code = run.description.get("exit_code")
    return Summary(
        name=run.name,
        path=str(state.folder.path),
        workers=run.workers,
        rule=run.rule,
        pace=str(state.shared.get("pace", "")),
        seconds=totals.elapsed_s,
        samples=totals.samples,
        steps=totals.steps,
        unit=overall.unit,
        rate=overall.rate,
        speedup=None,
        baseline="",
        measures={one.name: getattr(totals, one.name) for one in _COMPARED} | {"busy_workers": overall.busy_workers},
        final=float(series.ys[-1]) if len(series) else None,
        final_of="center" if series.is_center else "workers",
        not_finite=state.logged.non_finite.get(series.name, 0),
        target_s=None if moment is None else float(state.elapsed_at(moment)[0]),
        target_samples=None if moment is None or not state.samples_seen else float(state.samples_at(moment)[0]),
        target_speedup=None,
        exit_code=state.host_exit_code if exit_code is None else exit_code,
    )


def cells(one: Summary, value: str, target: Target | None) -> dict[str, str]:
    """The same for a person, by the names of rows."""
    rows = {
        "run": one.name,
        "workers": str(one.workers),
        "rule": one.rule or NOTHING,
        "pace": one.pace or NOTHING,
        "time": f"{one.seconds:,.1f} s",
        "samples": f"{one.samples:,}" if one.samples else NOTHING,
        "speed": f"{one.rate:,.0f} {one.unit}/s",
        "speed-up": NOTHING if one.speedup is None else f"{one.speedup:.2f}",
        **{row.label: format_value(row.format, one.measures[row.name]) for row in _COMPARED},
        f"last {value}": _final(one),
    }
    if target is not None:
        rows |= {
            f"time to {value} {target.text}": "never" if one.target_s is None else f"{one.target_s:,.1f} s",
            "samples to it": NOTHING if one.target_samples is None else f"{one.target_samples:,.0f}",
            "speed-up to it": NOTHING if one.target_speedup is None else f"{one.target_speedup:.2f}",
        }
    return rows | {"exit code": "none yet" if one.exit_code is None else str(one.exit_code)}


def _final(one: Summary) -> str:
    non_finite = f", {one.not_finite:,} not finite" if one.not_finite else ""
    return NOTHING + non_finite if one.final is None else f"{one.final:.4g} ({one.final_of}{non_finite})"


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """The settings in which the runs differ, with the value of each run."""
    found = [_settings(run) for run in runs]
    names = dict.fromkeys(name for settings in found for name in settings)
    by_name = {name: [settings.get(name) for settings in found] for name in names}
    return {name: values for name, values in by_name.items() if any(value != values[0] for value in values)}


def _settings(run: Run) -> dict[str, Any]:
    """The options of a run, the rule, pace and wire format of its workers, and the versions of libraries."""
    shared = {name: run.state.shared[name] for name in ("rule", "pace", "wire") if name in run.state.shared}
    versions = {f"version of {name}": version for name, version in (run.description.get("versions") or {}).items()}
    return run.asked | shared | versions
