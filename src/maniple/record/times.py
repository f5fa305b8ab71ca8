"""Time split of a model's training by epoch, from the rows of a run. Pure, except for `read_times`."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument
from maniple.record.events import Row, read_events
from maniple.record.folder import RunFolder
from maniple.record.rows import numbers

# What a worker's time is spent on: training, exchanges, loading data and anything else between steps, waiting for other
# workers.
PARTS = ("compute", "exchange", "data", "others")
WORDS = dict(zip(PARTS, ("compute", "exchange", "data and other, between steps", "waiting for others"), strict=True))
UNMEASURED = "data not measured"


@dataclass
class Epoch:
    """One epoch of one worker."""

    number: int
    batches: int = 0
    split: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))  # seconds
    loss: float = 0.0
    lr: float | None = None
    measures_data: bool = False  # else waiting for data counts as compute

    @property
    def seconds(self) -> float:
        """Its duration."""
        return sum(self.split.values())

    def add(self, row: Row) -> None:
        """Add the batches of one `times` row."""
        lr = float(row["lr"]) if row.get("lr") is not None else None
        batches, loss, split = int(row["batches"]), float(row["loss"]), [float(row[part]) for part in PARTS]
        self.loss = (self.loss * self.batches + loss * batches) / max(1, self.batches + batches)
        self.batches += batches
        self.lr = lr
        self.measures_data |= bool(row.get("measures_data")) or split[PARTS.index("data")] > 0
        for part, seconds in zip(PARTS, split, strict=True):
            self.split[part] += seconds


@dataclass
class Times:
    """Epochs of each worker, and the means of validations by epoch."""

    workers: dict[int, list[Epoch]]
    validated: dict[int, dict[str, float]]


def read_times(run: Path) -> Times:
    """Read the times of a run from its folder, without epochs that a resumption has discarded."""
    folder = RunFolder(run)
    spans = abandoned(read_events(folder.events("host")))
    rows = {rank: read_events(folder.events(rank)) for rank in folder.ranks()}
    times = gather({rank: [row for row in own if not _is_in(row, spans)] for rank, own in rows.items()})
    if not times.workers:
        raise InvalidArgument(
            f"{run} has no rows `times`. Give the folder of a run started by `maniple run --model`: runs/last."
        )
    return times


def abandoned(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Spans of time whose training is lost, because the run was resumed from an older snapshot."""
    resumed = (row for row in rows if row.get("event") in {"restored", "adopted"})
    return [(float(row["saved"]), float(row["timestamp"])) for row in resumed if row.get("saved")]


def _is_in(row: Row, spans: list[tuple[float, float]]) -> bool:
    when = float(row.get("timestamp", 0.0))
    return any(after < when < until for after, until in spans)


def gather(rows: Mapping[int, Iterable[Row]]) -> Times:
    """The times in the rows of each worker."""
    times = Times({}, {})
    for rank, own in rows.items():
        epochs: dict[int, Epoch] = {}
        for row in own:
            with suppress(KeyError, TypeError, ValueError, OverflowError):  # of a row that maniple did not write
                if row.get("event") == "times":
                    number = int(row["epoch"])
                    epochs.setdefault(number, Epoch(number)).add(row)
                elif row.get("event") == "validated":
                    means = numbers(row)
                    times.validated[int(means.pop("epoch"))] = means
        if epochs:
            times.workers[rank] = [epochs[number] for number in sorted(epochs)]
    return times


def shares(split: Mapping[str, Any], *, measures_data: bool) -> str:
    """`3.2 s: compute 91 %, exchange 9 %`, with a note if the time for data was not measured."""
    whole = sum(split[part] for part in PARTS)
    parts = [f"{part} {100 * split[part] / whole:.0f} %" for part in PARTS if whole and split[part] / whole >= 0.005]
    return f"{whole:.1f} s: {', '.join([*parts, *([] if measures_data else [UNMEASURED])])}"
