"""Leases: ranges of a data set's samples, each lent to one worker, in a table in the run's shared memory.

The table has a cursor per open epoch and the open leases. Each lease names the rank and incarnation of its worker, so
any process that finds the worker dead may take the lease over; no list of live workers has to be kept in step.
"""

import mmap
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec
import numpy as np

from maniple.errors import InvalidArgument
from maniple.memory.locks import ByteLocks
from maniple.memory.segment import MAX_WORKERS, Segment
from maniple.memory.shm import map_file, shared_memory_full
from maniple.record.folder import write_once

MAX_LEASES = 16384
_EPOCHS = 16  # open at a time; beyond this the oldest is closed
_MAX_LEASE_SIZE = 0x7FFFFFFF  # the size of a lease has 32 bits
_LOCK_S = 60.0  # for a lock that is held for microseconds
_LOCK_NAME = "the table of leases"

# Owners: incarnation << 16 | rank + 1, perhaps with _DRAWN; 0 is a free slot, _NOBODY a lease to be taken over.
_DRAWN = 1 << 62
_NOBODY = 1 << 61

# Epochs and passes count from 1 here, so that 0 means none. A lease exists once its owner is written, which is last.
_TABLE = np.dtype([
    ("count", "i8", (1,)), ("lease_size", "i8", (1,)), ("shuffle", "i8", (1,)),
    ("hint", "i8", (1,)),  # a slot that is probably free
    ("passes_begun", "i8", (1,)), ("first_pass", "i8", (1,)), ("pass_limit", "i8", (1,)),  # newest, first, its limit
    ("reserved", "i8", (1,)),
    ("epoch", "i8", _EPOCHS), ("cursor", "i8", _EPOCHS),  # open epochs, and the samples handed out of each
    ("owner", "i8", MAX_LEASES), ("start", "i8", MAX_LEASES), ("epoch_and_size", "i8", MAX_LEASES),  # of leases
    ("first_pass_of", "i8", MAX_WORKERS), ("done_by", "i8", MAX_WORKERS),  # of ranks, over all their processes
])  # fmt: skip


class LeaseTerms(msgspec.Struct, frozen=True):
    """What all workers must agree on to share a data set."""

    count: int
    lease_size: int = msgspec.field(name="chunk")  # of samples; the name in snapshots and messages is older
    shuffle: bool


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A range of one epoch's order, lent to one worker; `slot` is its place in the table."""

    slot: int
    epoch: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.stop - self.start


class NoLease(Enum):
    """Why a worker gets no lease."""

    WAIT = "wait"  # other workers have the last leases; if they die, another worker must take these
    END = "end"
    FULL = "full"  # the table has no free slot: finish or give back leases


class LeaseReports(TypedDict, total=False):
    """What a worker reports of its leases, by their slots."""

    held: Sequence[int]  # all that it knows of, if a reply may have been lost: a lease beside them is returned again
    drawn: Sequence[int]  # their samples are handed out, but not finished
    done: Sequence[int]
    back: Sequence[int]  # this worker will not finish them; another may


