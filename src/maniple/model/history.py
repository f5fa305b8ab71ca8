"""The history: what is kept with an epoch's snapshot, so that a run goes on with optimizer, learning rate and record.

center/epoch-0004/center-0.safetensors     the center after 4 epochs, by the host
                  optimizer.safetensors    the optimizer of the worker that was first to end them
                  training.json            its plain values, the epochs made, and a row for each of them
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors.numpy import load_file, save_file

from maniple.record import Folder, Row, read_events
from maniple.record.folder import write_json

_TRAINING, _OPTIMIZER = "training.json", "optimizer.safetensors"


class Training(msgspec.Struct):
    """How far training had come."""

    epochs: int = 0  # made
    rows: list[dict[str, Any]] = []  # one for each of them
    saved: float = 0.0
    optimizer: dict[str, Any] | None = None  # its plain values


def write(folder: Path, optimizer: Any, *, epochs: int, rows: Sequence[dict[str, Any]]) -> None:
    """Put beside a snapshot what it needs to go on from it."""
    plain: dict[str, Any] | None = None
    if optimizer is not None:
        from maniple.adapters.moments import packed

        arrays, plain = packed(optimizer)
        save_file({name: value.copy() for name, value in arrays.items()}, folder / _OPTIMIZER)
    write_json(folder / _TRAINING, Training(epochs, list(rows), time.time(), plain))


def read(folder: Path) -> Training | None:
    """What was put there; None if it is not whole."""
    try:
        return msgspec.json.decode((folder / _TRAINING).read_bytes(), type=Training)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def newest(run: Path | None, *, before_start: bool = False) -> tuple[Path, Training] | None:
    """The newest epoch that was kept of this run, but none from after the center that it began again from.

    With `before_start`, only what was kept before the run was started, or resumed, for the last time.
    """
    if run is None:
        return None
    found = [(path, known) for path in (run / "center").glob("epoch-*") if (known := read(path)) is not None]
    rows = read_events(Folder(run).events("host"))
    began = _began(rows)
    since = [pair for pair in found if pair[1].saved >= began]
    earlier = [pair for pair in found if pair[1].saved < began]
    for row in rows:
        if row["event"] == "restored" and row["timestamp"] >= began:
            earlier = [(p, k) for p, k in earlier if p.name == row.get("snapshot") or k.saved <= row.get("saved", 0.0)]
    return max(earlier if before_start else since or earlier, key=lambda pair: pair[1].saved, default=None)


def made(run: Path | None) -> int:
    """The epochs that some worker has ended since the run was started or resumed; 0: none."""
    if run is None:
        return 0
    folder = Folder(run)
    began = _began(read_events(folder.events("host")))
    rows = (row for rank in folder.ranks() for row in read_events(folder.events(rank)))
    ended = (row.get("epoch", 0) for row in rows if row["event"] == "epoch" and row["timestamp"] >= began)
    return max(ended, default=0)


def load_optimizer(folder: Path, training: Training, optimizer: Any) -> None:
    """Give the optimizer the state that was kept."""
    if optimizer is not None and training.optimizer is not None:
        from maniple.adapters.moments import unpack

        unpack(optimizer, load_file(folder / _OPTIMIZER), training.optimizer)


def _began(rows: Sequence[Row]) -> float:
    return max((row["timestamp"] for row in rows if row.get("event") == "start"), default=0.0)
