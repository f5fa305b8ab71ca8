"""The table of a circle in shared memory: one row per rank, by which the workers know of each other.

offset 0     bell, founded, knocks, settled, height
4096         rows of int64, one per rank:
             holder     incarnation + 1 of the process that the row belongs to; 0: none yet
             first      the first meeting that it is in; 0: none yet
             last       the first that it is no longer in
             count      the meetings it has come to
             knocked    its number among those who knocked
             2 calls    what it does at its newest meeting and at the one before (`call.Call`), and with it the knocks
                        it had heard, its slot, and whom it expected

Row `r` is written by rank `r` alone, but for `first` and `last`: those are what the others decide about it. For as long
as a process lives it holds the lock on byte `r + 1` of the file, so the kernel tells at once who has died.
"""

import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from maniple.bell import Bell
from maniple.center.locks import ByteLocks
from maniple.center.segment import refusal
from maniple.circle.call import NUMBER, SIZE, Call
from maniple.errors import InvalidArgument

CAPACITY = 512
NEVER = 1 << 62  # a meeting that does not come
_LOCK = 0  # the byte of the table's own lock
_LOCK_S = 60.0
_PAGE = 4096
_HEADER_WORDS = _PAGE // 8
_FOUNDED, _KNOCKS, _SETTLED, _HEIGHT = 1, 2, 3, 4  # words of the header
_HOLDER, _FIRST, _LAST, _COUNT, _KNOCKED, _CALLS = range(6)
_CALL_WORDS, _WEIGHT, _KNOCKS_HEARD, _SLOT, _EXPECTED = 11, 7, 8, 9, 10
_SAID = struct.Struct("7q d 3q")  # the words of a call, its weight, and those three
_ROW = 32
_SIZE = _PAGE + CAPACITY * _ROW * 8


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
        self._words[row + _FIRST] = self._words[row + _KNOCKED] = 0  # the count stays: meetings never go back
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

    def say(self, rank: int, meeting: int, call: Call, *, slot: int = 0, expected: int = 0) -> None:
        """Write what `rank` does at a meeting, before it comes to it."""
        where = 8 * _place(rank, meeting)
        _SAID.pack_into(self._memory, where, *call.words(meeting), call.weight, self.knocks, slot, expected)

    def repeat(self, rank: int, meeting: int) -> None:
        """Write that `rank` does at a meeting what it did at the one before."""
        old, new = _place(rank, meeting - 1), _place(rank, meeting)
        self._words[new : new + _CALL_WORDS] = self._words[old : old + _CALL_WORDS]
        self._words[new + NUMBER] = meeting

    def said(self, rank: int, meeting: int) -> Call:
        """What `rank` does at a meeting that is not over for everybody."""
        start = _place(rank, meeting)
        return Call.of_words(self._words[start : start + _WEIGHT], self._reals[start + _WEIGHT])

    def are_same(self, ranks: Sequence[int], meeting: int) -> bool:
        """These workers do the very same at a meeting, but for their weights."""
        places = [8 * _place(rank, meeting) for rank in ranks]
        return len({self._memory[place : place + 8 * _WEIGHT] for place in places}) == 1

    def weight(self, rank: int, meeting: int) -> float:
        """How much the values of `rank` count."""
        return self._reals[_place(rank, meeting) + _WEIGHT]

    def size(self, rank: int, meeting: int) -> int:
        """How many values `rank` has."""
        return self._words[_place(rank, meeting) + SIZE]

    def heard(self, rank: int, meeting: int) -> int:
        """How many had knocked when `rank` came."""
        return self._words[_place(rank, meeting) + _KNOCKS_HEARD]

    def slot(self, rank: int, meeting: int) -> int:
        """Where the values of `rank` are."""
        return self._words[_place(rank, meeting) + _SLOT]

    def expected(self, rank: int, meeting: int) -> int:
        """Whom `rank` thought to meet."""
        return self._words[_place(rank, meeting) + _EXPECTED]

    def members(self, meeting: int) -> list[int]:
        """The ranks that belong to the circle at a meeting."""
        words = self._words
        return [rank for rank, row in self._rows() if 0 < words[row + _FIRST] <= meeting < words[row + _LAST]]

    def missing(self, meeting: int) -> list[int]:
        """Those of them who have not come yet."""
        words = self._words
        return [
            rank
            for rank, row in self._rows()
            if words[row + _COUNT] < meeting and 0 < words[row + _FIRST] <= meeting < words[row + _LAST]
        ]

    def begins(self, meeting: int) -> bool:
        """It is somebody's first."""
        return any(self._words[row + _FIRST] == meeting for _, row in self._rows())

    def _rows(self) -> Iterable[tuple[int, int]]:
        return enumerate(range(_HEADER_WORDS, _HEADER_WORDS + self.height * _ROW, _ROW))

    @property
    def height(self) -> int:
        """One more than the highest rank that has a row."""
        return self._words[_HEIGHT]

    def grow(self, rank: int) -> None:
        """There is a row `rank` now."""
        if rank >= CAPACITY:
            raise InvalidArgument(
                f"worker {rank} cannot enter a circle in shared memory, which has room for ranks below {CAPACITY}. "
                "Use --circle torch, or a rule of the center."
            )
        with self.alone():
            self._words[_HEIGHT] = max(self._words[_HEIGHT], rank + 1)

    def alone(self) -> AbstractContextManager[None]:
        """Be the only one who decides about others."""
        return self.locks.hold(_LOCK, timeout_s=_LOCK_S, what="the table of a circle")

    def live(self, rank: int) -> None:
        """Show, from now to the end of this process, that the holder of row `rank` is alive."""
        self.locks.insist(rank + 1, timeout_s=_LOCK_S, what=f"the row of worker {rank} in a circle")

    def is_alive(self, rank: int) -> bool:
        """The process that row `rank` belongs to is alive."""
        return self.locks.is_taken(rank + 1)

    def close(self) -> None:
        """Let go of the file, and with it of this process's sign of life."""
        self.locks.close()


def _place(rank: int, meeting: int) -> int:
    """Where the call of `rank` at a meeting stands."""
    return _row(rank) + _CALLS + _CALL_WORDS * (meeting % 2)


def _row(rank: int) -> int:
    return _HEADER_WORDS + rank * _ROW
