"""The table of leases: who has taken which samples of a data set, in the run's shared memory.

Whoever asks gets the next range of the samples of an epoch, in the order of that epoch's shuffle, as a *lease*, and
gives it back *done* when the center has what was learned from it. So at any time

    a sample below the epoch's cursor is done, unless a lease has it;     a sample at or above it is free.

A lease whose worker is no longer alive is handed to the next who asks. All changes are made under one lock that the
kernel gives back when its holder dies, each by one word at a time and in such an order that a worker killed between
two of them leaves samples leased twice, never some that nobody has.

A worker whose passes are limited (`most`) takes from the earliest epoch that has samples left, whatever the number of
its pass, up to the newest pass that any worker has begun. If W workers make E passes of at most 1/W of an epoch each,
all E epochs are taken exactly, though some are faster than others: the fast ones are at a later pass, never at a
later epoch. Without a limit, pass k takes from epoch k alone, and ends with it.
"""

import mmap
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maniple.center.locks import ByteLocks
from maniple.center.segment import MAX_WORKERS, Segment, refusal
from maniple.errors import InvalidArgument
from maniple.record.folder import write_once
from maniple.sampler.lease import Holder, Lease, Terms, Unfinished, Verdict

_EPOCHS = 16  # so many epochs may be open at a time; of more, the oldest is closed
MOST_LEASES = 16384
_COUNT, _CHUNK, _SHUFFLE, _HINT = range(4)
_BEGUN, _FIRST, _LIMIT = range(4, 7)  # of limited passes: the newest and the first, counted from 1; the first's limit
_EPOCH, _CURSOR = 8, 8 + _EPOCHS
_HEAD = 8 + 2 * _EPOCHS
# Of each lease its owner, its first sample, and its epoch and number of samples in one word.
_OWNERS, _STARTS, _SIZES, _RANKS = (_HEAD + i * MOST_LEASES for i in range(4))
# Of each rank its first limited pass, counted from 1, and how many samples it has done, by all its processes.
_FIRSTS, _DONE = _RANKS, _RANKS + MAX_WORKERS
_WORDS = _DONE + MAX_WORKERS
_LARGEST = 0x7FFFFFFF  # a lease
_DRAWN = 1 << 62
_NOBODY = 1 << 61  # the owner of leases that come from a snapshot
_LOCK_S = 60.0


