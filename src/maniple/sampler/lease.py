"""Leases: the words in which samplers, tables and hosts speak of them."""

from dataclasses import dataclass
from enum import Enum

import msgspec


class Terms(msgspec.Struct, frozen=True):
    """What all workers must agree on to share a data set."""

    count: int
    chunk: int
    shuffle: bool


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of one epoch, lent to one worker; `slot` is its place in the table."""

    slot: int
    epoch: int
    chunk: int


class Unfinished(msgspec.Struct):
    """A table as a snapshot keeps it."""

    terms: Terms
    cursors: list[tuple[int, int]]  # epoch, chunks handed out
    leases: list[tuple[int, int]]  # epoch, chunk: handed out and not done

    @property
    def samples(self) -> int:
        """How many samples were handed out and not done."""
        chunk, count = self.terms.chunk, self.terms.count
        return sum(min(count, (number + 1) * chunk) - number * chunk for _, number in self.leases)

    @property
    def progress(self) -> tuple[int, int]:
        """The first epoch that has samples left, and how many of it are done."""
        chunks = -(-self.terms.count // self.terms.chunk)
        open_ = {epoch for epoch, cursor in self.cursors if cursor < chunks} | {epoch for epoch, _ in self.leases}
        first = min(open_, default=max((epoch for epoch, _ in self.cursors), default=-1) + 1)
        cursor = dict(self.cursors).get(first, 0 if first not in open_ else chunks)
        held = Unfinished(self.terms, [], [lease for lease in self.leases if lease[0] == first]).samples
        return first, min(self.terms.count, cursor * self.terms.chunk) - held


class Verdict(Enum):
    """What can be said to a worker that gets no lease."""

    WAIT = "wait"  # others are at the last ones; if they die, somebody must take them
    END = "end"
    FULL = "full"  # the table has no room: give some back


@dataclass(frozen=True)
class Holder:
    """One process of a worker, as the owner of leases."""

    rank: int
    incarnation: int

    @property
    def word(self) -> int:
        """The number that stands for it in the table."""
        return (self.incarnation << 16) | (self.rank + 1)


def chunk_for(count: int, workers: int) -> int:
    """A chunk size by which the last chunks of an epoch keep nobody waiting for long, and asking costs little."""
    workers = max(4, workers)
    return max(1, min(1024, max(count // (32 * workers), min(64, count // (4 * workers)))))
