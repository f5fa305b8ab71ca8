"""One tidy table: a line for each number."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maniple.record import Row
from maniple.watch.exports import Export, Instant

COLUMNS = ("run", "worker", "timestamp", "elapsed", "step", "samples", "name", "value")
FILE = "values.csv"


class Csv:
    """Writes values.csv. Events and settings have no place in it: they are in the run folder, as JSON."""

    def __init__(self, run: str, folder: Path) -> None:
        self._run = run
        self._file = (folder / FILE).open("w", newline="")
        self._lines = csv.writer(self._file)
        self._lines.writerow(COLUMNS)

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Nothing to write."""

    def values(self, instant: Instant, values: Mapping[str, float]) -> None:
        """A line for each."""
        about = (self._run, instant.who, instant.timestamp, instant.elapsed, instant.step, instant.samples)
        self._lines.writerows((*about, name, value) for name, value in values.items())

    def event(self, row: Row) -> None:
        """Nothing to write."""

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def open_export(run: str, place: str) -> Export:
    """A new table in the folder `place`."""
    return Csv(run, Path(place))