def lease_size_for(count: int, workers: int) -> int:
    """The default number of samples in a lease.

    About 32 per worker and epoch, so that the last ones keep no worker waiting for long; 64 to 1024 samples for data
    sets large enough, so that requests cost little.
    """
    workers = max(4, workers)
    return max(1, min(1024, max(count // (32 * workers), min(64, count // (4 * workers)))))


class LeaseTable:
    """The leases of one data set.

    Attributes:
        holder: rank and incarnation of the process that leases are given to. A host sets it for each request.
    """

    def __init__(self, segment: Segment, path: Path, holder: tuple[int, int] = (-1, 0)) -> None:
        self._segment, self.holder = segment, holder
        self._locks = ByteLocks(path)
        self._fields = _Fields(map_file(path))
        self._last = 0  # the index of the open epoch that was used last
        self._checked = -1  # the count of departures after which no lease of a dead worker was left
        fields = self._fields
        self.terms = LeaseTerms(fields.count[0], fields.lease_size[0], bool(fields.shuffle[0]))
        self._lease_size = min(self.terms.lease_size, _MAX_LEASE_SIZE)

    @classmethod
    def open(cls, segment: Segment, number: int, terms: LeaseTerms, holder: tuple[int, int] = (-1, 0)) -> "LeaseTable":
        """Open the table of the run's data set `number`, or make it. The first worker's lease size holds."""
        path = segment.path / f"leases-{number}"
        if not path.exists():
            restore(segment, number, LeaseSnapshot(terms))
        table = cls(segment, path, holder)
        try:
            table.check_terms(number, terms)
        except InvalidArgument:
            table.close()
            raise
        return table

    def check_terms(self, number: int, terms: LeaseTerms) -> None:
        """Raise InvalidArgument if a worker's data set differs from the first worker's."""
        first = self.terms
        if (first.count, first.shuffle) != (terms.count, terms.shuffle):
            raise InvalidArgument(
                f"sampler {number} of this worker has {terms.count} samples (shuffle={terms.shuffle}), that of the "
                f"first worker {first.count} (shuffle={first.shuffle}). All workers must call worker.sampler() on the "
                "same data, in the same order."
            )

    def take(self, epoch: int, *, most: int = 0, **reports: Unpack[LeaseReports]) -> Lease | NoLease:
        """The next lease for the holder in its pass `epoch`: one of a dead worker, or the next samples.

        Args:
            epoch: the pass it is in; -1 to report only.
            most: the samples left in this pass; 0 for no limit, where a pass is one epoch.
            reports: what became of earlier leases.
        """
        self._locks.retry_until(0, timeout_s=_LOCK_S, what=_LOCK_NAME)  # faster than `hold`
        try:
            rank, incarnation = self.holder
            me = (incarnation << 16) | (rank + 1)
            self._set_owner(me, reports.get("drawn", ()), me | _DRAWN)
            self._set_owner(me, reports.get("done", ()), 0)
            self._set_owner(me, reports.get("back", ()), _NOBODY)
            return NoLease.END if epoch < 0 else self._take(me, epoch, most, reports.get("held"))
        finally:
            self._locks.give(0)

    def _set_owner(self, me: int, slots: Sequence[int], owner: int) -> None:
        fields = self._fields
        for slot in slots:
            if fields.owner[slot] & ~_DRAWN == me:  # else it was considered dead, and another worker has the lease
                fields.owner[slot] = owner
                if not owner:
                    fields.done_by[(me & 0xFFFF) - 1] += fields.epoch_and_size[slot] & 0xFFFFFFFF

    def _take(self, me: int, epoch: int, most: int, held: Sequence[int] | None) -> Lease | NoLease:
        fields, count, rank = self._fields, self.terms.count, (me & 0xFFFF) - 1
        passes_begun = fields.passes_begun
        if held is not None and (lost := self._lost(me, held)) is not None:
            return lost
        if most and (passes_begun[0] <= epoch or not fields.first_pass_of[rank]):
            self._begin_pass(rank, epoch, most)
        index = self._earliest() if most else self._index_of(epoch)
        cursor = count if index is None else fields.cursor[index]
        departures = self._segment.departures
        if cursor == count or departures != self._checked:
            abandoned = self._abandoned()
            for slot in abandoned:
                if not most or fields.epoch_and_size[slot] >> 32 < passes_begun[0]:
                    return self._take_over(slot, me, most)
            self._checked = self._checked if abandoned else departures
            if cursor == count and most:
                index, cursor = self._open_next(epoch), 0
        if index is None or cursor == count:
            epochs = range(passes_begun[0]) if most else range(epoch, epoch + 1)
            return NoLease.WAIT if self._is_drawing(epochs, me) else NoLease.END
        if (slot := self._free_slot()) is None and (slot := self._drop_oldest()) is None:
            return NoLease.FULL
        size = most if 0 < most < self._lease_size else self._lease_size
        lease = Lease(slot, fields.epoch[index] - 1, cursor, min(cursor + size, count))
        self._write(lease, me)
        fields.cursor[index] = lease.stop
        fields.hint[0] = (slot + 1) % MAX_LEASES
        return lease

    def _begin_pass(self, rank: int, epoch: int, most: int) -> None:
        """The newest pass of all workers begins, or the first of this worker."""
        fields = self._fields
        if not fields.passes_begun[0]:
            fields.pass_limit[0], fields.first_pass[0] = most, epoch + 1
        fields.first_pass_of[rank] = fields.first_pass_of[rank] or epoch + 1
        fields.passes_begun[0] = max(fields.passes_begun[0], epoch + 1)

    def _take_over(self, slot: int, me: int, most: int) -> Lease | NoLease:
        """Give an abandoned lease to a worker; what exceeds `most` becomes another abandoned lease."""
        lease = self._lease(slot)
        if 0 < most < lease.samples:
            if (rest := self._free_slot()) is None:
                return NoLease.FULL
            self._write(Lease(rest, lease.epoch, lease.start + most, lease.stop), _NOBODY)
            # If the process dies before this line, the rest is leased twice.
            self._fields.epoch_and_size[slot] = lease.epoch << 32 | most
        self._fields.owner[slot] = me
        return self._lease(slot)

    def _write(self, lease: Lease, owner: int) -> None:
        fields, slot = self._fields, lease.slot
        fields.start[slot] = lease.start
        fields.epoch_and_size[slot] = lease.epoch << 32 | lease.samples
        fields.owner[slot] = owner

    def snapshot(self) -> "LeaseSnapshot":
        """The content of the table."""
        fields = self._fields
        with self._locks.hold(0, timeout_s=_LOCK_S, what=_LOCK_NAME):
            epochs = zip(fields.epoch, fields.cursor, strict=True)
            handed_out = sorted((epoch - 1, cursor) for epoch, cursor in epochs if epoch)
            leases = [self._lease(slot) for slot in np.flatnonzero(fields.owners).tolist()]
            leased = sorted((one.epoch, one.start, one.stop) for one in leases)
            return LeaseSnapshot(self.terms, handed_out, leased, fields.passes_begun[0])

    def first_epoch(self, limit: int) -> int:
        """The pass in which the holder begins, if passes have at most `limit` samples (0: no limit).

        A worker that belongs to the run from the start makes all its passes, even if it starts late. A restarted worker
        continues where the samples done by its predecessors end, so that a rank takes as many samples as any other. A
        worker that joins later begins in the first epoch with samples that are not done.
        """
        fields, rank = self._fields, self.holder[0]
        is_expected = rank * fields.pass_limit[0] < self.terms.count
        first = fields.first_pass_of[rank] or (fields.first_pass[0] if is_expected else 0)
        return first - 1 + fields.done_by[rank] // limit if limit and first else self.snapshot().progress[0]

    def reset_passes(self) -> None:
        """Let all workers begin in the first epoch with samples left, since the run is resumed."""
        one = self._fields
        with self._locks.hold(0, timeout_s=_LOCK_S, what=_LOCK_NAME):
            for column in (one.passes_begun, one.first_pass, one.pass_limit, one.first_pass_of, one.done_by):
                np.asarray(column)[:] = 0

    def close(self) -> None:
        """Unmap the table and close its file."""
        self._locks.close()
        del self._fields

    def _earliest(self) -> int | None:
        """The index of the earliest open epoch with samples left, if a pass has begun that may take from it."""
        fields, last, count = self._fields, self._last, self.terms.count
        if not fields.epoch[last] or fields.cursor[last] == count:
            open_ = [(epoch, i) for i, epoch in enumerate(fields.epoch) if epoch and fields.cursor[i] < count]
            if not open_:
                return None
            self._last = last = min(open_)[1]
        return last if fields.epoch[last] <= fields.passes_begun[0] else None

    def _open_next(self, epoch: int) -> int | None:
        """Open the epoch after the newest, or `epoch` as the first, if a pass has begun for it; returns its index."""
        epoch = max(self._fields.epoch) or epoch
        return self._index_of(epoch) if epoch < self._fields.passes_begun[0] else None

    def _index_of(self, epoch: int) -> int | None:
        """The index of `epoch`, which is opened if it is new; None if it was closed."""
        fields = self._fields
        if fields.epoch[self._last] == epoch + 1:
            return self._last
        epochs = fields.epoch.tolist()
        if epoch + 1 in epochs:
            self._last = epochs.index(epoch + 1)
            return self._last
        if epoch + 1 < max(epochs):
            return None
        index = epochs.index(min(epochs))
        fields.epoch[index] = 0  # in this order: a death in between leaves no epoch with another's cursor
        fields.cursor[index] = 0
        fields.epoch[index] = epoch + 1
        return index

    def _lease(self, slot: int) -> Lease:
        start, word = self._fields.start[slot], self._fields.epoch_and_size[slot]
        return Lease(slot, word >> 32, start, start + (word & 0xFFFFFFFF))

    def _lost(self, me: int, held: Sequence[int]) -> Lease | None:
        """A lease that this worker owns and does not know of, since the reply did not reach it."""
        for slot in np.flatnonzero(self._fields.owners == me).tolist():
            if slot not in held:
                return self._lease(slot)
        return None

    def _abandoned(self) -> list[int]:
        """The slots of leases whose workers are dead, oldest first."""
        fields = self._fields
        used = np.flatnonzero(fields.owners)
        owners = fields.owners[used] & ~_DRAWN
        dead = [word for word in set(owners.tolist()) if not self._is_live(word)]
        slots = used[np.isin(owners, dead)].tolist() if dead else []
        return sorted(slots, key=lambda slot: (fields.epoch_and_size[slot] >> 32, fields.start[slot]))

    def _is_live(self, word: int) -> bool:
        return word < _NOBODY and self._segment.is_live((word & 0xFFFF) - 1, word >> 16)

    def _is_drawing(self, epochs: range, me: int) -> bool:
        """Whether another worker still hands out samples of these epochs."""
        owners = self._fields.owners
        others = np.flatnonzero((owners != 0) & (owners < _DRAWN) & (owners != me)).tolist()
        return any(self._fields.epoch_and_size[slot] >> 32 in epochs for slot in others)

    def _free_slot(self) -> int | None:
        fields = self._fields
        slot = fields.hint[0]
        if fields.owner[slot]:
            slot = int(np.argmin(fields.owners != 0))
        return None if fields.owner[slot] else slot

    def _drop_oldest(self) -> int | None:
        """Free the oldest abandoned lease: workers that end their passes early would fill the table."""
        for slot in self._abandoned():
            self._fields.owner[slot] = 0
            return slot
        return None


class _Fields:
    """The mapped fields of a table. Columns are memoryviews: plain integers, and faster than NumPy's scalars."""

    def __init__(self, buffer: mmap.mmap | bytearray) -> None:
        table = np.frombuffer(buffer, _TABLE)[0]
        columns = [memoryview(table[name]) for name in _TABLE.names or ()]
        self.count, self.lease_size, self.shuffle, self.hint, *columns = columns
        self.passes_begun, self.first_pass, self.pass_limit, _, *columns = columns
        self.epoch, self.cursor, self.owner, self.start, self.epoch_and_size, self.first_pass_of, self.done_by = columns
        self.owners = np.asarray(self.owner)


class LeaseSnapshot(msgspec.Struct, omit_defaults=True):
    """The content of a table as snapshots of a run keep it."""

    terms: LeaseTerms
    handed_out: list[tuple[int, int]] = []  # epoch, samples
    leased: list[tuple[int, int, int]] = []  # epoch, start, stop: handed out and not done
    passes: int = 0  # begun by the worker that is furthest, of those whose passes are limited
    # The same counted in leases of equal size, in snapshots that were written before leases were ranges.
    cursors: list[tuple[int, int]] = []
    leases: list[tuple[int, int]] = []

    def __post_init__(self) -> None:
        count, size, cursors, leases = self.terms.count, self.terms.lease_size, self.cursors, self.leases
        self.handed_out = self.handed_out + [(epoch, min(count, n * size)) for epoch, n in cursors]
        self.leased = self.leased + [(epoch, n * size, min(count, (n + 1) * size)) for epoch, n in leases]
        self.cursors, self.leases = [], []

    @property
    def samples(self) -> int:
        """The number of samples that were handed out and not done."""
        return sum(stop - start for _, start, stop in self.leased)

    @property
    def progress(self) -> tuple[int, int]:
        """The first epoch with samples left, and how many of its samples are done."""
        count = self.terms.count
        open_ = {epoch for epoch, n in self.handed_out if n < count} | {epoch for epoch, _, _ in self.leased}
        first = min(open_, default=max((epoch for epoch, _ in self.handed_out), default=-1) + 1)
        taken = dict(self.handed_out).get(first, 0 if first not in open_ else count)
        return first, taken - sum(stop - start for epoch, start, stop in self.leased if epoch == first)

    @property
    def missed(self) -> int:
        """The samples of all passes begun that no worker took, since workers have died or ended before their share."""
        newest = max((epoch for epoch, _ in self.handed_out), default=-1)
        opened = sum(self.terms.count - taken for epoch, taken in self.handed_out if epoch < self.passes)
        return opened + self.terms.count * max(0, self.passes - 1 - newest) if self.passes else 0


def tables(segment: Segment) -> Iterator[tuple[int, LeaseTable]]:
    """The tables made so far with their numbers, each open until the next."""
    found = (path for path in segment.path.glob("leases-*") if path.name[7:].isdigit())
    for path in sorted(found, key=lambda path: int(path.name[7:])):
        with closing(LeaseTable(segment, path)) as table:
            yield int(path.name[7:]), table


def restore(segment: Segment, number: int, saved: LeaseSnapshot) -> None:
    """Make the table of data set `number` as it was saved, unless another process was faster."""
    content = bytearray(_TABLE.itemsize)
    fields = _Fields(content)
    terms = saved.terms
    fields.count[0], fields.lease_size[0], fields.shuffle[0] = terms.count, terms.lease_size, terms.shuffle
    for i, (epoch, cursor) in enumerate(saved.handed_out):
        fields.epoch[i], fields.cursor[i] = epoch + 1, cursor
    # From a random slot on: a worker may still report slots of the table before the snapshot, and must not hit these.
    first = secrets.randbelow(MAX_LEASES)
    for i, (epoch, start, stop) in enumerate(saved.leased):
        slot = (first + i) % MAX_LEASES
        fields.owner[slot], fields.start[slot] = _NOBODY, start
        fields.epoch_and_size[slot] = epoch << 32 | (stop - start)
    fields.hint[0] = (first + len(saved.leased)) % MAX_LEASES
    try:
        write_once(segment.path / f"leases-{number}", bytes(content))
    except OSError as error:
        raise shared_memory_full(segment.path, error) from error
