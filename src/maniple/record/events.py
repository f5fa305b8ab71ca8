"""Events: JSON lines, one file per process, each row appended in one write so that readers can follow live.

A file that has become large is continued in another: worker-3.jsonl, worker-3_000001.jsonl and so on. Files are only
ever appended to, and only the newest of a process grows.

Every row has `timestamp` (seconds since 1970) and `datestamp` (local time, to the minute), so that the series of
workers that started at different times share one axis.
"""

import errno
import glob
import json
import os
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from maniple.clock import clock
from maniple.record.rows import MAX_ROW_BYTES, BadRow, Row, decode_row

PART_BYTES = 64 << 20  # size at which a file is continued in another: one that editors and mirrors can still handle
_PART = re.compile(r"_\d{6}$")


def writer(name: str) -> str:
    """The process that has written the file `name`: worker-3, host or server."""
    return _PART.sub("", name.removesuffix(".jsonl"))


def parts(path: Path) -> list[Path]:
    """The files with the rows of one writer, oldest first; `path` is the first of them."""
    later = path.parent.glob(f"{glob.escape(path.stem)}_*{path.suffix}")
    return [path, *sorted(part for part in later if writer(part.name) == path.stem)]


def _next_part(path: Path) -> Path:
    number = int(path.stem[-6:]) if _PART.search(path.stem) else 0
    return path.with_name(f"{writer(path.name)}_{number + 1:06}{path.suffix}")


class Events:
    """Writes the rows of this process to a file or to `sink`. Each row contains `fields`."""

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
        """Append one row. A full disk loses rows but never stops training: it warns once and counts them."""
        if self._file < 0 and self._sink is None:
            return
        now = clock.time()
        if (minute := int(now // 60)) != self._minute:
            self._minute, self._datestamp = minute, time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
        head = {"event": event, "timestamp": now, "datestamp": self._datestamp} | self._fields
        row = head | values | head  # the event first, so that readers can skip rows by their first bytes
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
                with suppress(UserWarning):  # also where warnings are errors
                    warnings.warn(f"events are being lost: {error}. Training continues; free some disk.", stacklevel=2)

    def _encode(self, row: Row) -> bytes:
        try:
            return self._encoder.encode(row)
        except (TypeError, ValueError, UnicodeEncodeError):  # lone surrogates, or keys that are not strings
            return json.dumps(row, default=str, skipkeys=True).encode()

    def _append(self, line: bytes) -> None:
        if self._size_bytes and self._size_bytes + len(line) > PART_BYTES:
            with suppress(OSError):  # without a new file this one keeps growing
                file, self._is_torn = open_rows(_next_part(self._path))
                os.close(self._file)
                self._file, self._path, self._size_bytes = file, _next_part(self._path), os.fstat(file).st_size
        if self._is_torn:  # a full disk or a kill has cut the last row: end its line first
            line = b"\n" + line
        written = os.write(self._file, line)
        self._size_bytes += written
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Stop writing."""
        self._sink = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_rows(path: Path) -> tuple[int, bool]:
    """Open a file to append to. The flag is True if its last row was cut, by a kill or a full disk."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(file).st_size
        return file, bool(size) and os.pread(file, 1, size - 1) != b"\n"
    except OSError:
        os.close(file)
        raise


def append_rows(path: Path, rows: bytes) -> None:
    """Append whole rows that another process has sent, exactly once.

    If an attempt was cut short, by a full disk or a kill, the next one with the same rows continues where it ended.
    Rows have timestamps, so equal bytes at the end of the file are the same rows.
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
    """The number of bytes of `rows` that a file ending with `end` has already."""
    at = end.find(rows[: rows.find(b"\n") + 1] or rows)
    if at < 0:  # not even one whole row
        at = end.rfind(b"\n") + 1
    return len(end) - at if rows.startswith(end[at:]) else 0


class Tail:
    """Follows a growing text file from the byte `start` on."""

    def __init__(self, path: Path, *, start: int = 0) -> None:
        self._path, self._start = path, start
        self._file: int | None = None
        self._rest = b""

    def lines(self) -> list[bytes]:
        """The lines completed since the last call; none if the file does not exist or cannot be read now."""
        return [line for piece in self.pieces() for line in piece]

    def pieces(self) -> Iterator[list[bytes]]:
        """The same, a megabyte at a time: the files of a long run do not fit into memory."""
        while piece := self._piece():
            *complete, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > MAX_ROW_BYTES:  # an endless line is split, so that memory stays bounded
                complete.append(self._rest)
                self._rest = b""
            if complete:
                yield complete

    def _piece(self) -> bytes:
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                self._close = weakref.finalize(self, os.close, self._file)  # readers of many runs drop their tails
                os.lseek(self._file, self._start, os.SEEK_SET)
            return os.read(self._file, 1 << 20)
        except OSError:  # a file system that does not answer must not end a reader
            return b""

    @property
    def is_read(self) -> bool:
        """True if the file has been read to its present end."""
        with suppress(OSError):
            return self._file is not None and os.lseek(self._file, 0, os.SEEK_CUR) >= os.fstat(self._file).st_size
        return False

    def close(self) -> list[bytes]:
        """Stop following; returns the remaining lines, including an unfinished last one."""
        last = self.lines()
        if self._file is not None:
            self._close()
            self._file = None
        rest, self._rest = self._rest, b""
        return [*last, rest] if rest else last


class Tails:
    """Follows the rows of all processes in a folder of events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[str, Tail] = {}
        self._done: set[str] = set()  # files that are complete and read

    def pieces(self) -> Iterator[tuple[str, list[bytes]]]:
        """New lines with their writer, a megabyte at a time: host and server first, each writer's files in order."""
        names = sorted((path.name for path in self._folder.glob("*.jsonl")), key=lambda name: (writer(name), name))
        names.sort(key=lambda name: name.startswith("worker-"))
        unread = ""  # a writer whose file cannot be read to its end now; its next file has to wait
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


def parse_events(lines: list[bytes]) -> Iterator[Row]:
    """The valid rows in `lines`; those cut by a full disk or a crash, or not written by maniple, are skipped."""
    for line in lines:
        try:
            yield decode_row(line)
        except BadRow:
            continue


def read_events(path: Path) -> list[Row]:
    """All rows of one process; `path` is the first of its files."""
    return [row for part in parts(path) for row in parse_events(Tail(part).close())]


def _plain(value: Any) -> Any:
    """Values that JSON lacks: NumPy and torch scalars and arrays by `tolist`, anything else by `str`."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
