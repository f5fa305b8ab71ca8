"""The table of a circle in shared memory: one row per rank, by which the workers know of each other.

offset 0     bell, founded, knocks, settled
4096         rows of int64, one per rank:
             holder     incarnation + 1 of the process that the row belongs to; 0: none yet
             first      the first meeting that it is in; 0: none yet
             last       the first that it is no longer in
             count      the meetings it has come to
             knocked    its number among those who knocked
             2 calls    what it does at its newest meeting and at the one before

Row `r` is written by rank `r` alone, but for `first` and `last`: those are what the others decide about it. For as long
as a process lives it holds the lock on byte `r + 1` of the file, so the kernel tells at once who has died.
"""

import mmap
import os
import zlib
from pathlib import Path
from typing import NamedTuple

from maniple.bell import Bell
from maniple.center.locks import ByteLocks
from maniple.center.segment import refusal
from maniple.errors import InvalidArgument

CAPACITY = 512
NEVER = 1 << 62  # a meeting that does not come
LOCK = 0  # the byte of the table's own lock
_PAGE = 4096
_HEADER_WORDS = _PAGE // 8
_FOUNDED, _KNOCKS, _SETTLED = 1, 2, 3  # words of the header
_HOLDER, _FIRST, _LAST, _COUNT, _KNOCKED, _CALLS = range(6)
_CALL_WORDS = 6
_ROW = 24
_SIZE = _PAGE + CAPACITY * _ROW * 8


_KINDS = ("all_reduce", "reduce", "broadcast", "gather", "all_gather", "scatter", "barrier", "round")
_RAGGED = ("gather", "all_gather", "scatter", "barrier")


class Call(NamedTuple):
    """What one worker does at a meeting."""

    code: int = 0  # which call it is; the same for all
    size: int = 0  # the bytes of its values
    knocks: int = 0  # how many had knocked when it came
    slot: int = 0  # the serial number of its slot
    shape: int = 0  # who it thought would come
    weight: float = 1.0

    @classmethod
    def of(cls, words: str, size: int, weight: float = 1.0) -> "Call":
        """The call that `words` name, beginning with its kind."""
        # The text itself does not fit into a row: its first bytes tell people, its checksum tells calls apart.
        kind = words.split(maxsplit=1)[0]
        return cls((zlib.crc32(words.encode()) << 8) | _KINDS.index(kind), size, weight=weight)

    def __str__(self) -> str:
        return f"{_KINDS[self.code & 0xFF]} of {self.size} bytes"

    def fits(self, other: "Call") -> bool:
        """The two are the same call."""
        is_ragged = _KINDS[self.code & 0xFF] in _RAGGED
        return self.code == other.code and (is_ragged or self.size == other.size)


class Table:
    """The rows, seen by one process."""

    def __init__(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, _SIZE)  # what is there stays
                self._memory = mmap.mmap(file, _SIZE)
            finally:
                os.close(file)
        except OSError as error:
            raise refusal(path.parent, error) from error
        self._words = memoryview(self._memory).cast("q")
        self._reals = memoryview(self._memory).cast("d")
        self.bell = Bell(self._memory, 0)
        self.locks = ByteLocks(path)

    @property
    def is_founded(self) -> bool:
        """The first members are settled."""
        return bool(self._words[_FOUNDED])

    def found(self) -> None:
        """Settle them."""
        self._words[_FOUNDED] = 1

    @property
    def knocks(self) -> int:
        """How many have knocked so far."""
        return self._words[_KNOCKS]

    @property
    def settled(self) -> int:
        """The newest meeting that is closed although some may have missed it."""
        return self._words[_SETTLED]

    def settle(self, meeting: int) -> None:
        """Close a meeting."""
        self._words[_SETTLED] = meeting

    def claim(self, rank: int, incarnation: int) -> None:
        """Make row `rank` that of a process that is in no meeting yet."""
        row = _row(rank)
        self._words[row + _FIRST] = self._words[row + _COUNT] = self._words[row + _KNOCKED] = 0
        self._words[row + _LAST] = NEVER
        self._words[row + _HOLDER] = incarnation + 1

    def knock(self, rank: int) -> None:
        """Ask to be let in; under the table's lock."""
        self._words[_KNOCKS] += 1
        self._words[_row(rank) + _KNOCKED] = self._words[_KNOCKS]

    def holder(self, rank: int) -> int:
        """The incarnation of the process that row `rank` belongs to; -1: none yet."""
        return self._words[_row(rank) + _HOLDER] - 1

    def first(self, rank: int) -> int:
        """The first meeting that `rank` is in; 0: none yet."""
        return self._words[_row(rank) + _FIRST]

    def admit(self, rank: int, meeting: int) -> None:
        """From this meeting on `rank` belongs to the circle."""
        self._words[_row(rank) + _FIRST] = meeting

    def last(self, rank: int) -> int:
        """The first meeting that `rank` is no longer in."""
        return self._words[_row(rank) + _LAST]

    def dismiss(self, rank: int, meeting: int) -> None:
        """From this meeting on `rank` does not belong to the circle."""
        self._words[_row(rank) + _LAST] = meeting

    def count(self, rank: int) -> int:
        """The newest meeting that `rank` has come to."""
        return self._words[_row(rank) + _COUNT]

    def come(self, rank: int, meeting: int) -> None:
        """`rank` is at this meeting."""
        self._words[_row(rank) + _COUNT] = meeting

    def knocked(self, rank: int) -> int:
        """The number of `rank` among those who knocked; 0: it did not."""
        return self._words[_row(rank) + _KNOCKED]

    def say(self, rank: int, meeting: int, call: Call) -> None:
        """Write what `rank` does at a meeting, before it comes to it."""
        start = _row(rank) + _CALLS + _CALL_WORDS * (meeting % 2)
        words = self._words
        words[start], words[start + 1], words[start + 2], words[start + 3], words[start + 4] = call[:5]
        self._reals[start + 5] = call.weight

    def said(self, rank: int, meeting: int) -> Call:
        """What `rank` does at a meeting that is not over for everybody."""
        start = _row(rank) + _CALLS + _CALL_WORDS * (meeting % 2)
        code, size, knocks, slot, shape = self._words[start : start + 5]
        return Call(code, size, knocks, slot, shape, self._reals[start + 5])

    def members(self, meeting: int) -> list[int]:
        """The ranks that belong to the circle at a meeting."""
        words = self._words
        rows = range(_HEADER_WORDS, _HEADER_WORDS + self.height * _ROW, _ROW)
        return [
            (row - _HEADER_WORDS) // _ROW for row in rows if 0 < words[row + _FIRST] <= meeting < words[row + _LAST]
        ]

    @property
    def height(self) -> int:
        """One more than the highest rank that has a row."""
        return self._words[4]

    def grow(self, rank: int) -> None:
        """There is a row `rank` now; under the table's lock."""
        if rank >= CAPACITY:
            raise InvalidArgument(
                f"worker {rank} cannot enter a circle in shared memory, which has room for ranks below {CAPACITY}. "
                "Use --circle torch, or a rule of the center."
            )
        self._words[4] = max(self._words[4], rank + 1)

    def is_alive(self, rank: int) -> bool:
        """The process that row `rank` belongs to is alive."""
        return self.locks.is_taken(rank + 1)

    def close(self) -> None:
        """Let go of the file, and with it of this process's sign of life."""
        self.locks.close()


def _row(rank: int) -> int:
    return _HEADER_WORDS + rank * _ROW
