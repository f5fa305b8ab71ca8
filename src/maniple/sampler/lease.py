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
    """A range of one epoch's order, lent to one worker; `slot` is its place in the table."""

    slot: int
    epoch: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return self.stop - self.start


class Unfinished(msgspec.Struct, omit_defaults=True):
    """A table as a snapshot keeps it."""

    terms: Terms
    handed_out: list[tuple[int, int]] = []  # epoch, samples
    leased: list[tuple[int, int, int]] = []  # epoch, start, stop: handed out and not done
    passes: int = 0  # begun by the worker that is furthest, of those whose passes are limited
    # As above, but counted in chunks: snapshots that were written before leases were ranges.
    cursors: list[tuple[int, int]] = []
    leases: list[tuple[int, int]] = []

    def __post_init__(self) -> None:
        (count, chunk), cursors, leases = (self.terms.count, self.terms.chunk), self.cursors, self.leases
        self.handed_out = self.handed_out + [(epoch, min(count, n * chunk)) for epoch, n in cursors]
        self.leased = self.leased + [(epoch, n * chunk, min(count, (n + 1) * chunk)) for epoch, n in leases]
        self.cursors, self.leases = [], []

    @property
    def samples(self) -> int:
        """How many samples were handed out and not done."""
        return sum(stop - start for _, start, stop in self.leased)

    @property
    def progress(self) -> tuple[int, int]:
        """The first epoch that has samples left, and how many of it are done."""
        count = self.terms.count
        open_ = {epoch for epoch, n in self.handed_out if n < count} | {epoch for epoch, _, _ in self.leased}
        first = min(open_, default=max((epoch for epoch, _ in self.handed_out), default=-1) + 1)
        taken = dict(self.handed_out).get(first, 0 if first not in open_ else count)
        return first, taken - sum(stop - start for epoch, start, stop in self.leased if epoch == first)

    @property
    def missed(self) -> int:
        """The samples of all passes begun that nobody has taken: workers have died or ended before their share."""
        newest = max((epoch for epoch, _ in self.handed_out), default=-1)
        opened = sum(self.terms.count - taken for epoch, taken in self.handed_out if epoch < self.passes)
        return opened + self.terms.count * max(0, self.passes - 1 - newest) if self.passes else 0


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
