"""Leases in an MPI job: cursors in a window, which whoever asks moves on by one.

A sampler has a few words at one rank: its terms, and a ring of cursors, each the number of an epoch and how many of
its chunks were handed out. Nobody can die alone there, so nobody has to give anything back: a chunk that was handed
out is taken, and a pass is over when all were.
"""

from maniple.center.job import CURSORS, Job
from maniple.errors import InvalidArgument
from maniple.sampler.lease import Lease, Terms, Verdict

_COUNT, _CHUNK, _RING = range(3)
_EPOCHS = 13  # so many epochs may be open at a time; of more, the oldest is closed
_WORDS = _RING + _EPOCHS + 1
MOST_SAMPLERS = CURSORS // _WORDS


class Cursors:
    """The leases of one data set (`sampler.Lender`)."""

    def __init__(self, job: Job, number: int, terms: Terms) -> None:
        if number >= MOST_SAMPLERS:
            raise InvalidArgument(
                f"this is sampler {number + 1} of the worker, but an MPI job has room for {MOST_SAMPLERS} that share "
                "their samples. Make them once, before the loop, or with static=True."
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
        self._chunks = -(-terms.count // self.terms.chunk)

    first_epoch = 0  # nobody joins later, and nothing is resumed

    def take(
        self,
        epoch: int,
        *,
        drawn: list[int] | None = None,
        done: list[int] | None = None,
        back: list[int] | None = None,
    ) -> Lease | Verdict:
        """The next chunk of the pass `epoch`; -1 asks for nothing."""
        del drawn, done, back
        if epoch < 0:
            return Verdict.END
        place, seen = _RING + epoch % _EPOCHS, 0
        while True:
            opened, cursor = (seen >> 32) - 1, seen & 0xFFFFFFFF
            if opened > epoch or (opened == epoch and cursor == self._chunks):
                return Verdict.END
            cursor = cursor if opened == epoch else 0  # else the cursor of an older epoch stands there
            was = self._swap(place, seen, (epoch + 1) << 32 | (cursor + 1))
            if was == seen:
                return Lease(0, epoch, cursor)
            seen = was

    def _settle(self, word: int, value: int) -> int:
        """The value of the worker who came first."""
        return self._swap(word, 0, value) or value

    def _swap(self, word: int, expected: int, new: int) -> int:
        return self._job.swap_cursor(self._first + word, expected, new)