class Table:
    """The leases of one data set."""

    def __init__(self, segment: Segment, path: Path) -> None:
        self._segment = segment
        self._locks = ByteLocks(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _WORDS * 8)
        self._words = memoryview(self._map).cast("q")
        self._owners = np.frombuffer(self._map, np.int64, MOST_LEASES, _OWNERS * 8)
        self._last = 0  # where the cursor stood that was asked for last
        self._seen = -1  # the departures after which no lease was left without an owner
        self.terms = Terms(self._words[_COUNT], self._words[_CHUNK], bool(self._words[_SHUFFLE]))
        self._chunk = min(self.terms.chunk, _LARGEST)

    @classmethod
    def open(cls, segment: Segment, number: int, terms: Terms) -> "Table":
        """The table of the run's data set `number`, made if it is not there. The first worker's chunk size holds."""
        path = segment.path / f"leases-{number}"
        if not path.exists():
            _make(path, Unfinished(terms))
        table = cls(segment, path)
        try:
            table.compare(number, terms)
        except InvalidArgument:
            table.close()
            raise
        return table

    def compare(self, number: int, terms: Terms) -> None:
        """Raise InvalidArgument if a worker has other data than the one who came first."""
        there = self.terms
        if (there.count, there.shuffle) != (terms.count, terms.shuffle):
            raise InvalidArgument(
                f"sampler {number} of this worker has {terms.count} samples (shuffle={terms.shuffle}), that of the "
                f"worker who came first {there.count} (shuffle={there.shuffle}). All workers must call "
                "worker.sampler() on the same data, in the same order."
            )

    def take(
        self,
        holder: Holder,
        epoch: int,
        *,
        most: int = 0,
        held: Sequence[int] | None = None,
        drawn: Sequence[int] = (),
        done: Sequence[int] = (),
        back: Sequence[int] = (),
    ) -> Lease | Verdict:
        """The next lease for a worker in its pass `epoch`: one that was left behind, else the next chunk.

        Args:
            holder: who asks.
            epoch: the pass it is in; -1 asks for nothing and only gives back.
            most: how many more samples this pass may have; 0: any number, of this epoch only.
            held: the slots it has, where an answer may have been lost: what it has beside them is answered again.
            drawn: slots all of whose samples it has handed on by now.
            done: slots that are finished.
            back: slots that it will not finish; somebody else may.
        """
        self._hold()
        try:
            me = holder.word
            for slots, owner in ((drawn, _DRAWN), (done, 0), (back, _NOBODY)):
                if slots:
                    self._hear(me, slots, owner)
            return Verdict.END if epoch < 0 else self._take(me, epoch, most, held)
        finally:
            self._locks.give(0)

    def _hear(self, me: int, slots: Sequence[int], owner: int) -> None:
        """Change the owner of leases that a worker has."""
        words = self._words
        for slot in slots:
            if words[_OWNERS + slot] & ~_DRAWN == me:  # else it was thought dead, and another has it now
                words[_OWNERS + slot] = me | _DRAWN if owner == _DRAWN else owner
                if not owner:
                    words[_DONE - 1 + (me & 0xFFFF)] += words[_SIZES + slot] & 0xFFFFFFFF

    def _take(self, me: int, epoch: int, most: int, held: Sequence[int] | None) -> Lease | Verdict:
        words, rank = self._words, (me & 0xFFFF) - 1
        if held is not None and (lost := self._lost(me, held)) is not None:
            return lost
        if most and (words[_BEGUN] <= epoch or not words[_FIRSTS + rank]):
            self._begin_pass(rank, epoch, most)
        place, count = self._earliest() if most else self._place(epoch), self.terms.count
        cursor = count if place is None else words[_CURSOR + place]
        departures = self._segment.departures
        if cursor == count or departures != self._seen:
            left = self._left_behind()
            for slot in left:
                if not most or words[_SIZES + slot] >> 32 < words[_BEGUN]:
                    return self._hand_over(slot, me, most)
            self._seen = self._seen if left else departures
            if cursor == count and most:
                place, cursor = self._open_next(epoch)
        if place is None or cursor == count:
            epochs = range(words[_BEGUN]) if most else range(epoch, epoch + 1)
            return Verdict.WAIT if self._is_drawing(epochs, me) else Verdict.END
        if (slot := self._free()) is None and (slot := self._give_up_oldest()) is None:
            return Verdict.FULL
        size = most if 0 < most < self._chunk else self._chunk
        lease = Lease(slot, words[_EPOCH + place] - 1, cursor, cursor + size if cursor + size < count else count)
        self._write(lease, me)
        words[_CURSOR + place] = lease.stop
        words[_HINT] = (slot + 1) % MOST_LEASES
        return lease

    def _begin_pass(self, rank: int, epoch: int, most: int) -> None:
        """No worker has come to this pass before, or it is the first of this one."""
        words = self._words
        if not words[_BEGUN]:
            words[_LIMIT], words[_FIRST] = most, epoch + 1
        words[_FIRSTS + rank] = words[_FIRSTS + rank] or epoch + 1
        words[_BEGUN] = max(words[_BEGUN], epoch + 1)

    def _hand_over(self, slot: int, me: int, most: int) -> Lease | Verdict:
        """Give a lease that was left behind to a worker; if it is larger than `most`, its end remains left behind."""
        lease = self._lease(slot)
        if 0 < most < lease.samples:
            if (rest := self._free()) is None:
                return Verdict.FULL
            self._write(Lease(rest, lease.epoch, lease.start + most, lease.stop), _NOBODY)
            # A death before this line leaves the end leased twice.
            self._words[_SIZES + slot] = lease.epoch << 32 | most
        self._words[_OWNERS + slot] = me
        return self._lease(slot)

    def _write(self, lease: Lease, owner: int) -> None:
        """Make a lease in a slot that is not in use; it is one when its owner is written."""
        words, slot = self._words, lease.slot
        words[_STARTS + slot] = lease.start
        words[_SIZES + slot] = lease.epoch << 32 | (lease.stop - lease.start)
        words[_OWNERS + slot] = owner

    def _hold(self) -> None:
        self._locks.insist(0, timeout_s=_LOCK_S, what="the table of leases")

    def unfinished(self) -> Unfinished:
        """How far the table is, as a snapshot keeps it."""
        self._hold()
        try:
            words = self._words
            handed_out = [(words[_EPOCH + i] - 1, words[_CURSOR + i]) for i in range(_EPOCHS) if words[_EPOCH + i]]
            leases = [self._lease(int(slot)) for slot in np.flatnonzero(self._owners)]
            leased = sorted((one.epoch, one.start, one.stop) for one in leases)
            return Unfinished(self.terms, sorted(handed_out), leased, words[_BEGUN])
        finally:
            self._locks.give(0)

    def first_epoch(self, rank: int, limit: int) -> int:
        """The pass in which a process of worker `rank` begins, if passes have at most `limit` samples (0: any number).

        Each worker with which the run began makes all its passes, though it was slow to start. If processes of that
        rank were here before, it continues where they have come to with what they have done. So all of them take as
        many samples as any other worker. One that has joined since begins in the first epoch of which samples are
        left: not handed out, or handed out and not done.
        """
        words = self._words
        is_expected = rank * words[_LIMIT] < self.terms.count
        first = words[_FIRSTS + rank] or (words[_FIRST] if is_expected else 0)
        return first - 1 + words[_DONE + rank] // limit if limit and first else self.unfinished().progress[0]

    def begin_again(self) -> None:
        """The run is resumed: all workers begin in the first epoch of which samples are left."""
        self._hold()
        try:
            for word in (_BEGUN, _FIRST, _LIMIT, *range(_RANKS, _WORDS)):
                self._words[word] = 0
        finally:
            self._locks.give(0)

    def close(self) -> None:
        """Let the table go."""
        self._locks.close()
        self._words.release()
        del self._owners
        self._map.close()

    def _earliest(self) -> int | None:
        """Where the cursor of the earliest epoch with samples left stands, of epochs as far as passes were begun."""
        words, last, count = self._words, self._last, self.terms.count
        if not words[_EPOCH + last] or words[_CURSOR + last] == count:
            epochs = words[_EPOCH : _EPOCH + _EPOCHS].tolist()
            open_ = [(epoch, i) for i, epoch in enumerate(epochs) if epoch and words[_CURSOR + i] < count]
            if not open_:
                return None
            self._last = last = min(open_)[1]
        return last if words[_EPOCH + last] <= words[_BEGUN] else None

    def _open_next(self, epoch: int) -> tuple[int | None, int]:
        """Open the epoch after the newest, or `epoch` as the first of all, if a pass was begun for it; its cursor."""
        epoch = max(self._words[_EPOCH : _EPOCH + _EPOCHS].tolist()) or epoch
        return (self._place(epoch), 0) if epoch < self._words[_BEGUN] else (None, 0)

    def _place(self, epoch: int) -> int | None:
        """Where the cursor of `epoch` stands, opened if the epoch is new; None if it was closed."""
        words = self._words
        if words[_EPOCH + self._last] == epoch + 1:
            return self._last
        epochs = words[_EPOCH : _EPOCH + _EPOCHS].tolist()
        if epoch + 1 in epochs:
            self._last = epochs.index(epoch + 1)
            return self._last
        if epoch + 1 < max(epochs):
            return None
        place = epochs.index(min(epochs))
        words[_EPOCH + place] = 0  # a death between these lines leaves no epoch with another's cursor
        words[_CURSOR + place] = 0
        words[_EPOCH + place] = epoch + 1
        return place

    def _lease(self, slot: int) -> Lease:
        start, word = self._words[_STARTS + slot], self._words[_SIZES + slot]
        return Lease(slot, word >> 32, start, start + (word & 0xFFFFFFFF))

    def _lost(self, me: int, held: Sequence[int]) -> Lease | None:
        """A lease that this worker has and does not know of: the answer did not reach it."""
        for slot in np.flatnonzero(self._owners == me).tolist():
            if slot not in held:
                return self._lease(slot)
        return None

    def _left_behind(self) -> list[int]:
        """The leases whose workers are no longer alive, oldest first."""
        used = np.flatnonzero(self._owners)
        owners = self._owners[used] & ~_DRAWN
        gone = [word for word in set(owners.tolist()) if not self._is_live(word)]
        slots = used[np.isin(owners, gone)].tolist() if gone else []
        return sorted(slots, key=lambda slot: (self._words[_SIZES + slot] >> 32, self._words[_STARTS + slot]))

    def _is_live(self, word: int) -> bool:
        return word < _NOBODY and self._segment.is_live((word & 0xFFFF) - 1, word >> 16)

    def _is_drawing(self, epochs: range, me: int) -> bool:
        """Somebody else still hands on samples of these epochs."""
        others = np.flatnonzero((self._owners != 0) & (self._owners < _DRAWN) & (self._owners != me)).tolist()
        return any(self._words[_SIZES + slot] >> 32 in epochs for slot in others)

    def _free(self) -> int | None:
        """A slot for one more lease; None if there is none."""
        slot = self._words[_HINT]
        if self._words[_OWNERS + slot]:
            slot = int(np.argmin(self._owners != 0))
        return None if self._words[_OWNERS + slot] else slot

    def _give_up_oldest(self) -> int | None:
        """Free the oldest slot left behind, where workers that leave their passes early have filled the table."""
        for slot in self._left_behind():
            self._words[_OWNERS + slot] = 0
            return slot
        return None


