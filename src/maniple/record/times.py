"""Where the time of a model's training went, from the rows of a run. Pure, but for `read_times`."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument
from maniple.record.events import Row, read_events
from maniple.record.folder import Folder

# What a worker's time is spent for: training, exchanges, waiting for batches and what else is done between steps,
# waiting for other workers.
PARTS = ("compute", "exchange", "data", "others")
WORDS = dict(zip(PARTS, ("compute", "exchange", "data and other, between steps", "others"), strict=True))
UNMEASURED = "data not measured"


@dataclass
class Epoch:
    """One epoch of one worker, as far as rows tell of it."""

    number: int
    batches: int = 0
    split: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))  # seconds
    loss: float = 0.0
    lr: float | None = None
    measures_data: bool = False  # else waiting for data is in `compute`

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.split.values())

    def add(self, row: Row) -> None:
        """Some batches of it."""
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
    """A run: each worker's epochs, and what validation found after them."""

    workers: dict[int, list[Epoch]]
    validated: dict[int, dict[str, float]]


def read_times(run: Path) -> Times:
    """The times of a run, from its folder."""
    folder = Folder(run)
    spans = abandoned(read_events(folder.events("host")))
    rows = {rank: read_events(folder.events(rank)) for rank in folder.ranks()}
    times = gather({rank: [row for row in own if not _is_in(row, spans)] for rank, own in rows.items()})
    if not times.workers:
        raise InvalidArgument(
            f"{run} has no rows `times`. Give the folder of a run that was started by `maniple run --model`: runs/last."
        )
    return times


def abandoned(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """From when until when what was learned is not in the center any more: the run was resumed from an older one."""
    resumed = (row for row in rows if row.get("event") in {"restored", "adopted"})
    return [(float(row["saved"]), float(row["timestamp"])) for row in resumed if row.get("saved")]


def _is_in(row: Row, spans: list[tuple[float, float]]) -> bool:
    when = float(row.get("timestamp", 0.0))
    return any(after < when < until for after, until in spans)


def gather(rows: Mapping[int, Iterable[Row]]) -> Times:
    """The times that the rows of each worker tell of."""
    times = Times({}, {})
    for rank, own in rows.items():
        epochs: dict[int, Epoch] = {}
        for row in own:
            with suppress(KeyError, TypeError, ValueError, OverflowError):  # rows that somebody else has made up
                if row.get("event") == "times":
                    number = int(row["epoch"])
                    epochs.setdefault(number, Epoch(number)).add(row)
                elif row.get("event") == "validated":
                    times.validated[int(row["epoch"])] = _means(row)
        if epochs:
            times.workers[rank] = [epochs[number] for number in sorted(epochs)]
    return times


def shares(split: Mapping[str, Any], *, measures_data: bool) -> str:
    """`3.2 s: compute 91 %, exchange 9 %`, and whether that of data is not known."""
    whole = sum(split[part] for part in PARTS)
    parts = [f"{part} {100 * split[part] / whole:.0f} %" for part in PARTS if whole and split[part] / whole >= 0.005]
    return f"{whole:.1f} s: {', '.join([*parts, *([] if measures_data else [UNMEASURED])])}"


def _means(row: Row) -> dict[str, float]:
    about = {"event", "timestamp", "datestamp", "worker", "step", "epoch", "dropped"}
    return {name: float(value) for name, value in row.items() if name not in about and _is_number(value)}


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and abs(value) <= sys.float_info.max) or value in ("nan", "inf", "-inf")
