"""State of one worker: what it does now, its counts in this life and before, and the newest value of each measure."""

from bisect import insort
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maniple.monitor.measures import MEASURES, Latest, Rate, initial_values
from maniple.monitor.row_reader import ProgressRow, column
from maniple.record import Row
from maniple.record.times import PARTS

BAD = frozenset({"failed", "dead", "lost", "killed"})  # ended before its work was done
GONE = BAD | {"done", "stopped", "ended"}
WAITING = frozenset({"starting", "queued"})  # has not joined yet
_MAX_STATES = 1000  # of the history; a worker that restarts every minute fills it in half a day
_MIN_S = 1e-9  # divisor for intervals of no length
_COMPUTE = PARTS[0]
_FROM_FIRST = [one.source.key for one in MEASURES if isinstance(one.source, Rate) and not one.source.from_zero]


@dataclass
class Counts:
    """What a worker has done, in one life or in all of them."""

    step: int = 0
    samples: int = 0
    exchanges: int = 0
    rounds: int = 0
    bytes: int = 0
    elapsed_s: float = 0.0
    split: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))  # seconds

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.step + other.step,
            self.samples + other.samples,
            self.exchanges + other.exchanges,
            max(self.rounds, other.rounds),  # a worker that rejoins continues the count of all
            self.bytes + other.bytes,
            self.elapsed_s + other.elapsed_s,
            {part: self.split[part] + other.split[part] for part in PARTS},
        )


@dataclass
class Intervals:
    """What a worker did between its progress rows, in columns with one element per row.

    Attributes:
        when: end of each interval, in seconds since 1970.
        split: seconds by what they were spent on, a row for each of PARTS.
        samples: in total, over all lives of the worker.
        measures: series of those measures that have a chart.
    """

    when: np.ndarray
    seconds: np.ndarray
    split: np.ndarray
    samples: np.ndarray
    measures: dict[str, np.ndarray]


