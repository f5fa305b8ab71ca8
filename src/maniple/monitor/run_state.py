"""State of a run, read from the rows in its folder while it is running or afterwards."""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, cast

import numpy as np

from maniple.clock import clock
from maniple.errors import InvalidArgument
from maniple.monitor.baseline import Baseline, recorded_baseline
from maniple.monitor.measures import MEASURES, Logged
from maniple.monitor.row_reader import ProgressRow, column, read_rows
from maniple.monitor.series import CENTER, NamedSeries, Series, TimeSplit
from maniple.monitor.target import Target, TargetSearch, TargetStatus, parse_target
from maniple.monitor.worker_state import Counts, Intervals, WorkerState
from maniple.record import Row, RunFolder, Tails
from maniple.record.events import parse_events

# Events of the host and the server about a worker, and the state they put it in.
_STATES = {
    "started": "starting",
    "joined": "training",
    "restarted": "training",
    "returned": "training",
    "given up": "lost",
    "lost": "lost",
    "left": "done",
}
# Events of workers that are too ordinary for a list of what happened.
_ORDINARY = {"join", "validated", "validation", "epoch", "sampler", "share", "leave", "waiting"}
_ASKED_TO_END = {143, -15, 130, -2}  # exit codes after SIGTERM and SIGINT
_MAX_EVENTS = 2000
_FINE_BUCKETS = 500_000  # of the finest series, over all workers; four points each, see Series
_BAD_VALUES = (KeyError, TypeError, ValueError, OverflowError)  # of a row that maniple did not write


@dataclass(frozen=True)
class Totals:
    """A run in a few numbers. `measures.RUN_MEASURES` says how each is shown.

    Attributes:
        samples_per_s, steps_per_s: of all live workers, now; once none is left, of each worker's whole time.
        elapsed_s: training time: since the first step of any worker, without pauses before a resumption.
        speedup: the rate since the first step / that of the measured baseline; None without a baseline.
        busy_workers: the sum over the workers of the share of their time that they compute. This is not a speed-up:
            workers that share few cores are all busy, and slow.
        goodput: share of all workers' time since the first step, including dead and absent ones, spent on training.
        staleness: exchanges that others made since a worker's last one, the mean over all; None without exchanges.
        version: exchanges or rounds that have changed the center, including those before a snapshot it came from.
        target: the run's target, if it has one; target_s: training time to it; target_speedup: the baseline's / this.
    """

    workers: int = 0
    live: int = 0
    steps: int = 0
    samples: int = 0
    elapsed_s: float = 0.0
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    busy_workers: float = 0.0
    goodput: float = 0.0
    sync_share: float = 0.0
    staleness: float | None = None
    bytes: int = 0
    version: int = 0
    speedup: float | None = None
    target: TargetStatus | None = None
    target_s: float | None = None
    target_speedup: float | None = None


@dataclass(frozen=True)
class Overall:
    """A run in a few numbers that are final once it has ended.

    Attributes:
        seconds: from the first step of any worker to the last, without pauses before a resumption.
        rate: samples of all workers per second since the first step; steps, where samples are not counted. `unit` says
            which. What was done in the first step itself does not count, since its duration is unknown.
        split: the seconds of all workers, by what they were spent on.
        busy_workers: the mean number of workers that computed.
        measures_data: all workers that made steps have measured the time between them.
    """

    seconds: float
    rate: float
    unit: str
    split: dict[str, float]
    busy_workers: float
    measures_data: bool


