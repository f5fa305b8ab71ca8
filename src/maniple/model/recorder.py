"""The recorder: splits a worker's time into four parts, and reports them with losses and learning rates.

compute    training itself: all time that belongs to none of the following
exchange   exchanges with the center or the other workers
data       waiting for batches, and everything else between a step and the next forward pass of a torch module
others     waiting for other workers
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from maniple.controller import combined
from maniple.errors import InvalidArgument
from maniple.record.times import PARTS, shares
from maniple.replica.replica import totals
from maniple.worker import Replica, Worker

Split = dict[str, float]  # seconds by part


class Recorder:
    """Adds up times and losses, and reports them every few batches.

    A model may call it inside `train_iter`:

        recorder.start()
        ...                      load a batch
        recorder.end("data")

    Time that is not reported is compute; exchanges, feeds and `Prefetch` report theirs by themselves.

    Attributes:
        replica: this worker's copy of the parameters; set `recorder.replica.samples = n` before a step of n samples.
        validated: the newest means over all validation data that this worker knows of.
    """

    def __init__(
        self, worker: Worker, replica: Replica, *, every: int, is_shown: bool, lr: Callable[[], float | None]
    ) -> None:
        self.replica = replica
        self.validated: dict[str, float] = {}
        self._worker, self._every, self._is_shown, self._lr = worker, every, is_shown, lr
        self._epoch = 0
        self._window, self._whole, self._run = _Window(), _Window(), _Window()  # since the last report; epoch; run
        self._means: list[tuple[dict[str, float], float]] = []  # of the epoch's reports, with their batches
        self._reported: Split = dict.fromkeys(PARTS, 0.0)  # by `end`, in this batch
        self._reports_data = False
        self._before = totals(replica)
        self._begin = self._since = time.perf_counter()
        self._at_start: Split = {}
        self._between_at_start = 0.0

    def start(self) -> None:
        """Begin the time that `end` assigns to a part."""
        self._since, self._at_start = time.perf_counter(), totals(self.replica)
        self._between_at_start = self.replica.between.seconds

    def end(self, part: str) -> None:
        """Assign the time since `start` to `part`: compute, exchange, data or others."""
        if part not in PARTS:
            raise InvalidArgument(f"{part!r} is no part of the time. Use one of {', '.join(PARTS)}.")
        now = totals(self.replica)
        counted = sum(now[name] - self._at_start.get(name, now[name]) for name in now)  # what reports itself
        between = max(0.0, self.replica.between.seconds - self._between_at_start) if self._at_start else 0.0
        self._reported[part] += max(0.0, time.perf_counter() - self._since - (counted - between))
        self._reported["data"] -= between  # it is assigned here, and must not count twice
        self._reports_data |= part == "data"

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._epoch = epoch
        self._window, self._whole, self._means = _Window(), _Window(), []
        self._begin_batch(time.perf_counter())

    def batch(self, metrics: Mapping[str, Any]) -> None:
        """Add a finished batch."""
        now = time.perf_counter()
        split = self._split(now)
        for window in (self._window, self._whole, self._run):
            window.add(split, metrics if window is self._window else {})
        self._begin_batch(now)
        if self._window.batches == self._every:
            self.flush()

    def flush(self) -> None:
        """Record and print the batches since the last report."""
        window, self._window = self._window, _Window()
        if not window.batches:
            return
        means, lr = window.means(), self._lr()
        self._means.append((means, window.batches))
        where = {"epoch": self._epoch, "batch": self._whole.batches, "lr": lr}
        is_measured = self._measures_data(window)
        self._worker.record("times", **where, **window.row(), measures_data=is_measured, **means)
        self._worker.log(**where, **means)
        rate = "" if lr is None else f", lr {lr:.4g}"
        place = f"epoch {self._epoch}, batch {self._whole.batches}"
        self._show(f"{place}: {_values(means)}{rate}; {shares(window.split, measures_data=is_measured)}")

    def finish(self, means: Mapping[str, float]) -> dict[str, Any]:
        """End the epoch; records and returns its row."""
        row = {"epoch": self._epoch, "lr": self._lr(), **self._whole.row(), **combined(self._means), **means}
        self._worker.record("epoch", **row)
        return row

    def validation(self, means: Mapping[str, float], *, is_reported: bool) -> None:
        """Take over the means over all validation data; one of the workers that know them reports them."""
        self.validated = dict(means)
        if is_reported:
            self._worker.record("validated", epoch=self._epoch, **means)
            show(f"epoch {self._epoch}, validation: {_values(means)}")

    def summary(self) -> None:
        """Print the split of the time over all epochs."""
        if self._run.batches:
            where = shares(self._run.split, measures_data=self._measures_data(self._run))
            self._show(f"{self._run.batches} batches of this worker; {where}")

    def _split(self, now: float) -> Split:
        counted = totals(self.replica)
        split = {name: counted[name] - self._before[name] + self._reported[name] for name in PARTS if name != "compute"}
        split["data"] = max(0.0, split["data"])
        return {"compute": max(0.0, now - self._begin - sum(split.values())), **split}

    def _measures_data(self, window: "_Window") -> bool:
        return self._reports_data or self.replica.between.is_measured or window.split["data"] > 0

    def _begin_batch(self, now: float) -> None:
        self._begin, self._before = now, totals(self.replica)
        self._reported = dict.fromkeys(PARTS, 0.0)

    def _show(self, line: str) -> None:
        if self._is_shown:
            show(line)


class _Window:
    """Some batches: their seconds, and the sums of their metrics."""

    def __init__(self) -> None:
        self.batches = 0
        self.split: Split = dict.fromkeys(PARTS, 0.0)
        self._values: dict[str, list[Any]] = {}

    def add(self, split: Split, metrics: Mapping[str, Any]) -> None:
        self.batches += 1
        for part in PARTS:
            self.split[part] += split[part]
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value)

    def means(self) -> dict[str, float]:
        """The mean of each metric. Values on a GPU are waited for here, and not at every batch."""
        return {name: sum(map(float, values)) / len(values) for name, values in self._values.items()}

    def row(self) -> dict[str, Any]:
        return {"batches": self.batches, "seconds": sum(self.split.values()), **self.split}


def show(line: str) -> None:
    """Print a line. A closed pipe does not end the training."""
    with suppress(OSError, ValueError):
        print(line, flush=True)


def _values(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in means.items())
