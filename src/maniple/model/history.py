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

from maniple.record import Folder, read_events
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
    except (OSError, msgspec.DecodeError):
        return None


def newest(run: Path | None) -> tuple[Path, Training] | None:
    """The newest epoch that was kept of this run, but none from after the center that it began again from."""
    if run is None:
        return None
    found = [(path, known) for path in (run / "center").glob("epoch-*") if (known := read(path)) is not None]
    for row in reversed(read_events(Folder(run).events("host"))):
        if row.get("event") == "restored":
            name, began = row["snapshot"], row["timestamp"]
            since = [pair for pair in found if pair[1].saved >= began]
            found = since or [(p, k) for p, k in found if p.name == name or k.saved <= row["saved"]]
            break
    return max(found, key=lambda pair: pair[1].saved, default=None)


def load_optimizer(folder: Path, training: Training, optimizer: Any) -> None:
    """Give the optimizer the state that was kept."""
    if optimizer is not None and training.optimizer is not None:
        from maniple.adapters.moments import unpack

        unpack(optimizer, load_file(folder / _OPTIMIZER), training.optimizer)
