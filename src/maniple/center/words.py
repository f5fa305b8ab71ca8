"""The words: how far each remote worker's contributions are in the center, in one file of the segment.

    0       head    rows in use, workers that were forgotten
    4096    rows    64 bytes each: word, time of the last connection's end, the worker's name

A worker has a row from its first connection on. When its connection ends, the row stays, since it may come back and
ask which of its contributions were applied. The host remembers 16,384 workers; whoever comes after that takes the row
of the one that has been away for the longest time. If that one asks after all, it is refused: nothing is guessed.

Only the server makes rows. Whoever finishes a contribution writes its word.
"""

import mmap
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from maniple.contracts import Array
from maniple.errors import SharedMemoryFull

ROWS = 16_384  # 1 MB: four times as many as can be connected at once
_FILE = "words"
_PAGE = 4096
_ROW = np.dtype([("word", "<i8"), ("stamp", "<i8"), ("name", "S32"), ("rest", "V16")])  # none lies across two pages
_USED, _FORGOTTEN = range(2)
NOBODY = np.zeros(0, _ROW)


class Words:
    """The table, mapped."""

    def __init__(self, segment: Path) -> None:
        path = segment / _FILE
        size = _PAGE + ROWS * _ROW.itemsize
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            memory = mmap.mmap(file, size)
        except OSError as error:
            raise SharedMemoryFull(
                f"no room in {segment} for the table of remote workers, {size / 1e6:.1f} MB ({error.strerror}). "
                "Enlarge it (`mount -o remount,size=8G /dev/shm`), or remove what fills it."
            ) from error
        finally:
            os.close(file)
        self.cells: Any = memoryview(memory).cast("q")
        self._rows: Array = np.frombuffer(memory, _ROW, ROWS, _PAGE)
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}
        self._away: OrderedDict[str, None] = OrderedDict()  # whose connection has ended, the longest away first
        rows = self.rows()
        for k in np.argsort(rows["stamp"], kind="stable"):
            if name := bytes(rows["name"][k]).decode(errors="replace"):
                self._known[name] = int(k)
                self._away[name] = None
        self._free = [int(k) for k in np.flatnonzero(rows["name"] == b"")]

    @staticmethod
    def is_there(segment: Path) -> bool:
        """Some remote worker was here."""
        return (segment / _FILE).exists()

    @property
    def forgotten(self) -> int:
        """Workers whose rows were taken by others."""
        return self.cells[_FORGOTTEN]

    def rows(self) -> Array:
        """A copy of all rows that were ever used."""
        return self._rows[: self.cells[_USED]].copy()

    def claim(self, worker: str) -> tuple[int, bool]:
        """The row of a worker that is connected now, which nobody takes from it; and whether it was known before."""
        with self._lock:
            self._away.pop(worker, None)
            if worker in self._known:
                return self._known[worker], True
            row = self._known[worker] = self._empty()
            self._rows["word"][row] = 0
            self._rows["name"][row] = worker.encode()  # last: a row without a name is nobody's
            self.cells[_USED] = max(self.cells[_USED], row + 1)
            return row, False

    def release(self, worker: str) -> None:
        """The connection of a worker has ended; it may come back."""
        with self._lock:
            if worker in self._known:
                self._rows["stamp"][self._known[worker]] = time.time_ns()
                self._away[worker] = None
                self._away.move_to_end(worker)

    def forget(self, worker: str) -> None:
        """A worker has left, and asks no more."""
        with self._lock:
            self._away.pop(worker, None)
            row = self._known.pop(worker, None)
            if row is not None:
                self._clear(row)
                self._free.append(row)

    def _empty(self) -> int:
        if self._free:
            return self._free.pop()
        if self.cells[_USED] < ROWS:
            return self.cells[_USED]
        if not self._away:
            raise SharedMemoryFull(f"{ROWS:,} workers are connected to this host, and it cannot serve more.")
        worker, _ = self._away.popitem(last=False)
        row = self._known.pop(worker)
        self.cells[_FORGOTTEN] += 1
        self._clear(row)
        return row

    def _clear(self, row: int) -> None:
        self._rows["name"][row] = b""
        self._rows["word"][row] = 0


def cell_of(row: int) -> int:
    """Where the word of a row stands among the cells."""
    return (_PAGE + row * _ROW.itemsize) // 8


class Looker:
    """Reads the table of a segment again and again, also one that is made only later."""

    def __init__(self, segment: Path) -> None:
        self._segment = segment
        self._words: Words | None = None

    def __call__(self) -> Array:
        """All rows as they are now."""
        if self._words is None and Words.is_there(self._segment):
            self._words = Words(self._segment)
        return NOBODY if self._words is None else self._words.rows()

    @property
    def forgotten(self) -> int:
        """Workers whose rows were taken by others."""
        return 0 if self._words is None else self._words.forgotten


def named(rows: Array) -> dict[str, int]:
    """The word of each worker in a copy of the rows."""
    names = rows["name"]
    return {bytes(names[k]).decode(errors="replace"): int(rows["word"][k]) for k in np.flatnonzero(names != b"")}


def words(segment: Path) -> dict[str, int]:
    """How far each worker's contributions are in the center."""
    return named(Looker(segment)())
