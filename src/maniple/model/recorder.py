"""The recorder: where a worker's time goes, with losses and learning rates, as rows and as lines.

compute    training itself: all time that is nothing of the following
exchange   exchanges with the center or the circle
data       waiting for batches, and all else between a step and the next forward pass of a torch module
others     waiting for other workers
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from maniple.decisions import combined
from maniple.errors import InvalidArgument
from maniple.record.times import PARTS, shares
from maniple.worker import Replica, Worker
from maniple.worker.progress import totals

Split = dict[str, float]


class Window:
    """Some batches: their seconds, and the sums of what was measured."""

    def __init__(self) -> None:
        self.batches = 0
        self.split: Split = dict.fromkeys(PARTS, 0.0)
        self._values: dict[str, list[Any]] = {}

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.split.values())

    def add(self, split: Split, values: Mapping[str, Any]) -> None:
        """One more batch."""
        self.batches += 1
        for part in PARTS:
            self.split[part] += split[part]
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def means(self) -> dict[str, float]:
        """Of each thing measured. Only here numbers of a GPU are waited for."""
        return {name: sum(map(float, values)) / len(values) for name, values in self._values.items()}

    def row(self) -> dict[str, Any]:
        """Its times, for a row."""
        return {"batches": self.batches, "seconds": self.seconds, **self.split}


class Recorder:
    """Adds up times and losses, and tells them every few batches.

    A model's own calls, inside `train_iter`:

        recorder.start()
        ...                      load a batch
        recorder.end("data")

    Time that nobody tells of is compute, and exchanges, feeds and `Prefetch` tell of theirs themselves.

    Attributes:
        replica: this worker's copy of the parameters; `recorder.replica.samples = n` before a step of n samples.
        validated: the newest means over all validation data that this worker knows of.
    """

    def __init__(
        self, worker: Worker, replica: Replica, *, every: int, is_shown: bool, lr: Callable[[], float | None]
    ) -> None:
        self.replica = replica
        self.validated: dict[str, float] = {}
        self._worker, self._every, self._is_shown, self._lr = worker, every, is_shown, lr
        self._epoch = 0
        self._window, self._whole, self._run = Window(), Window(), Window()
        self._means: list[tuple[dict[str, float], float]] = []  # of this epoch, with the batches of each
        self._told: Split = dict.fromkeys(PARTS, 0.0)
        self._before = totals(replica)
        self._has_told_data = False
        self._begin = self._since = time.perf_counter()
        self._at_start: Split = {}
        self._between_at_start = 0.0

    def start(self) -> None:
        """What follows belongs to the part that `end` names."""
        self._since, self._at_start = time.perf_counter(), totals(self.replica)
        self._between_at_start = self.replica.between.seconds

    def end(self, part: str) -> None:
        """The time since `start` was spent for `part`: compute, exchange, data or others."""
        if part not in PARTS:
            raise InvalidArgument(f"{part!r} is no part of the time (there are {', '.join(PARTS)}). Name one of them.")
        now = totals(self.replica)
        counted = sum(now[name] - self._at_start.get(name, now[name]) for name in now)  # by itself, already
        between = max(0.0, self.replica.between.seconds - self._between_at_start) if self._at_start else 0.0
        self._told[part] += max(0.0, time.perf_counter() - self._since - (counted - between))
        self._told["data"] -= between  # it is named here, and not counted twice
        self._has_told_data |= part == "data"

    def begin(self, epoch: int) -> None:
        """An epoch begins."""
        self._epoch = epoch
        self._window, self._whole, self._means = Window(), Window(), []
        self._next(time.perf_counter())

    def batch(self, values: Mapping[str, Any]) -> None:
        """A batch is done."""
        now = time.perf_counter()
        split = self._split(now)
        for window in (self._window, self._whole, self._run):
            window.add(split, values if window is self._window else {})
        self._next(now)
        if self._window.batches == self._every:
            self.tell()

    def tell(self) -> None:
        """Write and print what was recorded since the last time."""
        window, self._window = self._window, Window()
        if not window.batches:
            return
        means, lr = window.means(), self._lr()
        self._means.append((means, window.batches))
        where = {"epoch": self._epoch, "batch": self._whole.batches, "lr": lr}
        is_measured = self._measures_data(window)
        self._worker.record("times", **where, **window.row(), measures_data=is_measured, **means)
        self._worker.log(**where, **means)
        rate = "" if lr is None else f", lr {lr:.4g}"
        made = f"epoch {self._epoch}, batch {self._whole.batches}"
        self._show(f"{made}: {_values(means)}{rate}; {shares(window.split, measures_data=is_measured)}")

    def finish(self, means: Mapping[str, float]) -> dict[str, Any]:
        """The epoch is over; gives its row."""
        row = {"epoch": self._epoch, "lr": self._lr(), **self._whole.row(), **combined(self._means), **means}
        self._worker.record("epoch", **row)
        return row

    def looked(self, part: Mapping[str, Any], means: Mapping[str, float]) -> None:
        """This worker has looked at its part of the validation data."""
        self._worker.record("validation", epoch=self._epoch, **part, **means)

    def found(self, means: Mapping[str, float], *, is_told: bool) -> None:
        """The means over all validation data are known; of all who know them, one tells."""
        self.validated = dict(means)
        if is_told:
            self._worker.record("validated", epoch=self._epoch, **means)
            show(f"epoch {self._epoch}, validation: {_values(means)}")

    def summary(self) -> None:
        """Print where the time of all epochs went."""
        if self._run.batches:
            where = shares(self._run.split, measures_data=self._measures_data(self._run))
            self._show(f"{self._run.batches} batches of this worker; {where}")

    def _split(self, now: float) -> Split:
        counted = totals(self.replica)
        split = {name: counted[name] - self._before[name] + self._told[name] for name in PARTS if name != "compute"}
        split["data"] = max(0.0, split["data"])
        return {"compute": max(0.0, now - self._begin - sum(split.values())), **split}

    def _measures_data(self, window: Window) -> bool:
        return self._has_told_data or self.replica.between.is_measured or window.split["data"] > 0

    def _next(self, now: float) -> None:
        self._begin, self._before = now, totals(self.replica)
        self._told = dict.fromkeys(PARTS, 0.0)

    def _show(self, line: str) -> None:
        if self._is_shown:
            show(line)


def show(line: str) -> None:
    """Print a line, if somebody reads: a pipe that is closed does not end the training."""
    with suppress(OSError, ValueError):
        print(line, flush=True)


def _values(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in means.items())
