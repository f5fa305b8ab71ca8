"""Events: one JSON row per line, one file per process, written whole so that a reader may follow live.

A file that has become large is followed by another: worker-3.jsonl, worker-3_000001.jsonl and so on. All are only ever
appended to, and the newest is the one that grows.

Every row has `timestamp` (seconds since 1970) and `datestamp` (to the minute, local time), by which the
curves of workers that started at different times come onto one clock.
"""

import errno
import glob
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from maniple.record.rows import MAX_ROW_BYTES, BadRow, Row, decode_row

PART_BYTES = 64 << 20  # of a file, before another is begun
_PART = re.compile(r"_\d{6}$")


def writer(name: str) -> str:
    """Who has written the file `name` in a folder of events: worker-3, host or server."""
    return _PART.sub("", name.removesuffix(".jsonl"))


def parts(path: Path) -> list[Path]:
    """The files with the rows of one writer, oldest first; `path` is the first of them."""
    later = path.parent.glob(f"{glob.escape(path.stem)}_*{path.suffix}")
    return [path, *sorted(part for part in later if writer(part.name) == path.stem)]


def _next_part(path: Path) -> Path:
    number = int(path.stem[-6:]) if _PART.search(path.stem) else 0
    return path.with_name(f"{writer(path.name)}_{number + 1:06}{path.suffix}")


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
            self._path = parts(path)[-1]
            self._file, self._is_torn = open_rows(self._path)
            self._size_bytes = os.fstat(self._file).st_size

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
                with suppress(UserWarning):  # where warnings are errors, too
                    warnings.warn(f"events are being lost: {error}. Training goes on; free some disk.", stacklevel=2)

    def _encode(self, row: Row) -> bytes:
        try:
            return self._encoder.encode(row)
        except (TypeError, ValueError, UnicodeEncodeError):  # lone surrogates, keys that are no words
            return json.dumps(row, default=str, skipkeys=True).encode()

    def _append(self, line: bytes) -> None:
        if self._size_bytes and self._size_bytes + len(line) > PART_BYTES:
            with suppress(OSError):  # where no file can be made, this one grows on
                file, self._is_torn = open_rows(_next_part(self._path))
                os.close(self._file)
                self._file, self._path, self._size_bytes = file, _next_part(self._path), os.fstat(file).st_size
        if self._is_torn:  # a full disk or a kill has cut the row before: end that line first
            line = b"\n" + line
        written = os.write(self._file, line)
        self._size_bytes += written
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Write no more."""
        self._sink = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_rows(path: Path) -> tuple[int, bool]:
    """Open a file to append to; True if it does not end with a newline, because who wrote it was killed meanwhile."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(file).st_size
        return file, bool(size) and os.pread(file, 1, size - 1) != b"\n"
    except OSError:
        os.close(file)
        raise


def append_rows(path: Path, rows: bytes) -> None:
    """Append whole rows that another process has sent, exactly once.

    If a try was cut short, by a full disk or a kill, the next one with the same rows goes on where it ended: rows have
    timestamps, so that what stands at the end of the file already is no other row that happens to be the same.
    """
    path = parts(path)[-1]
    file, is_cut = open_rows(path)
    try:
        size = os.fstat(file).st_size
        done = _overlap(os.pread(file, len(rows), max(0, size - len(rows))), rows)
        if not done and size and size + len(rows) > PART_BYTES:
            with suppress(OSError):
                following, is_cut = open_rows(_next_part(path))
                os.close(file)
                file = following
        rest = rows[done:] if done or not is_cut else b"\n" + rows
        while rest:
            rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)


def _overlap(end: bytes, rows: bytes) -> int:
    """How many bytes of `rows` the file has already, of which `end` is the end."""
    at = end.find(rows[: rows.find(b"\n") + 1] or rows)
    if at < 0:  # not even a whole row
        at = end.rfind(b"\n") + 1
    return len(end) - at if rows.startswith(end[at:]) else 0


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
            if len(self._rest) > MAX_ROW_BYTES:  # a line without an end comes in pieces: memory stays bounded
                complete.append(self._rest)
                self._rest = b""
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

    @property
    def is_read(self) -> bool:
        """All that the file has now was read."""
        with suppress(OSError):
            return self._file is not None and os.lseek(self._file, 0, os.SEEK_CUR) >= os.fstat(self._file).st_size
        return False

    def close(self) -> list[bytes]:
        """The remaining lines, the last one also if nothing ended it."""
        last = self.lines()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        rest, self._rest = self._rest, b""
        return [*last, rest] if rest else last


class Tails:
    """Follows the rows of all who write to a folder of events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[str, Tail] = {}
        self._done: set[str] = set()  # files that are read, and grow no more

    def pieces(self) -> Iterator[tuple[str, list[bytes]]]:
        """New lines with their writer, a megabyte at a time: host and server first, and each writer's in order."""
        names = sorted((path.name for path in self._folder.glob("*.jsonl")), key=lambda name: (writer(name), name))
        names.sort(key=lambda name: name.startswith("worker-"))
        unread = ""  # a writer whose file cannot be read to its end now: its next one has to wait
        for name, following in zip_longest(names, names[1:], fillvalue=""):
            if name in self._done or writer(name) == unread:
                continue
            tail = self._tails.setdefault(name, Tail(self._folder / name))
            for lines in tail.pieces():
                yield writer(name), lines
            if writer(following) == writer(name):
                if tail.is_read:
                    self._tails.pop(name).close()
                    self._done.add(name)
                else:
                    unread = writer(name)


def last_piece(path: Path, size_bytes: int = 1 << 20) -> list[bytes]:
    """The last lines of a file, about so many bytes of them; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size_bytes))
            return file.read().split(b"\n")
    except OSError:
        return []


def parse_events(lines: list[bytes]) -> Iterator[Row]:
    """The rows in `lines`; what was cut by a full disk or a crash, or cannot be a row of maniple's, is passed over."""
    for line in lines:
        try:
            yield decode_row(line)
        except BadRow:
            continue


def read_events(path: Path) -> list[Row]:
    """All rows of one writer; `path` is the first of its files."""
    return [row for part in parts(path) for row in parse_events(Tail(part).close())]


def _plain(value: Any) -> Any:
    """What JSON lacks: NumPy and torch scalars and arrays by their own `tolist`, anything else by name."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
