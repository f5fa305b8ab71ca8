"""Exports: the rows of a run for other programs. One module each; all offer what `Export` says.

Every number that was logged, found by validation or told by a row `progress` is given over, as it stands in its row;
names of the latter begin with `progress/`. Nothing is left out or averaged.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from maniple.errors import InvalidArgument
from maniple.record import Row

KINDS = ("csv", "tensorboard", "wandb", "mlflow")
CENTER = "center"


@dataclass(frozen=True)
class Instant:
    """When and where values were told.

    Attributes:
        who: the rank of a worker, or `center`.
        elapsed: seconds since the first worker's start.
        step: of the worker, in its present life.
        samples: of the worker, as it had told them last; None if it had not yet.
    """

    who: str
    timestamp: float
    elapsed: float
    step: int | None
    samples: int | None

    @property
    def name(self) -> str:
        """`worker-3`, or `center`."""
        return self.who if self.who == CENTER else f"worker-{self.who}"


class Export(Protocol):
    """Takes a run, row by row."""

    def settings(self, settings: Mapping[str, Any]) -> None:
        """What was asked of the run; once, before all else."""
        ...

    def values(self, instant: Instant, values: Mapping[str, float]) -> None:
        """The numbers of one row; some may be infinite or not a number."""
        ...

    def event(self, row: Row) -> None:
        """Something has happened in the life of the run: a worker came or went, and so on."""
        ...

    def close(self) -> None:
        """That was all: write what is left."""
        ...


def open_export(kind: str, run: str, place: str) -> Export:
    """An export of the run of that name to a folder, which must be new or empty, or to an address."""
    if "://" in place:
        if kind != "mlflow":
            raise InvalidArgument(f"{place} is an address, and {kind} needs a folder. Give a path with -o.")
    else:
        _make(Path(place))
    return importlib.import_module(f"maniple.watch.exports.{kind}").open_export(run, place)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise InvalidArgument(f"{folder} cannot be used: {error.strerror}. Give another folder with -o.") from None
    if not is_empty:
        raise InvalidArgument(
            f"{folder} is not empty, and an export never mixes with another. Remove it, or give another folder with -o."
        )
