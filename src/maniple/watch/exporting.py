"""Giving the rows of a run over to an export, those that are there or, while it goes on, all that come."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from maniple.launch.whereabouts import find_host
from maniple.record import Folder, Row, Tails
from maniple.record.events import parse_events
from maniple.record.rows import MAX_ROW_BYTES
from maniple.story.curves import ABOUT, BROKEN
from maniple.story.rows import needed
from maniple.watch.exports import CENTER, Export, Instant

_LOOK_S, _SILENT_S = 0.5, 10.0
_ORDINARY = {"sampler", "epoch", "validation"}  # rows that are no events in the life of a run


class Exporting:
    """One run on its way to an export."""

    def __init__(self, run: Path, export: Export) -> None:
        self._folder = Folder(run)
        self._export = export
        self._tails = Tails(self._folder.path / "events")
        self._samples: dict[str, int] = {}
        self._since: float | None = None
        self.rows = 0

    def settings(self) -> None:
        """What was asked of the run."""
        about = self._folder.read()
        self._export.settings(about.get("asked") or {})

    def go_on(self) -> bool:
        """Give over what is new; False if there was nothing."""
        before = self.rows
        for who, lines in self._tails.pieces():
            for row in parse_events(needed(lines)):
                self._take(who.removeprefix("worker-"), row)
        return self.rows > before

    def follow(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Go on until the run has ended, or its host is gone and nothing new has come for a while."""
        news = time.monotonic()
        while True:
            has_ended = self._folder.read().get("exit_code") is not None  # before the look: no row is missed
            if self.go_on():
                news = time.monotonic()
            is_silent = time.monotonic() - news > _SILENT_S
            if has_ended or (is_silent and self._is_alone()):
                return
            sleep(_LOOK_S)

    def _is_alone(self) -> bool:
        about = self._folder.read()
        return bool(about.get("lineage")) and not find_host(self._folder.path).is_alive

    def _take(self, who: str, row: Row) -> None:
        if not isinstance(row.get("timestamp"), float) or not isinstance(row.get("event"), str):
            return  # somebody else has made it up
        self.rows += 1
        kind = row["event"]
        if kind == "progress":
            self._samples[who] = _whole(row.get("samples")) or 0
            self._give(who, row, {f"progress/{name}": value for name, value in numbers(row).items()})
        elif kind == "validated" or row.get("center"):
            self._give(CENTER, row, numbers(row), of=who)
        elif kind == "log":
            self._give(who, row, numbers(row))
        elif kind not in _ORDINARY:
            self._export.event(row)

    def _give(self, who: str, row: Row, values: Mapping[str, float], *, of: str | None = None) -> None:
        if not values:
            return
        if self._since is None:
            self._since = began(self._folder) or row["timestamp"]
        elapsed = row["timestamp"] - self._since
        samples = self._samples.get(of or who)
        self._export.values(Instant(who, row["timestamp"], elapsed, _whole(row.get("step")), samples), values)


def numbers(row: Row) -> dict[str, float]:
    """All numbers of a row; words and lists are none."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if name in ABOUT or isinstance(value, bool):
            continue
        if isinstance(value, int | float) or (isinstance(value, str) and value in BROKEN):
            with suppress(OverflowError):  # an integer that no float can hold
                found[name] = float(value)
    return found


def _whole(value: Any) -> int | None:
    """A count that other programs can store; None for what a script has logged under that name."""
    return value if type(value) is int and abs(value) < 1 << 63 else None


def began(folder: Folder) -> float | None:
    """When the first worker started: the earliest of their first rows."""
    firsts: list[float] = []
    for rank in folder.ranks():
        with folder.events(rank).open("rb") as file:
            firsts += [row["timestamp"] for row in parse_events([file.readline(MAX_ROW_BYTES)])]
    return min(firsts, default=None)