class RunState:
    """All that is known of a run. `refresh` reads new rows; nothing else changes it, except `mark_host_dead`.

    Args:
        workers: workers that were asked for; more are added as they appear.
        limit: points per series; 0 to choose by the number of workers.
        fine: a logged value to keep in many more points, so that it can be computed with: up to two million over all
            workers, and all of them if there are fewer.

    Attributes:
        workers: state of each worker, by rank.
        logged, measured: series of logged values and of measures, against time since 1970.
        time_splits, samples_seen: by rank, what the time was spent on, and the samples so far against time.
        live: the number of live workers against time.
        ages, together: histograms: exchanges by age of the parameters (see `replica.replica`), rounds by participants.
        happened: the newest events in the life of the run; `event_count` includes those dropped from it.
        since: when the first worker joined, or 0; `until`: time of the newest row.
        first_step: end of the first step of any worker, or 0: training time counts from here.
        baseline, target_search: what run.json says of them, see `describe`.
        epoch_size: samples of one epoch, or 0; `validations`: validations of the center so far.
        shared: the newest row in which a worker shared a model in this life of the run; empty before that.
        stop: when and why the controller stopped the run.
        exit_code: requested by the error of the first worker that failed.
        host_exit_code: exit code of the run; None while it is running.
    """

    def __init__(self, folder: RunFolder, *, workers: int = 0, limit: int = 0, fine: str = "") -> None:
        self.folder = folder
        self._initial_state = "queued" if folder.is_submitted else "starting"
        self.workers: dict[int, WorkerState] = {rank: WorkerState(self._initial_state) for rank in range(workers)}
        known = max(1, workers, len(folder.ranks()))
        limit = limit or max(150, min(500, 8000 // known))
        self.logged = NamedSeries(limit, {fine: max(limit, _FINE_BUCKETS // known)} if fine else None)
        self.measured = NamedSeries(limit)
        self.time_splits: dict[int, TimeSplit] = {}
        self.samples_seen: dict[int, Series] = {}
        self.live = Series(limit)
        self.ages: Counter[int] = Counter()
        self.together: Counter[int] = Counter()
        self.happened: deque[Row] = deque(maxlen=_MAX_EVENTS)
        self.event_count = 0
        self.since = self.until = self.first_step = 0.0
        self.baseline: Baseline | None = None
        self.target_search: TargetSearch | None = None
        self.epoch_size = self.validations = 0
        self.shared: Row = {}
        self.stop: tuple[float, str] = (0.0, "")
        self.exit_code: int | None = None
        self.host_exit_code: int | None = None
        self._staleness_sum, self._exchanges = 0.0, 0
        self._limit = limit
        self._ended = 0.0  # when the host ended
        self._starts: list[float] = []  # of the host: a resumed run has had several lives
        # By life of the run: from the first join to the newest row, and from the first step to the newest progress.
        self._joined: dict[int, tuple[float, float]] = {}
        self._trained: dict[int, tuple[float, float]] = {}
        self._restored, self._version = 0.0, 0  # when the center was restored from a snapshot, and its version then
        self._changes = 0  # exchanges with the center since then
        self._rounds: dict[int, int] = {}  # by life: the rounds so far, which are the same for all workers
        self._stepped: set[tuple[int, int]] = set()  # workers that have made a step, by rank and life
        self._first_steps = 0  # steps made when the training time begins
        self._known_to_host: set[int] = set()
        self._started_by_host: set[int] = set()
        self._tails = Tails(folder.path / "events")

    def describe(self, description: dict[str, Any]) -> None:
        """Take over what run.json says of the run's target and baseline. Call it before the first `refresh`."""
        self.baseline = recorded_baseline(description)
        asked = description.get("asked")
        text = cast(dict[str, Any], asked).get("target") if isinstance(asked, dict) else None
        with suppress(InvalidArgument):
            self.set_target(parse_target(text) if isinstance(text, str) else None)

    def set_target(self, target: Target | None) -> None:
        """Look for this target from now on. Call it before the first `refresh`, so that all points are kept."""
        if target != (self.target_search.target if self.target_search else None):
            self.target_search = TargetSearch(target) if target else None
        if target is not None:
            self.logged.keep_fine(target.name, max(self._limit, _FINE_BUCKETS // max(1, len(self.workers))))

    def target_status(self, *, is_last: bool = False) -> TargetStatus | None:
        """How far the run is from its target; None if it has none."""
        return None if self.target_search is None else self.target_search.status(self, is_last=is_last)

    def refresh(self, within_s: float | None = None) -> bool:
        """Read new rows, with `within_s` for about that many seconds. Returns False if there are more."""
        deadline = None if within_s is None else clock.monotonic() + within_s
        for who, lines in self._tails.pieces():  # host and server first: their word on workers takes precedence
            self._read(who, lines)
            if deadline is not None and clock.monotonic() > deadline:
                return False
        if self.host_exit_code is not None:  # else the host may come back while its workers train on
            for worker in self.workers.values():
                if not worker.is_gone:
                    worker.set_state("ended", self._ended)
        return True

    def mark_host_dead(self, seen: float) -> None:
        """The host was found dead at time `seen`, on this machine.

        Workers that it had started died with it; others count as lost. A run resumed since then is not affected.
        """
        if self.until > seen or self.host_exit_code is not None:
            return
        for rank, worker in self.workers.items():
            if not worker.is_gone:
                worker.set_state("dead" if rank in self._started_by_host else "lost", self.until)

    def totals(self) -> Totals:
        """The run in a few numbers, at the time of its newest row."""
        workers, total = self.workers.values(), self._total()
        split, spent_s = total.split, sum(total.split.values())
        live = [worker for worker in workers if not worker.is_gone]
        rates = [(one.values["samples_per_s"], one.values["steps_per_s"], one.compute_share) for one in live]
        rates = np.array(rates or [one.mean_rates for one in workers]).reshape(-1, 3).sum(axis=0).tolist()
        elapsed_s = float(self.elapsed_at(np.array([self.until]))[0]) if self.since or self.first_step else 0.0
        overall = None if self.baseline is None else self.overall()
        target = self.target_status()
        target_s = None if target is None else target.reached_s
        of_target = None if target is None or self.baseline is None else self.baseline.target_speedup(target)
        first = bisect_right(self._starts, self._restored) if self._restored else 0
        rounds = sum(made for life, made in self._rounds.items() if life >= first)
        return Totals(
            workers=len(workers),
            live=sum(one.state == "training" for one in workers),
            steps=total.step,
            samples=total.samples,
            elapsed_s=elapsed_s,
            samples_per_s=rates[0],
            steps_per_s=rates[1],
            busy_workers=rates[2],
            goodput=min(1.0, split["compute"] / (elapsed_s * len(workers))) if elapsed_s and workers else 0.0,
            sync_share=(split["exchange"] + split["others"]) / spent_s if spent_s else 0.0,
            staleness=self._staleness_sum / self._exchanges if self._exchanges else None,
            bytes=total.bytes,
            version=self._version + self._changes + rounds,
            speedup=self.baseline.speedup(overall.rate, overall.unit) if self.baseline and overall else None,
            target=target,
            target_s=target_s,
            target_speedup=of_target,
        )

    def overall(self) -> Overall:
        """The run as a whole, from the first step to the last."""
        total = self._total()
        last = max((float(one.intervals[-1, 1]) for one in self.time_splits.values() if len(one)), default=0.0)
        seconds = float(self.elapsed_at(np.array([last]))[0]) if last else 0.0
        measured = [worker.measures_data for worker in self.workers.values() if worker.total.step]
        made: float = total.step - self._first_steps
        if total.samples:
            made = total.samples - float(self.samples_at(np.array([self.first_step]))[0])
        return Overall(
            seconds=seconds,
            rate=made / seconds if seconds > 0 else 0.0,
            unit="samples" if total.samples or not total.step else "steps",
            split=total.split,
            busy_workers=total.split["compute"] / seconds if seconds > 0 else 0.0,
            measures_data=bool(measured) and all(measured),
        )

    def _total(self) -> Counts:
        return sum((worker.total for worker in self.workers.values()), Counts())

    def elapsed_at(self, moments: np.ndarray) -> np.ndarray:
        """Training time at each of `moments`: seconds since the first step of any worker, without pauses; 0 before it.

        A pause lasts from the last row before the run ended, or its host died, until the first step after it was
        resumed. If no step was recorded, the time counts from the first join.
        """
        seconds = moments - (self.first_step or self.since)
        by_life = self._trained or self._joined
        spans = [by_life[life] for life in sorted(by_life)]
        for (_, last), (first, _) in pairwise(spans):
            seconds = seconds - np.clip(moments - last, 0.0, max(0.0, first - last))
        return np.maximum(0.0, seconds)

    def samples_at(self, moments: np.ndarray) -> np.ndarray:
        """The samples of all workers at each of `moments`."""
        return sum_samples(moments, self.samples_seen.values())

    def worker(self, rank: int) -> WorkerState:
        """The state of worker `rank`, which is created if nothing is known of it."""
        if rank not in self.workers:
            self.workers[rank] = WorkerState(self._initial_state)
        return self.workers[rank]

    def _read(self, who: str, lines: list[bytes]) -> None:
        rank = who.removeprefix("worker-")
        if rank.isdigit():
            for rows in read_rows(lines):
                with suppress(*_BAD_VALUES):
                    self._apply_worker_rows(int(rank), rows)
            return
        for row in parse_events(lines):
            with suppress(*_BAD_VALUES):
                self._apply_host_row(row)

    def _apply_host_row(self, row: Row) -> None:
        kind, when = row["event"], float(row["timestamp"])
        self.until = max(self.until, when)
        if kind == "start":
            self._start_life(row, when)
        elif kind == "end":
            self.host_exit_code, self._ended = row.get("exit_code"), when
        elif kind == "stop":
            self.stop = (when, str(row.get("reason")))
        elif kind == "restored":
            self._restored, self._changes = when, 0
            self._version = int(row.get("rounds") or row.get("updates", 0))
        elif "worker" in row:
            self._apply_membership(kind, row, when)
        if "live" in row:
            self.live.add([when], [float(row["live"])])
        self._add_event(row)

    def _apply_membership(self, kind: str, row: Row, when: float) -> None:
        """A worker has joined or left."""
        if kind == "started":
            self._started_by_host.add(int(row["worker"]))
        state = _state_at_exit(row) if kind == "exit" else _STATES.get(kind)
        if state is not None:
            self._known_to_host.add(int(row["worker"]))
            worker = self.worker(int(row["worker"]))
            worker.set_state(state, when)
            if kind == "exit":
                worker.killed_after_s = float(row.get("killed_after", 0.0))

    def _start_life(self, row: Row, when: float) -> None:
        """The host has started or resumed the run: earlier states of its workers do not count any more."""
        self.host_exit_code = self.exit_code = None
        self._started_by_host.clear()
        self._starts.append(when)
        if self.shared and self.shared["timestamp"] < when:
            self.shared = {}
        for rank in range(int(row.get("workers") or 0)):
            self.worker(rank).set_state(self._initial_state, when)

    def _apply_worker_rows(self, rank: int, rows: list[ProgressRow] | list[Row] | Row) -> None:
        worker = self.worker(rank)
        if isinstance(rows, dict):
            self._apply_worker_row(rank, worker, rows)
        elif isinstance(rows[0], ProgressRow):
            self._apply_progress(rank, worker, cast(list[ProgressRow], rows))
        else:
            self._apply_logged(rank, worker, cast(list[Row], rows))

    def _apply_worker_row(self, rank: int, worker: WorkerState, row: Row) -> None:
        kind, when = row["event"], float(row["timestamp"])
        self.until = max(self.until, when)
        if kind == "join":
            self.since = min(self.since or when, when)
            self._extend_span(self._joined, when, when)
            worker.join(row)
        elif kind == "leave":
            worker.is_unshared = bool(row.get("unshared"))
            if rank not in self._known_to_host:  # without a host there is no other report of it
                worker.set_state("failed" if row.get("failed") else "done", when)
        elif kind in {"waiting", "waited"}:
            worker.wait(row)
        elif kind in {"share", "changed"}:
            worker.share(row)
            oldest = max(self._starts, default=0.0)
            if kind == "share" and when >= max(oldest, self.shared.get("timestamp", 0.0)):
                self.shared = row
        elif kind == "validated":
            self.validations += 1
            self.logged.add_rows(CENTER, [row])
        elif kind == "sampler" and not row.get("validation"):
            self.epoch_size = self.epoch_size or int(row["size"])
        elif kind == "failed" and when >= max(self._starts, default=0.0):  # not in an earlier life
            self.exit_code = self.exit_code or row["exit_code"]
        if kind not in _ORDINARY:
            self._add_event({"worker": rank} | row)

    def _apply_logged(self, rank: int, worker: WorkerState, rows: list[Row]) -> None:
        self.logged.add_rows(rank, rows)
        self.until = max(self.until, rows[-1]["timestamp"])
        for measure in MEASURES:
            if isinstance(measure.source, Logged):
                key = measure.source.key
                values = (row[key] for row in reversed(rows) if key in row and not row.get("center"))
                if (value := next(values, None)) is not None:
                    worker.values[measure.name] = float(value)

    def _apply_progress(self, rank: int, worker: WorkerState, rows: list[ProgressRow]) -> None:
        before = worker.now.exchanges
        intervals = worker.progress(rows)
        made = np.diff(np.concatenate([[before], column(rows, "exchanges")]))
        self._changes += int(made[intervals.when > self._restored].sum())
        lives = np.searchsorted(self._starts, intervals.when, side="right")
        for life in np.unique(lives).tolist():
            own = lives == life
            self._rounds[life] = max(self._rounds.get(life, 0), int(column(rows, "rounds")[own].max()))
            made = np.flatnonzero(own & (column(rows, "step") > 0))
            if len(made):
                self._extend_training(life, (rank, worker.lives), rows, intervals, made)
        self.until = max(self.until, rows[-1].timestamp)
        time_split = self.time_splits.setdefault(rank, TimeSplit(self._limit))
        time_split.add(np.column_stack([intervals.when - intervals.seconds, intervals.when, intervals.split.T]))
        self._add_samples(rank, intervals)
        for name, values in intervals.measures.items():
            known = (values >= 0) & (intervals.seconds > 0)
            if known.any():
                self.measured.add(name, rank, intervals.when[known], values[known])
        made = np.fromiter((sum(row.ages) for row in rows), float)
        self._staleness_sum += float((column(rows, "staleness") * made).sum())
        self._exchanges += int(made.sum())
        ages = [row.ages for row in rows if row.ages]
        places = np.fromiter(chain.from_iterable(map(range, map(len, ages))), int)
        counts = np.fromiter(chain.from_iterable(ages), float)
        self.ages.update({k: int(count) for k, count in enumerate(np.bincount(places, counts))})
        for row in rows:
            for workers, count in row.together.items():
                self.together[int(workers)] += count

    def _extend_training(
        self, life: int, who: tuple[int, int], rows: list[ProgressRow], intervals: Intervals, made: np.ndarray
    ) -> None:
        """A worker, by its rank and its own life, reports steps in the rows `made`, in that life of the run."""
        first = made[0]
        begin = float(intervals.when[first] - intervals.seconds[first])
        self._extend_span(self._trained, begin, float(intervals.when[made].max()), life)
        # Only its first row tells when it began: timestamps of rows and its own clock differ by microseconds.
        if who not in self._stepped and (not self.first_step or begin < self.first_step):
            self.first_step = begin
            self._first_steps = rows[first].step if intervals.seconds[first] == 0 else 0
        self._stepped.add(who)

    def _add_samples(self, rank: int, intervals: Intervals) -> None:
        seen = self.samples_seen.setdefault(rank, Series(self._limit))
        begin = float(intervals.when[0] - intervals.seconds[0])
        if not len(seen) or begin > seen.xs[-1] + 1.0:  # it has started or returned, and saw nothing before
            seen.add([begin], [seen.ys[-1] if len(seen) else 0.0])
        seen.add(intervals.when, intervals.samples)

    def _extend_span(
        self, spans: dict[int, tuple[float, float]], first: float, last: float, life: int | None = None
    ) -> None:
        """A worker reports from `first` until `last`, in that life of the run or in the one at that time."""
        life = bisect_right(self._starts, last) if life is None else life
        first = max(first, self._starts[life - 1]) if life else first
        known = spans.get(life, (first, last))
        spans[life] = min(known[0], first), max(known[1], last)

    def _add_event(self, row: Row) -> None:
        self.event_count += 1
        self.happened.append(row)


def _state_at_exit(row: Row) -> str:
    """The state of a worker whose process has ended, by the row about its exit."""
    exit_code = row.get("exit_code")
    if exit_code == 0:
        return "done"
    if row.get("killed_after"):
        return "killed"
    if row.get("died"):
        return "dead"
    return "stopped" if row.get("stopped") or exit_code in _ASKED_TO_END else "failed"


def sum_samples(moments: np.ndarray, seen: Iterable[Series]) -> np.ndarray:
    """The sum at each of `moments` of the samples in `seen`, which are each worker's own against time, from 0 on."""
    total = np.zeros(len(moments))
    for series in seen:
        if len(series):
            total += np.interp(moments, np.array(series.xs), np.maximum.accumulate(np.array(series.ys)))
    return total
