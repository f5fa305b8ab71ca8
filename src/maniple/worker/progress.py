"""Rows `progress`: how far a worker is, where its time went and what its exchanges did, about twice a second; and
those of single exchanges, as far as there is room for them."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from maniple.contracts import Outcome
from maniple.feed.waits import lost_s
from maniple.record import Events

_EVERY_S = 0.5
_HOUR_S, _LATER_S = 3600.0, 2.0  # after so long, only every so often: a long run is looked at less closely
_ALL, _ACTS_S = 1000, 1.0  # rows of single acts: so many, then one in so many seconds
_SLOW = 10.0
_AGES = 16  # the last of them is for all that is older
_PAGE_BYTES = resource.getpagesize()


class Traveller(Protocol):
    """What is told of a replica."""

    steps: int
    total_samples: int

    @property
    def spent_s(self) -> float: ...
    @property
    def waited_s(self) -> float: ...
    @property
    def between(self) -> "Between": ...


def totals(replica: Traveller) -> dict[str, float]:
    """The seconds that are counted by themselves, since the start; the rest of the time is compute."""
    data = lost_s() + replica.between.seconds
    return {"exchange": replica.spent_s - replica.waited_s, "data": data, "others": replica.waited_s}


class Between:
    """The time from the end of a step to the next forward pass that trains: loading data, and whatever else a script
    does there, such as logging and validation.

    Args:
        counted: the seconds that are counted otherwise, such as exchanges and waiting for feeds.
    """

    def __init__(self, counted: Callable[[], float]) -> None:
        self._counted = counted
        self._seconds = self._before = 0.0
        self._since: float | None = None  # the end of a step that no forward pass has followed
        self._seen = self._unseen = 0  # steps with and without a forward pass before them

    @property
    def is_measured(self) -> bool:
        """Forward passes are seen. Those of compiled modules and of NumPy models are not."""
        return self._seen > 0 and self._seen >= self._unseen

    @property
    def seconds(self) -> float:
        """All of it so far."""
        if self._since is None or not self.is_measured:
            return self._seconds
        return self._seconds + max(0.0, time.perf_counter() - self._since - (self._counted() - self._before))

    def stepped(self) -> None:
        """A step has ended."""
        self._unseen += self._since is not None
        self._since, self._before = time.perf_counter(), self._counted()

    def forward(self) -> None:
        """A forward pass begins; only the first after a step counts."""
        if self._since is not None:
            self._seen += 1
            self._seconds, self._since = self.seconds, None


class Progress:
    """Adds up what the exchanges of one replica do, and tells it from time to time.

    Of a row, `exchanges`, `rounds`, `bytes` and the seconds of each part are counted from the worker's start on;
    `staleness`, `ages` and `together` are those of the exchanges since the row before.
    """

    def __init__(self, events: Events) -> None:
        self.start = self.told = time.perf_counter()
        self._events = events
        self._exchanges = self._rounds = self._bytes = 0
        self._forget()

    def exchanged(self, outcome: Outcome) -> None:
        """An exchange with the center was made."""
        self._exchanges += 1
        self._bytes += outcome.size_bytes
        self._stale += outcome.staleness
        self._ages[min(_AGES - 1, int(outcome.staleness).bit_length())] += 1

    def met(self, workers: int, size_bytes: int) -> None:
        """A round of the circle was made, with the values of so many workers in it."""
        self._rounds += 1
        self._bytes += size_bytes
        self._together[workers] = self._together.get(workers, 0) + 1

    def stepped(self, replica: Traveller, now: float) -> None:
        """A step was made: tell of it, if it is time."""
        if now - self.told >= (_EVERY_S if now - self.start < _HOUR_S else _LATER_S):
            self.tell(replica, now)

    def tell(self, replica: Traveller, now: float) -> None:
        """Write the row."""
        self.told = now
        elapsed = now - self.start
        row: dict[str, Any] = {"exchanges": self._exchanges, "rounds": self._rounds, "bytes": self._bytes}
        if made := sum(self._ages):
            row |= {"staleness": self._stale / made, "ages": _trimmed(self._ages)}
        if self._together:
            row["together"] = self._together
        if replica.between.is_measured:
            row["measures_data"] = True
        self._forget()
        self._events.write(
            "progress",
            step=replica.steps,
            samples=replica.total_samples,
            elapsed=elapsed,
            sync_share=replica.spent_s / max(1e-9, elapsed),
            **totals(replica),
            **row,
            **_hardware(),
        )

    def _forget(self) -> None:
        self._stale = 0.0
        self._ages = [0] * _AGES  # ages[k]: how many were at least 2^(k-1) and below 2^k exchanges old; ages[0]: 0
        self._together: dict[int, int] = {}  # how many rounds were made by how many workers


class Acts:
    """Rows of single acts of one replica: an exchange, a pull, a push, a look.

    Their sums are in the rows `progress`, so that not each of them needs to be written for ever: of each kind the first
    thousand, then one a second. Acts that were refused or torn, or took ten times as long as others, are remarkable,
    and have as many rows beside. `skipped` tells how many of its kind came between a row and the one before it.
    """

    def __init__(self, events: Events, clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._clock = events, clock
        self._kinds: dict[str, _Kind] = {}
        self._remarkable = _Share()

    def write(self, event: str, *, duration: float, **values: Any) -> None:
        """An act was done: write a row of it, or count it."""
        kind = self._kinds.setdefault(event, _Kind())
        kind.seconds += duration
        kind.count += 1
        is_remarkable = "refused" in values or "torn" in values or duration > _SLOW * kind.seconds / kind.count
        values["duration"] = duration
        now = self._clock()
        if (is_remarkable and self._remarkable.is_due(now)) or kind.share.is_due(now):
            self._put(event, kind, values)
        else:
            kind.skipped += 1
            kind.last = values

    def finish(self) -> None:
        """Write the last of each kind, if it was not."""
        for event, kind in self._kinds.items():
            if kind.last is not None:
                kind.skipped -= 1
                self._put(event, kind, kind.last)

    def _put(self, event: str, kind: "_Kind", values: dict[str, Any]) -> None:
        skipped = {"skipped": kind.skipped} if kind.skipped else {}
        kind.skipped, kind.last = 0, None
        self._events.write(event, **values, **skipped)


class _Share:
    """How many rows there may be."""

    def __init__(self) -> None:
        self._left = _ALL
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        """One may be written now, and will be."""
        if self._left:
            self._left -= 1
        elif now < self._next:
            return False
        self._next = now + _ACTS_S
        return True


@dataclass
class _Kind:
    """The acts of one kind."""

    count: int = 0
    seconds: float = 0.0
    skipped: int = 0  # since the last row
    last: dict[str, Any] | None = None  # the newest, if it was skipped
    share: _Share = field(default_factory=_Share)


def _trimmed(counts: list[int]) -> list[int]:
    last = max(i for i, count in enumerate(counts) if count)
    return counts[: last + 1]


def _hardware() -> dict[str, Any]:
    """What this process uses: seconds of processors, bytes of memory and of its GPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    row: dict[str, Any] = {"cpu": used.ru_utime + used.ru_stime}
    try:
        row["memory"] = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        row["memory"] = used.ru_maxrss * 1024
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        row["gpu_memory"] = cuda.memory_allocated()
    return row
