"""The table of leases: who has taken which samples of a data set, in the run's shared memory.

The samples of an epoch, in the order of that epoch's shuffle, are cut into chunks. Whoever asks gets the next chunk
as a *lease*, and gives it back *done* when the center has what was learned from it. So at any time

    a chunk below the epoch's cursor is done, unless a lease names it;     a chunk at or above it is free.

A lease whose worker is no longer alive is handed to the next who asks. All changes are made under one lock that the
kernel gives back when its holder dies, each by one word at a time and in such an order that a worker killed between
two of them leaves a chunk leased twice, never one that nobody has.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maniple.center.locks import ByteLocks
from maniple.center.segment import Segment, refusal
from maniple.errors import InvalidArgument
from maniple.sampler.lease import Holder, Lease, Terms, Unfinished, Verdict

_EPOCHS = 16  # so many epochs may be open at a time; of more, the oldest is closed
MOST_LEASES = 16384
_COUNT, _CHUNK, _SHUFFLE, _HINT = range(4)
_EPOCH, _CURSOR = 8, 8 + _EPOCHS
_HEAD = 8 + 2 * _EPOCHS
_OWNERS, _LEASED = _HEAD, _HEAD + MOST_LEASES  # owner of each lease; its epoch and chunk in one word
_WORDS = _HEAD + 2 * MOST_LEASES
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
        self.chunks = -(-self.terms.count // self.terms.chunk)

    @classmethod
    def open(cls, segment: Segment, number: int, terms: Terms) -> "Table":
        """The table of the run's data set `number`, made if it is not there. The first worker's chunk size holds."""
        path = segment.path / f"leases-{number}"
        if not path.exists():
            _make(path, Unfinished(terms, [], []))
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
        held: Sequence[int] | None = None,
        drawn: Sequence[int] = (),
        done: Sequence[int] = (),
        back: Sequence[int] = (),
    ) -> Lease | Verdict:
        """The next lease for a worker in its pass `epoch`: one that was left behind, else the next chunk.

        Args:
            holder: who asks.
            epoch: the pass it is in; -1 asks for nothing and only gives back.
            held: the slots it has, where an answer may have been lost: what it has beside them is answered again.
            drawn: slots all of whose samples it has handed on by now.
            done: slots that are finished.
            back: slots that it will not finish; somebody else may.
        """
        self._hold()
        try:
            return self._take(holder.word, epoch, held, ((drawn, _DRAWN), (done, 0), (back, _NOBODY)))
        finally:
            self._locks.give(0)

    def _take(
        self,
        me: int,
        epoch: int,
        held: Sequence[int] | None,
        news: tuple[tuple[Sequence[int], int], ...],
    ) -> Lease | Verdict:
        words = self._words
        for slots, owner in news:
            for slot in slots:
                if words[_OWNERS + slot] & ~_DRAWN == me:  # else it was thought dead, and another has it now
                    words[_OWNERS + slot] = me | _DRAWN if owner == _DRAWN else owner
        if epoch < 0:
            return Verdict.END
        if held is not None and (lost := self._lost(me, held)) is not None:
            return lost
        place = self._place(epoch)
        cursor = self.chunks if place is None else words[_CURSOR + place]
        departures = self._segment.departures
        if cursor == self.chunks or departures != self._seen:
            for slot in self._left_behind():
                words[_OWNERS + slot] = me
                return self._lease(slot)
            self._seen = departures
        if place is None or cursor == self.chunks:
            return Verdict.WAIT if self._is_drawing(epoch, me) else Verdict.END
        if (slot := self._free()) is None:
            return Verdict.FULL
        words[_LEASED + slot] = (epoch << 32) | cursor
        words[_OWNERS + slot] = me
        words[_CURSOR + place] = cursor + 1
        words[_HINT] = (slot + 1) % MOST_LEASES
        return Lease(slot, epoch, cursor)

    def _hold(self) -> None:
        self._locks.insist(0, timeout_s=_LOCK_S, what="the table of leases")

    def unfinished(self) -> Unfinished:
        """How far the table is, as a snapshot keeps it."""
        self._hold()
        try:
            words = self._words
            cursors = [(words[_EPOCH + i] - 1, words[_CURSOR + i]) for i in range(_EPOCHS) if words[_EPOCH + i]]
            leases = [self._lease(int(slot)) for slot in np.flatnonzero(self._owners)]
            return Unfinished(self.terms, sorted(cursors), sorted((one.epoch, one.chunk) for one in leases))
        finally:
            self._locks.give(0)

    @property
    def first_epoch(self) -> int:
        """The first epoch of which samples are left: not handed out, or handed out and not done."""
        return self.unfinished().progress[0]

    def close(self) -> None:
        """Let the table go."""
        self._locks.close()
        self._words.release()
        del self._owners
        self._map.close()

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
        word = self._words[_LEASED + slot]
        return Lease(slot, word >> 32, word & 0xFFFFFFFF)

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
        return sorted(slots, key=lambda slot: self._words[_LEASED + slot])

    def _is_live(self, word: int) -> bool:
        return word < _NOBODY and self._segment.is_live((word & 0xFFFF) - 1, word >> 16)

    def _is_drawing(self, epoch: int, me: int) -> bool:
        """Somebody else still hands on samples of this epoch."""
        others = np.flatnonzero((self._owners != 0) & (self._owners < _DRAWN) & (self._owners != me))
        return any(self._words[_LEASED + slot] >> 32 == epoch for slot in others.tolist())

    def _free(self) -> int | None:
        """A slot for one more lease; None if there is none."""
        slot = self._words[_HINT]
        if self._words[_OWNERS + slot]:
            slot = int(np.argmin(self._owners != 0))
        if not self._words[_OWNERS + slot]:
            return slot
        left = self._left_behind()  # workers that leave their passes early have filled the table: its oldest entry goes
        return left[0] if left else None


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
    for i, (epoch, cursor) in enumerate(saved.cursors):
        words[[_EPOCH + i, _CURSOR + i]] = epoch + 1, cursor
    # A worker may still speak of slots in the table before the snapshot: it must not mean leases of this one.
    first = secrets.randbelow(MOST_LEASES)
    for i, (epoch, chunk) in enumerate(saved.leases):
        slot = (first + i) % MOST_LEASES
        words[[_OWNERS + slot, _LEASED + slot]] = _NOBODY, (epoch << 32) | chunk
    words[_HINT] = (first + len(saved.leases)) % MOST_LEASES
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(words.tobytes())
        os.link(beside, path)
    except FileExistsError:
        pass
    except OSError as error:
        raise refusal(path.parent, error) from error
    finally:
        beside.unlink(missing_ok=True)
