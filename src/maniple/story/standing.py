"""Where one worker stands."""

from bisect import insort
from dataclasses import dataclass, field

import numpy as np

from maniple.record import Row
from maniple.record.times import PARTS
from maniple.story.rows import ProgressRow, column

BAD = frozenset({"failed", "dead", "lost", "killed"})  # states of those who have not come to their end
_GONE = BAD | {"done", "stopped", "ended"}
WAITING = frozenset({"starting", "queued"})  # of those who have not joined yet
_MOST_STATES = 1000


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

    def plus(self, other: "Counts") -> "Counts":
        """Both together."""
        return Counts(
            self.step + other.step,
            self.samples + other.samples,
            self.exchanges + other.exchanges,
            max(self.rounds, other.rounds),  # a worker that comes back takes the circle's count over
            self.bytes + other.bytes,
            self.elapsed_s + other.elapsed_s,
            {part: self.split[part] + other.split[part] for part in PARTS},
        )


@dataclass
class Travel:
    """What a worker did between its rows `progress`, in columns: one for each row."""

    when: np.ndarray
    seconds: np.ndarray
    split: np.ndarray  # a row for each of PARTS
    samples: np.ndarray  # of all its lives, so far
    measures: dict[str, np.ndarray]


@dataclass
class Standing:
    """Where one worker stands: its state, what it has done in this life (`now`) and in those before.

    Rates, `compute_share`, `staleness` and `cores` are of the newest stretch between two rows `progress`.
    """

    state: str = "starting"
    now: Counts = field(default_factory=Counts)
    before: Counts = field(default_factory=Counts)
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    bytes_per_s: float = 0.0
    compute_share: float = 0.0
    staleness: float | None = None
    sync_share: float = 0.0
    loss: float | None = None
    cores: float = 0.0
    memory_bytes: int = 0
    measures_data: bool = False  # else waiting for data may be in the time of compute
    node: str = ""
    rule: str = ""  # by which it shares, and when: as its newest row tells
    pace: str = ""
    lives: int = 0
    is_unshared: bool = False  # it has left, and had shared nothing with others
    waiting_for: list[int] = field(default_factory=list[int])  # the workers that it waits for, for a while already
    waiting_s: float = 0.0
    killed_after_s: float = 0.0  # for how long it had been told to end when the launcher killed it
    states: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])  # since when
    _last: ProgressRow | None = None

    @property
    def total(self) -> Counts:
        """What it has done in all its lives."""
        return self.now.plus(self.before)

    @property
    def is_gone(self) -> bool:
        """It does not train any more."""
        return self.state in _GONE

    @property
    def waiting(self) -> str:
        """`waiting for worker 2 (14 s)`; empty if it does not wait, or not for long."""
        if not self.waiting_s or self.is_gone:
            return ""
        names = ", ".join(map(str, self.waiting_for)) or "others"
        who = f"workers {names}" if len(self.waiting_for) > 1 else f"worker {names}" if self.waiting_for else names
        return f"waiting for {who} ({self.waiting_s:.0f} s)"

    @property
    def shown(self) -> str:
        """Its state in words."""
        return self.waiting or (f"killed after {self.killed_after_s:.0f} s" if self.state == "killed" else self.state)

    @property
    def mean_rates(self) -> tuple[float, float]:
        """Its samples and steps per second, over all of its time."""
        total = self.total
        return total.samples / max(1e-9, total.elapsed_s), total.step / max(1e-9, total.elapsed_s)

    @property
    def mean_compute_share(self) -> float:
        """The share of all of its time that it computed."""
        total = self.total
        return total.split[PARTS[0]] / max(1e-9, total.elapsed_s)

    def turn(self, state: str, when: float) -> None:
        """Its state was this from that moment on. It may be told of out of order: the latest counts.

        Of one that is known to have ended it is no news that it is not heard of any more.
        """
        insort(self.states, (when, state))
        del self.states[:-_MOST_STATES]
        *before, (_, latest) = self.states
        self.state = before[-1][1] if latest == "lost" and before and before[-1][1] in _GONE else latest
        if self.is_gone:
            self.still()

    def still(self) -> None:
        """It makes no steps, as far as is known."""
        self.steps_per_s = self.samples_per_s = self.bytes_per_s = self.cores = self.compute_share = 0.0

    def join(self, row: Row) -> None:
        """It has joined, for the first time or again: its own counts begin at zero."""
        self.before, self.now, self._last = self.total, Counts(), None
        self.waiting_for, self.waiting_s = [], 0.0
        self.lives += 1
        self.is_unshared = False
        self.node = str(row.get("node", ""))
        if self.state in WAITING:
            self.turn("training", max([row["timestamp"], *(when for when, _ in self.states[-1:])]))

    def wait(self, row: Row) -> None:
        """It waits for others, or did until now. It makes no steps meanwhile."""
        if row["event"] == "waited":
            self.waiting_for, self.waiting_s = [], 0.0
            return
        self.waiting_for, self.waiting_s = [int(rank) for rank in row["for"]], float(row["seconds"])
        self.steps_per_s = self.samples_per_s = self.bytes_per_s = 0.0

    def share(self, row: Row) -> None:
        """It shares a model by this rule and pace, from the beginning or since somebody has changed them."""
        self.rule, self.pace = str(row["rule"]), str(row["pace"])

    def progress(self, rows: list[ProgressRow]) -> Travel:
        """It tells how far it is, some times; gives what it did in between."""
        self.waiting_for, self.waiting_s = [], 0.0
        newest, before = rows[-1], self._last or ProgressRow(0.0, 0, 0, 0.0, cpu=rows[0].cpu)
        all_ = [before, *rows]
        seconds = np.diff(column(all_, "elapsed"))
        waits = np.array([np.diff(column(all_, part)) for part in PARTS[1:]])
        split = np.maximum(0.0, np.vstack([seconds - waits.sum(axis=0), waits]))
        rates = {
            name: np.diff(column(all_, of)) / np.maximum(seconds, 1e-9)
            for name, of in (("samples_per_s", "samples"), ("bytes_per_s", "bytes"), ("cores", "cpu"))
        }
        waited = {part: float(getattr(newest, part)) for part in PARTS[1:]}
        whole = {PARTS[0]: max(0.0, newest.elapsed - sum(waited.values())), **waited}
        made = (newest.step, newest.samples, newest.exchanges, newest.rounds, newest.bytes)
        self.now, self._last = Counts(*made, newest.elapsed, whole), newest
        self.sync_share, self.memory_bytes = newest.sync_share, newest.memory
        self.measures_data = newest.measures_data or newest.data > 0
        self.staleness = next((row.staleness for row in reversed(rows) if row.staleness >= 0), self.staleness)
        if not self.is_gone and seconds[-1] > 0:
            self.steps_per_s = (newest.step - all_[-2].step) / float(seconds[-1])
            self.compute_share = float(split[0, -1] / seconds[-1])
            for name, rate in rates.items():
                setattr(self, name, float(rate[-1]))
        return Travel(
            column(rows, "timestamp"),
            seconds,
            split,
            column(rows, "samples") + self.before.samples,
            {"sync_share": column(rows, "sync_share"), "staleness": column(rows, "staleness"), **rates}
            | {"memory_bytes": column(rows, "memory"), "gpu_memory_bytes": column(rows, "gpu_memory")},
        )
