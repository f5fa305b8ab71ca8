"""TensorBoard: a sub-run for each worker and for the center, with the clock of the rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from maniple.record import Row
from maniple.watch.exports import Export, Instant
from maniple.watch.extras import need


class TensorBoard:
    """Writes event files that `tensorboard --logdir` shows."""

    def __init__(self, module: Any, folder: Path) -> None:
        self._module, self._folder = module, folder
        self._writers: dict[str, Any] = {}
        self._events = 0

    def settings(self, settings: Mapping[str, Any]) -> None:
        """As a text of the sub-run `run`."""
        text = msgspec.json.format(msgspec.json.encode(settings, enc_hook=str), indent=2).decode()
        self._writer("run").add_text("settings", f"```json\n{text}\n```", 0)

    def values(self, instant: Instant, values: Mapping[str, float]) -> None:
        """A point of a curve for each, at the row's step and time."""
        writer = self._writer(instant.name)
        for name, value in values.items():
            writer.add_scalar(name, value, instant.step, walltime=instant.timestamp)

    def event(self, row: Row) -> None:
        """As a text, numbered in the order in which they are read."""
        text = msgspec.json.encode(row, enc_hook=str).decode()
        self._writer("run").add_text("events", text, self._events, walltime=row["timestamp"])
        self._events += 1

    def close(self) -> None:
        """Write what is left."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, name: str) -> Any:
        if name not in self._writers:
            self._writers[name] = self._module.SummaryWriter(str(self._folder / name))
        return self._writers[name]


def open_export(run: str, place: str) -> Export:  # noqa: ARG001  TensorBoard names runs by their folders
    """Event files in the folder `place`."""
    module = need("tensorboardX", extra="tensorboard", what="an export to TensorBoard")
    return TensorBoard(module, Path(place))