def restore(segment: Segment, number: int, saved: Unfinished) -> None:
    """Make a table as a snapshot has kept it."""
    _make(segment.path / f"leases-{number}", saved)


def tables(segment: Segment) -> list[tuple[int, Path]]:
    """The tables made so far."""
    found = (path for path in segment.path.glob("leases-*") if path.name[7:].isdigit())
    return sorted((int(path.name[7:]), path) for path in found)


def _make(path: Path, saved: Unfinished) -> None:
    """Make a table whole and give it its name, unless somebody was quicker."""
    words = np.zeros(_WORDS, np.int64)
    words[[_COUNT, _CHUNK, _SHUFFLE]] = saved.terms.count, saved.terms.chunk, saved.terms.shuffle
    for i, (epoch, cursor) in enumerate(saved.handed_out):
        words[[_EPOCH + i, _CURSOR + i]] = epoch + 1, cursor
    # A worker may still speak of slots in the table before the snapshot: it must not mean leases of this one.
    first = secrets.randbelow(MOST_LEASES)
    for i, (epoch, start, stop) in enumerate(saved.leased):
        slot = (first + i) % MOST_LEASES
        words[[_OWNERS + slot, _STARTS + slot, _SIZES + slot]] = _NOBODY, start, (epoch << 32) | (stop - start)
    words[_HINT] = (first + len(saved.leased)) % MOST_LEASES
    try:
        write_once(path, words.tobytes())
    except OSError as error:
        raise refusal(path.parent, error) from error