@dataclass
class WorkerState:
    """State of one worker.

    Attributes:
        now, before: counts since it was last started, and of its lives before.
        values: the newest value of each measure that is read from rows; rates are those of the newest interval.
        compute_share: share of the newest interval spent on computing.
        measures_data: the time between steps is measured; else waiting for data counts as computing.
        rule, pace: how it shares its model, as of its newest row.
        is_unshared: it has left and had shared nothing.
        waiting_for, waiting_s: workers that it has been blocked on, and for how long.
        killed_after_s: time between the request to end and SIGKILL.
        states: its history: since when it was in which state.
    """

    state: str = "starting"
    now: Counts = field(default_factory=Counts)
    before: Counts = field(default_factory=Counts)
    values: dict[str, Any] = field(default_factory=initial_values)
    compute_share: float = 0.0
    measures_data: bool = False
    node: str = ""
    rule: str = ""
    pace: str = ""
    lives: int = 0
    is_unshared: bool = False
    waiting_for: list[int] = field(default_factory=list[int])
    waiting_s: float = 0.0
    killed_after_s: float = 0.0
    states: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    _first: ProgressRow | None = None  # of this life: at its first step
    _last: ProgressRow | None = None

    @property
    def total(self) -> Counts:
        """Counts of all its lives."""
        return self.now + self.before

    @property
    def is_gone(self) -> bool:
        """True once it does not train any more."""
        return self.state in GONE

    @property
    def waiting(self) -> str:
        """`waiting for worker 2 (14 s)`; "" if it does not wait."""
        if not self.waiting_s or self.is_gone:
            return ""
        names = ", ".join(map(str, self.waiting_for)) or "others"
        who = f"workers {names}" if len(self.waiting_for) > 1 else f"worker {names}" if self.waiting_for else names
        return f"waiting for {who} ({self.waiting_s:.0f} s)"

    @property
    def state_text(self) -> str:
        """Its state for a person."""
        return self.waiting or (f"killed after {self.killed_after_s:.0f} s" if self.state == "killed" else self.state)

    @property
    def mean_rates(self) -> tuple[float, float, float]:
        """Over its whole time: samples per second, steps per second, and the share of time spent on computing."""
        total, seconds = self.total, max(_MIN_S, self.total.elapsed_s)
        return total.samples / seconds, total.step / seconds, total.split[_COMPUTE] / seconds

    def set_state(self, state: str, when: float) -> None:
        """Record that it was in `state` from `when` on. Rows of several writers arrive out of order: the latest counts.

        A worker that is known to have ended stays ended when its connection is lost later.
        """
        insort(self.states, (when, state))
        del self.states[:-_MAX_STATES]
        *before, (_, latest) = self.states
        self.state = before[-1][1] if latest == "lost" and before and before[-1][1] in GONE else latest
        if self.is_gone:
            self.clear_rates()

    def clear_rates(self) -> None:
        """Set all rates to zero: it makes no steps, as far as is known."""
        self.compute_share = 0.0
        self.values |= {one.name: 0.0 for one in MEASURES if isinstance(one.source, Rate)}

    def join(self, row: Row) -> None:
        """It has joined, for the first time or again: its own counts begin at zero."""
        self.before, self.now, self._first, self._last = self.total, Counts(), None, None
        self.waiting_for, self.waiting_s = [], 0.0
        self.lives += 1
        self.is_unshared = False
        self.node = str(row.get("node", ""))
        if self.state in WAITING:
            self.set_state("training", max([row["timestamp"], *(when for when, _ in self.states[-1:])]))

    def wait(self, row: Row) -> None:
        """It is blocked on other workers, or was until now."""
        if row["event"] == "waited":
            self.waiting_for, self.waiting_s = [], 0.0
            return
        self.waiting_for, self.waiting_s = [int(rank) for rank in row["for"]], float(row["seconds"])
        self.values |= {"steps_per_s": 0.0, "samples_per_s": 0.0, "bytes_per_s": 0.0}

    def share(self, row: Row) -> None:
        """It shares a model by this rule and pace, from the beginning or after a change of settings."""
        self.rule, self.pace = str(row["rule"]), str(row["pace"])

    def progress(self, rows: list[ProgressRow]) -> Intervals:
        """Apply progress rows; returns what it did between them.

        A worker writes a row at the end of its first step. Its training time begins there: start-up until then is in no
        interval, no rate and no split. Without such a row, the time begins where the worker's own clock does.
        """
        self.waiting_for, self.waiting_s = [], 0.0
        newest = rows[-1]
        if self._last is None:
            zero = ProgressRow(0.0, 0, 0, 0.0, **{key: getattr(rows[0], key) for key in _FROM_FIRST})
            self._first = self._last = rows[0] if rows[0].step == 1 else zero
        first = self._first or self._last
        all_ = [self._last, *rows]
        seconds = np.diff(column(all_, "elapsed"))
        waits = np.array([np.diff(column(all_, part)) for part in PARTS[1:]])
        split = np.maximum(0.0, np.vstack([seconds - waits.sum(axis=0), waits]))
        waited = {part: max(0.0, float(getattr(newest, part) - getattr(first, part))) for part in PARTS[1:]}
        elapsed_s = newest.elapsed - first.elapsed
        whole = {_COMPUTE: max(0.0, elapsed_s - sum(waited.values())), **waited}
        made = (newest.step, newest.samples, newest.exchanges, newest.rounds, newest.bytes)
        self.now, self._last = Counts(*made, elapsed_s, whole), newest
        self.measures_data = newest.measures_data or newest.data > 0
        has_rates = not self.is_gone and seconds[-1] > 0
        if has_rates:
            self.compute_share = float(split[0, -1] / seconds[-1])
        series: dict[str, np.ndarray] = {}
        for measure in MEASURES:
            if isinstance(source := measure.source, Latest):
                known = (getattr(row, source.key) for row in reversed(rows))
                if (value := next((value for value in known if value >= 0 or source.default >= 0), None)) is not None:
                    self.values[measure.name] = value
                values = column(rows, source.key)
            elif isinstance(source, Rate):
                values = np.diff(column(all_, source.key)) / np.maximum(seconds, _MIN_S)
                if has_rates:
                    self.values[measure.name] = float(values[-1])
            else:
                continue
            if measure.chart:
                series[measure.name] = values
        samples = column(rows, "samples") + self.before.samples
        when = column(rows, "timestamp")
        if all_[0].timestamp:
            # The last row is written when the worker leaves, perhaps long after its last step, where its time ends.
            when = np.minimum(when, column(all_, "timestamp")[:-1] + seconds)
        return Intervals(when, seconds, split, samples, series)
