"""Events: one JSON row per line, one file per process, written whole so that a reader may follow live.

Every row has `timestamp` (seconds since 1970) and `datestamp` (to the minute, local time), by which the
curves of workers that started at different times come onto one clock.
"""

import errno
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

Row = dict[str, Any]


class Events:
    """The rows that this process writes, to a file or to a `sink`. `fields` stand in each of them."""

    def __init__(self, path: Path | None, *, sink: Callable[[bytes], None] | None = None, **fields: Any) -> None:
        self._fields = fields
        self._sink = sink
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._minute = -1
        self._datestamp = ""
        self._dropped = 0
        self._is_torn = False
        self._file = -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: str, /, **values: Any) -> None:
        """Append one row. A full disk costs rows, never the training: it is said once, and counted."""
        if self._file < 0 and self._sink is None:
            return
        now = time.time()
        if (minute := int(now // 60)) != self._minute:
            self._minute, self._datestamp = minute, time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
        head = {"event": event, "timestamp": now, "datestamp": self._datestamp} | self._fields
        row = head | values | head  # the event first: a reader can pass over kinds of rows that it does not need
        if self._dropped:
            row["dropped"] = self._dropped
        line = self._encode(row) + b"\n"
        if self._sink is not None:
            self._sink(line)
            return
        try:
            self._append(line)
            self._dropped = 0
        except OSError as error:
            self._dropped += 1
            if self._dropped == 1:
                warnings.warn(f"events are being lost: {error}. Training goes on; free some disk.", stacklevel=2)

    def _encode(self, row: Row) -> bytes:
        try:
            return self._encoder.encode(row)
        except (TypeError, ValueError, UnicodeEncodeError):  # lone surrogates, keys that are no words
            return json.dumps(row, default=str, skipkeys=True).encode()

    def _append(self, line: bytes) -> None:
        if self._is_torn:  # a full disk took a part of a row: end that line first
            line = b"\n" + line
        written = os.write(self._file, line)
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Write no more."""
        self._sink = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Tail:
    """Follows a growing text file and gives its complete new lines, from the byte `start` on."""

    def __init__(self, path: Path, *, start: int = 0) -> None:
        self._path, self._start = path, start
        self._file: int | None = None
        self._rest = b""

    def lines(self) -> list[bytes]:
        """The lines completed since the last call; none if the file is not there, or cannot be read now."""
        return [line for piece in self.pieces() for line in piece]

    def pieces(self) -> Iterator[list[bytes]]:
        """The same, a megabyte at a time: files of a long run are larger than what a reader wants to hold."""
        while piece := self._piece():
            *complete, self._rest = (self._rest + piece).split(b"\n")
            if complete:
                yield complete

    def _piece(self) -> bytes:
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                os.lseek(self._file, self._start, os.SEEK_SET)
            return os.read(self._file, 1 << 20)
        except OSError:  # a file system that does not answer must not end who looks at it
            return b""

    def close(self) -> list[bytes]:
        """The remaining lines, the last one also if nothing ended it."""
        last = self.lines()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        rest, self._rest = self._rest, b""
        return [*last, rest] if rest else last


def last_piece(path: Path, size_bytes: int = 1 << 20) -> list[bytes]:
    """The last lines of a file, about so many bytes of them; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size_bytes))
            return file.read().split(b"\n")
    except OSError:
        return []


def parse_events(lines: list[bytes]) -> Iterator[Row]:
    """The rows in `lines`; a line cut by a full disk or a crash is passed over."""
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=Row)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


def read_events(path: Path) -> list[Row]:
    """All rows of one file."""
    return list(parse_events(Tail(path).close()))


def _plain(value: Any) -> Any:
    """What JSON lacks: NumPy and torch scalars and arrays by their own `tolist`, anything else by name."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
