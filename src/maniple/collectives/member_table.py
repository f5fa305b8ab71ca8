"""The member table of a group in shared memory: one row per rank, through which the workers know of each other.

Row `r` is written by rank `r` alone, except for `first` and `until`, which the other members decide under the table's
lock. Every field is an aligned word of 8 bytes, so single reads and writes are atomic. As long as a process lives it
holds the lock on byte `r + 1` of the file, so a worker's death shows at once: the kernel releases its lock.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from maniple.collectives.call import CALL, CollectiveCall
from maniple.errors import InvalidArgument
from maniple.memory.locks import ByteLocks, Futex
from maniple.memory.shm import map_file

CAPACITY = 512
FOREVER = 1 << 62  # `until` of a member that has not left
_TABLE_LOCK = 0  # the byte of the table's own lock
_LOCK_S = 60.0  # a holder decides within microseconds, unless its process is stopped
_HEADER = np.dtype(
    [
        ("futex", "<u4", 2),
        ("is_formed", "<i8"),  # the first members are decided
        ("join_requests", "<i8"),  # how many have been made so far
        ("closed", "<i8"),  # the newest barrier that was closed although some may have missed it
        ("height", "<i8"),  # one more than the highest rank that has a row
    ]
)
# What a rank does at one barrier.
_ARRIVAL = np.dtype(
    [
        ("call", CALL),
        ("requests_seen", "<i8"),  # the join requests made when it arrived
        ("slot", "<i8"),  # where its values are
        ("shown_bytes", "<i8"),  # how many it shows
    ]
)
_ROW = np.dtype(
    [
        ("incarnation", "<i8"),  # incarnation + 1 of the process that owns the row; 0: none yet
        ("first", "<i8"),  # the first barrier that it belongs to; 0: none yet
        ("until", "<i8"),  # the first barrier that it no longer belongs to
        ("arrived", "<i8"),  # the newest barrier that it has arrived at
        ("join_request", "<i8"),  # the number of its join request; 0: none
        ("arrivals", _ARRIVAL, 2),  # at its newest barrier and the one before, by parity
        ("", "V40"),  # rows of 256 bytes share no cache line
    ]
)
_ROWS = 4096
_ARRIVALS = _ROWS + _ROW.fields["arrivals"][1]  # pyright: ignore[reportOptionalSubscript]
_KEY = CALL.itemsize - 8  # a call without its weight


class MemberTable:
    """The rows as one process sees them.

    Attributes:
        header: the fields of `_HEADER`.
        incarnation, first, until, arrived, join_request: columns of `_ROW`, by rank.
        weight, requests_seen, slot, shown_bytes: columns of `_ARRIVAL`, by rank and parity of the barrier.
        futex: wakes the workers that wait for a change of the table.
        locks: byte 0 is the table's, byte r + 1 that of rank r's life.
    """

    def __init__(self, path: Path) -> None:
        self._memory = map_file(path, _ROWS + CAPACITY * _ROW.itemsize, what="a member table")
        self.futex, self.locks = Futex(self._memory, 0), ByteLocks(path)
        self.header: Any = np.frombuffer(self._memory, _HEADER, 1)[0]
        rows: Any = np.frombuffer(self._memory, _ROW, CAPACITY, _ROWS)
        # Views of the columns: indexing them gives Python's own numbers, four times as fast as NumPy's.
        self.incarnation, self.first = memoryview(rows["incarnation"]), memoryview(rows["first"])
        self.until, self.arrived = memoryview(rows["until"]), memoryview(rows["arrived"])
        self.join_request = memoryview(rows["join_request"])
        self._arrivals: Any = rows["arrivals"]
        self.weight: Any = memoryview(self._arrivals["call"]["weight"])
        self.requests_seen: Any = memoryview(self._arrivals["requests_seen"])
        self.slot: Any = memoryview(self._arrivals["slot"])
        self.shown_bytes: Any = memoryview(self._arrivals["shown_bytes"])

    @property
    def ranks(self) -> range:
        """The ranks that may have a row."""
        return range(self.header["height"])

    def add_row(self, rank: int) -> None:
        """Make the table high enough for a rank."""
        if rank >= CAPACITY:
            raise InvalidArgument(
                f"worker {rank} cannot join a group in shared memory, which has room for ranks below {CAPACITY}. "
                "Use --collectives torch, or a rule of the center."
            )
        with self.lock():
            self.header["height"] = max(self.header["height"], rank + 1)

    def claim_row(self, rank: int, incarnation: int) -> None:
        """Make a row that of a process that belongs to no barrier yet."""
        self.first[rank] = self.join_request[rank] = 0  # `arrived` stays: barriers never go back
        self.until[rank] = FOREVER
        self.incarnation[rank] = incarnation + 1

    def request_join(self, rank: int) -> None:
        """Ask to be admitted; under the table's lock."""
        self.header["join_requests"] += 1
        self.join_request[rank] = self.header["join_requests"]

    def announce(self, rank: int, barrier: int, call: CollectiveCall, slot: int, shown_bytes: int) -> None:
        """Write what `rank` does at a barrier, before it arrives there."""
        self._arrivals[rank, barrier & 1] = (call.record(barrier), self.header["join_requests"], slot, shown_bytes)

    def arrive_for(self, rank: int, barrier: int) -> None:
        """Let a dead worker arrive, with what it did at the barrier before."""
        parity = barrier & 1
        self._arrivals[rank, parity] = self._arrivals[rank, 1 - parity]
        self._arrivals["call"]["number"][rank, parity] = barrier
        self.arrived[rank] = barrier

    def call(self, rank: int, barrier: int) -> CollectiveCall:
        """The call of `rank` at a barrier that not everybody has passed."""
        return CollectiveCall.from_record(self._arrivals[rank, barrier & 1]["call"].item())

    def are_same(self, ranks: Sequence[int], barrier: int) -> bool:
        """Whether the calls of these workers are the same bytes, but for their weights."""
        start, row, memory = _ARRIVALS + (barrier & 1) * _ARRIVAL.itemsize, _ROW.itemsize, self._memory
        return len({memory[start + row * rank : start + row * rank + _KEY] for rank in ranks}) == 1

    def members(self, barrier: int) -> list[int]:
        """The ranks that belong to a barrier."""
        first, until = self.first, self.until
        return [rank for rank in range(self.header["height"]) if 0 < first[rank] <= barrier < until[rank]]

    def missing(self, barrier: int) -> list[int]:
        """The members that have not arrived at a barrier yet."""
        first, until, arrived = self.first, self.until, self.arrived
        return [
            rank
            for rank in range(self.header["height"])
            if arrived[rank] < barrier and 0 < first[rank] <= barrier < until[rank]
        ]

    def is_member(self, rank: int) -> bool:
        """Whether `rank` was admitted and has not left or been removed."""
        return self.first[rank] > 0 and self.until[rank] == FOREVER

    def lock(self) -> AbstractContextManager[None]:
        """The lock under which one process decides about others."""
        return self.locks.hold(_TABLE_LOCK, timeout_s=_LOCK_S, what="a member table")

    def show_life(self, rank: int) -> None:
        """Show, until this process ends, that the owner of a row is alive."""
        self.locks.retry_until(rank + 1, timeout_s=_LOCK_S, what=f"worker {rank}'s row of a member table")

    def is_alive(self, rank: int) -> bool:
        """Whether the process that owns a row is alive."""
        return self.locks.is_taken(rank + 1)

    def close(self) -> None:
        """Close the file: this process counts as dead from now on."""
        self.locks.close()
