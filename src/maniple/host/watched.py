"""The host's half of being watched: it shows what tells of the run, and follows orders of one who knows the token.

Only run.json and the rows are shown: no token, no log, no parameter.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from maniple.center.segment import Segment
from maniple.center.shared import Shared
from maniple.changes import check_changes
from maniple.errors import BadFrame, InvalidArgument
from maniple.host.desk import Desk
from maniple.record import Events, Folder
from maniple.wire.stream import Stream
from maniple.wire.watching import NAME, PIECE_BYTES, Done, Files, Found, Order, Piece, Read

_SILENCE_S = 60.0  # a watcher that is silent for so long comes again when it has something to say
_MAX_ORDER_BYTES = 1 << 16
_LONGEST_NAME = 100


class Watched:
    """The watchers of one host. `save` writes a snapshot, and gives its folder."""

    def __init__(
        self, segment: Segment, folder: Folder, events: Events, desk: Desk, save: Callable[[], Path | None]
    ) -> None:
        self._segment, self._folder, self._events = segment, folder, events
        self._desk, self._save = desk, save
        self._lock = threading.Lock()
        self.count = 0  # connections of watchers

    def attend(self, stream: Stream, is_over: Callable[[], bool]) -> None:
        """Answer a watcher until it goes. An error ends the connection."""
        stream.set_timeout(_SILENCE_S)
        with self._lock:
            self.count += 1
        try:
            while True:
                message, size = stream.receive()
                said = stream.receive_bytes(size, at_most=_MAX_ORDER_BYTES)
                if isinstance(message, Files):
                    stream.send(Found(is_over()), msgspec.json.encode(self._files()))
                elif isinstance(message, Read):
                    stream.send(Piece(), self._piece(message.name, message.offset))
                elif isinstance(message, Order):
                    stream.send(Done(self._follow(message, said)))
                else:
                    raise BadFrame(f"{type(message).__name__} is nothing that a watcher says.")
        finally:
            with self._lock:
                self.count -= 1

    def _files(self) -> list[tuple[str, int, int]]:
        found: list[tuple[str, int, int]] = []
        for path in [self._folder.path / "run.json", *sorted((self._folder.path / "events").glob("*.jsonl"))]:
            name = str(path.relative_to(self._folder.path))
            if NAME.fullmatch(name) and path.is_file() and not path.is_symlink():
                about = path.stat()
                found.append((name, about.st_size, about.st_mtime_ns))
        return found

    def _piece(self, name: str, offset: int) -> bytes:
        if not NAME.fullmatch(name) or not 0 <= offset < 1 << 62:
            raise InvalidArgument(f"{name[:_LONGEST_NAME]!r} is not shown. Ask for run.json or events/*.jsonl.")
        try:
            file = os.open(self._folder.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidArgument(f"{name!r} cannot be shown: {error.strerror}. Ask which files there are.") from None
        try:
            return os.pread(file, PIECE_BYTES, offset)
        finally:
            os.close(file)

    def _follow(self, order: Order, said: bytearray) -> str:
        orders = {"stop": self._stop, "snapshot": self._snapshot, "change": self._change}
        if order.what not in orders:
            raise BadFrame(f"{order.what[:_LONGEST_NAME]!r} is no order of a watcher.")
        return orders[order.what](order.who[:_LONGEST_NAME], said)

    def _stop(self, who: str, said: bytearray) -> str:
        del said
        self._folder.stop()
        self._events.write("ordered", order="stop", asked_by=who)
        return "the host is told: it ends the workers, and saves the center when they have left"

    def _snapshot(self, who: str, said: bytearray) -> str:
        del said
        begin = time.perf_counter()
        try:
            path = self._save()
        except (OSError, TypeError, ValueError) as error:
            self._events.write("unsaved", error=str(error), asked_by=who)
            raise InvalidArgument(f"no snapshot could be written: {error}. Training goes on.") from error
        if path is None:
            raise InvalidArgument(
                "there is nothing to save: no worker shares a model yet. Ask again when training has begun."
            )
        self._events.write("snapshot", name=path.name, duration=time.perf_counter() - begin, asked_by=who)
        return path.name

    def _change(self, who: str, said: bytearray) -> str:
        try:
            settings = msgspec.json.decode(said, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"an order came with what is no JSON: {error}.") from None
        check_changes(settings, self._notes())
        changes = self._desk.change(settings)
        self._events.write("changed", number=changes.number, settings=settings, asked_by=who)
        words = ", ".join(f"{name}={value}" for name, value in settings.items())
        return f"change {changes.number}, {words}: the workers ({self._desk.live}) follow after their next beat"

    def _notes(self) -> list[str]:
        """The rules of all models that are shared."""
        notes: list[str] = []
        for path in sorted(self._segment.path.glob("center-*")):
            if (center := Shared.open(self._segment, path)) is not None:
                with closing(center):
                    notes.append(center.note)
        return notes
