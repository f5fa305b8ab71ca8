"""Leases in an MPI job: cursors in a window, which whoever asks moves on.

A sampler has a few words at one rank: its terms, and a ring of cursors, each the number of an epoch and how many of
its samples were handed out. Nobody can die alone there, so what a worker gives back is kept for its own next pass: a
sample that was handed out is taken, and a pass is over when all were. `table` tells which epochs a pass takes from.
"""

import msgspec

from maniple.center.job import CURSORS, Job
from maniple.errors import InvalidArgument
from maniple.sampler.lease import Lease, Terms, Verdict

_COUNT, _CHUNK, _FIRST, _BEGUN, _RING = range(5)  # the first epoch of limited passes, and how many were begun
_EPOCHS = 11  # so many epochs may be open at a time; of more, the oldest is closed
_WORDS = _RING + _EPOCHS
_MOST_SAMPLES = 0xFFFFFFFF  # the cursor and its epoch are one word
MOST_SAMPLERS = CURSORS // _WORDS


class Cursors:
    """The leases of one data set (`sampler.Lender`)."""

    def __init__(self, job: Job, number: int, terms: Terms) -> None:
        if number >= MOST_SAMPLERS:
            raise InvalidArgument(
                f"this is sampler {number + 1} of the worker, but an MPI job has room for {MOST_SAMPLERS} that share "
                "their samples. Make them once, before the loop, or with static=True."
            )
        if terms.count > _MOST_SAMPLES:
            raise InvalidArgument(
                f"{terms.count:,} samples cannot be shared in an MPI job, which counts up to {_MOST_SAMPLES:,}. "
                "Use static=True."
            )
        self._job, self._first = job, number * _WORDS
        there = self._settle(_COUNT, 2 * terms.count + terms.shuffle)
        if there != 2 * terms.count + terms.shuffle:
            raise InvalidArgument(
                f"sampler {number} of this worker has {terms.count} samples (shuffle={terms.shuffle}), that of the "
                f"worker who came first {there // 2} (shuffle={bool(there % 2)}). All workers must call "
                "worker.sampler() on the same data, in the same order."
            )
        self.terms = Terms(terms.count, self._settle(_CHUNK, terms.chunk), terms.shuffle)
        self._epoch: int | None = None  # from which a limited pass has taken last
        self._begun = 0  # limited passes of this worker, as the others know
        self._number = 0  # of leases so far
        self._lent: dict[int, Lease] = {}  # those that are not done
        self._left: list[Lease] = []  # those that were given back

    def first_epoch(self, limit: int) -> int:
        """Nobody joins later, and nothing is resumed."""
        del limit
        return 0

    def take(
        self,
        epoch: int,
        *,
        most: int = 0,
        drawn: list[int] | None = None,
        done: list[int] | None = None,
        back: list[int] | None = None,
    ) -> Lease | Verdict:
        """The next samples of the pass `epoch`, at most `most` if that is not 0; -1 asks for nothing."""
        del drawn
        for slot in done or []:
            self._lent.pop(slot, None)
        self._left += [self._lent.pop(slot) for slot in back or [] if slot in self._lent]
        if epoch < 0:
            return Verdict.END
        found = self._left_over(most) if self._left else self._next(epoch, most)
        if found is None:
            return Verdict.END
        self._number += 1
        lease = self._lent[self._number] = msgspec.structs.replace(found, slot=self._number)
        return lease

    def _left_over(self, most: int) -> Lease:
        """What this worker has given back first, as far as `most`."""
        lease = self._left.pop(0)
        if 0 < most < lease.samples:
            self._left.insert(0, msgspec.structs.replace(lease, start=lease.start + most))
            lease = msgspec.structs.replace(lease, stop=lease.start + most)
        return lease

    def _next(self, epoch: int, most: int) -> Lease | None:
        """The next samples that nobody has taken."""
        if not most:
            return self._taken(epoch, self.terms.chunk)
        begun = self._begin_pass(epoch)
        if self._epoch is None:
            self._epoch = self._settle(_FIRST, epoch + 1) - 1
        while (lease := self._taken(self._epoch, min(most, self.terms.chunk))) is None:
            if self._epoch + 1 >= begun and self._epoch + 1 >= (begun := self._swap(_BEGUN, 0, 0)):
                return None
            self._epoch += 1
        return lease

    def _taken(self, epoch: int, most: int) -> Lease | None:
        """The next samples of an epoch; None if all of it are taken."""
        place, seen = _RING + epoch % _EPOCHS, 0
        while True:
            opened, cursor = (seen >> 32) - 1, seen & 0xFFFFFFFF
            if opened > epoch or (opened == epoch and cursor == self.terms.count):
                return None
            cursor = cursor if opened == epoch else 0  # else the cursor of an older epoch stands there
            stop = min(self.terms.count, cursor + most)
            was = self._swap(place, seen, (epoch + 1) << 32 | stop)
            if was == seen:
                return Lease(0, epoch, cursor, stop)
            seen = was

    def _begin_pass(self, epoch: int) -> int:
        """Let all know that a limited pass was begun; gives how many were, by the furthest worker or more."""
        if self._begun <= epoch:
            seen = 0
            while seen <= epoch and (was := self._swap(_BEGUN, seen, epoch + 1)) != seen:
                seen = was
            self._begun = epoch + 1
        return self._begun

    def _settle(self, word: int, value: int) -> int:
        """The value of the worker who came first."""
        return self._swap(word, 0, value) or value

    def _swap(self, word: int, expected: int, new: int) -> int:
        return self._job.swap_cursor(self._first + word, expected, new)
