"""Comparison of runs: the table of `maniple compare`, speed-ups, and the settings in which runs differ."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from maniple.monitor.measures import NOTHING, RUN_MEASURES, format_value
from maniple.watch.run_reader import WINDOW, Run, ValueSeries, value_series


@dataclass(frozen=True)
class Speedup:
    """Speeds of the runs of one rule in multiples of the baseline's, by number of workers.

    Attributes:
        runs: indices of these runs.
    """

    rule: str
    workers: list[int]
    times: list[float]
    runs: list[int]


@dataclass(frozen=True)
class Baseline:
    """The run that others are compared with. Only relative to one worker is this called a speed-up."""

    name: str
    workers: int
    rate: float

    @property
    def title(self) -> str:
        """Title of a chart of relative speeds."""
        if self.workers == 1:
            return "speed-up over one worker"
        return f"speed relative to {self.workers} workers (no run with one was given)"


def baseline(runs: list[Run]) -> Baseline | None:
    """The fastest of the runs with the fewest workers; None if no run has made a step."""
    able = [run for run in runs if run.overall.rate > 0]
    if not able:
        return None
    first = min(able, key=lambda run: (run.workers, -run.overall.rate))
    return Baseline(first.name, first.workers, first.overall.rate)


def speedups(runs: list[Run]) -> list[Speedup]:
    """One curve per rule; none if all runs have the same number of workers or if they count in different units."""
    base = baseline(runs)
    able = [run for run in runs if run.overall.rate > 0]
    if base is None or len({run.workers for run in able}) < 2 or len({run.overall.unit for run in able}) > 1:
        return []
    first = next(i for i, run in enumerate(runs) if run.name == base.name)
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
class CompareTarget:
    """A value to reach, from above if `falling`, else from below."""

    value: float
    falling: bool = True

    @property
    def text(self) -> str:
        """`at or below 0.5`."""
        return f"at or {'below' if self.falling else 'above'} {self.value:g}"


@dataclass(frozen=True)
class Summary:
    """The numbers by which a run is compared with others; None if unknown.

    Attributes:
        rate: samples (or steps: `unit`) of all workers per second, from the first step to the last.
        speedup: relative to the fastest run with one worker; None without one.
        measures: values of those RUN_MEASURES that are compared.
        final: the last value of the series (see `value_series`), of the center or of the workers (`final_of`).
        target_s, target_samples: when the series first reached the target, since the first worker's start.
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


def resolve_target(
    runs: list[Run], value: str, target: float, falling: bool | None, *, window: int = WINDOW
) -> CompareTarget:
    """The target and its direction: that of the first run's series, unless `falling` says so."""
    if falling is None:
        series = (value_series(run.state, value, window=window) for run in runs)
        falling = next((one.is_falling for one in series if len(one)), True)
    return CompareTarget(target, falling)


def summarize(
    runs: list[Run], value: str, *, target: CompareTarget | None = None, window: int = WINDOW
) -> list[Summary]:
    """The numbers of each run."""
    base = baseline(runs)
    found = [_summary(run, value_series(run.state, value, window=window), value, target) for run in runs]
    if base is None or base.workers != 1:
        return found
    first = next(one for one in found if one.name == base.name)
    return [_with_speedups(one, first) for one in found]


def _with_speedups(one: Summary, base: Summary) -> Summary:
    """`one` with its speed-ups over the run `base`, which has one worker."""
    if one.target_s and base.target_s:
        one = replace(one, target_speedup=base.target_s / one.target_s)
    if one.unit != base.unit or not one.rate:
        return one
    return replace(one, speedup=one.rate / base.rate)


def _summary(run: Run, series: ValueSeries, value: str, target: CompareTarget | None) -> Summary:
    state, overall, totals = run.state, run.overall, run.state.totals()
    reached = series.reaches(target.value, falling=target.falling) if target and len(series) else None
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
        measures={one.name: getattr(totals, one.name) for one in _COMPARED} | {"busy_workers": overall.busy_workers},
        final=float(series.ys[-1]) if len(series) else None,
        final_of="center" if series.is_center else "workers",
        not_finite=state.logged.non_finite.get(value, 0),
        target_s=None if moment is None else float(state.elapsed_at(moment)[0]),
        target_samples=None if moment is None or not state.samples_seen else float(state.samples_at(moment)[0]),
        target_speedup=None,
        exit_code=state.host_exit_code if exit_code is None else exit_code,
    )


def cells(one: Summary, value: str, target: CompareTarget | None) -> dict[str, str]:
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
