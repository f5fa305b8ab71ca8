"""Samplers: which samples a worker trains on, by fixed shares (`Shard`) or by leases (`Sampler`).

Both hand out indices pass by pass, count how many of them were trained on although loaders draw ahead, and recognize
passes in which a script only looks at a batch.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, Unpack

import numpy as np
import numpy.typing as npt

from maniple.clock import Deadline, clock
from maniple.errors import InvalidArgument
from maniple.sampler.leases import Lease, LeaseReports, LeaseTerms, NoLease

Indices = npt.NDArray[np.int64]

_PIECE = 128  # samples between two checks of `should_stop`
_LAST_LEASES_S = 10.0  # at least, at the end of a pass, for workers that have the last samples
_MAX_FRAMES = 30  # of the stack that are searched for a sharding wrapper
_MAX_SHOWN = 1024  # samples of a pass that is only looked at: a batch, for any usual loader
_PEEK_S = 10.0  # for this long, a loop without a shared model may only look at a batch: its leases stay open
_MAX_OPEN = 256  # leases kept open until the center has them; beyond this the oldest counts as done


class Lender(Protocol):
    """Where a sampler gets its leases."""

    @property
    def terms(self) -> LeaseTerms: ...
    def first_epoch(self, limit: int, /) -> int:
        """The pass in which this worker begins, if passes have at most `limit` samples (0: no limit)."""
        ...

    def take(self, epoch: int, *, most: int = ..., **reports: Unpack[LeaseReports]) -> Lease | NoLease: ...


@dataclass
class _NewestPass:
    before: int = 0  # samples taken before it
    is_untrained: bool = False  # no step was made in it
    is_drawn: bool = False  # all of its samples were drawn
    is_shown: bool = False  # its samples belong to other workers, and are not trained on


class SampleOrder:
    """The samples of all epochs in their order, and how many of them this worker has taken.

    Attributes:
        count: the samples of an epoch, over all workers.
        epoch: the passes begun.
        first_epoch: the first epoch with samples left when this sampler was made.
        is_finished: the passes up to `max_epochs` are made.
        has_begun: a pass or a loop over epochs has begun, so the next pass is meant for training.

    Args:
        is_shared: whether a model is shared: samples drawn before its first step are not trained on yet.
        is_looked_at, on_look: whether the run's script looks at a batch before it trains, and the report that it does.
        on_empty: called with `first_epoch` when a pass of an earlier epoch begins.

    A pass without a training step, though a model is shared, is not an epoch if it was left early or came before the
    first step of all: the script has only looked at a batch, and the next pass is the same epoch again. In a run whose
    script does so, a worker that joins late or again may find its first pass over: it is then shown samples of others.
    """

    def __init__(
        self,
        count: int,
        *,
        seed: tuple[int, ...],
        shuffle: bool = True,
        max_epochs: int = 0,
        is_shared: Callable[[], bool] = lambda: False,
        is_looked_at: Callable[[], bool] = lambda: False,
        on_look: Callable[[], None] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
        on_empty: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.count = count
        self.epoch = self.first_epoch = 0
        self.is_finished = self.has_begun = False
        self._seed, self._shuffle, self._max_epochs, self._should_stop = seed, shuffle, max_epochs, should_stop
        self._is_shared, self._is_looked_at, self._on_look, self._on_empty = is_shared, is_looked_at, on_look, on_empty
        self._world = 1
        self._has_stepped = False
        self._may_look_at_all = True  # one whole pass without a step may be a look
        self._pass = _NewestPass()
        self._lead = LoaderLead()
        self._skipped = 0  # by how much passes are ahead of the numbers that `set_epoch` uses
        self._given = 0
        self._rest: Iterator[int] = iter(())  # of the piece being handed out
        self._pending = 0  # given to `batches` and not handed out yet

    @property
    def taken(self) -> int:
        """The samples handed out in all passes."""
        return self._given - self._rest.__length_hint__() - self._pending  # type: ignore[attr-defined] # pyright: ignore

    @property
    def progress(self) -> float:
        """How many epochs of the run were handed out, as far as this worker knows: 2.5 in the middle of the third.

        For learning rates that follow the samples of all workers instead of this worker's steps.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        _check_not_sharded(self._world)
        return chain.from_iterable(self._pieces())  # within a piece, a sample costs no Python code

    def batches(self, size: int, *, drop_last: bool = False) -> Iterator[Indices]:
        """One pass as arrays of `size` indices, for frameworks that have no loader."""
        if size < 1:
            raise InvalidArgument(f"batches of {size} samples cannot be made. Give 1 or more.")
        rest = np.empty(0, np.int64)
        for indices in self._begin_pass():
            rest = np.concatenate([rest, indices])
            self._given += len(indices)
            self._pending = len(rest)
            while self._pending >= size and not self._should_stop():
                batch, rest = rest[:size], rest[size:]
                self._pending = len(rest)
                yield batch
            if self._should_stop():
                break
        self._pending = 0
        if drop_last or self._should_stop():
            self._given -= len(rest)
        elif len(rest):
            yield rest

    def permutation(self, epoch: int) -> Indices:
        """The order of one epoch, the same for all workers."""
        if not self._shuffle:
            return np.arange(self.count)
        return np.random.default_rng([*self._seed, epoch]).permutation(self.count)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass epoch `epoch`, for scripts that were written for torch's DistributedSampler.

        Passes count by themselves, so in a loop from 0 on this changes nothing. A finished epoch is not repeated: a
        second loop that begins at 0 continues with the epochs that follow.
        """
        if epoch < 0:
            raise InvalidArgument(f"epoch {epoch} cannot be set. Epochs count from 0; give 0 or more.")
        self.rewind()
        self._skipped = max(self._skipped, self.epoch - epoch)
        self.epoch = epoch + self._skipped

    def rewind(self, *, is_last: bool = False) -> bool:
        """If the script only looked at the newest pass, repeat its epoch in the next one; returns whether it did.

        With `is_last` there is no next pass. It may have been training that came to no step, so it is not reported.
        """
        newest = self._pass
        may_be_look = not newest.is_drawn or (self._may_look_at_all and self._given > newest.before)
        if not newest.is_untrained or not may_be_look or not self._is_shared():
            return False
        # A loader that draws ahead takes all of a small data set when the script looks at one batch. Only once: a
        # script whose steps are not seen here would stay in its first epoch for ever.
        self._may_look_at_all &= not newest.is_drawn
        self.is_finished = False
        self.epoch -= 1
        self._given, self._rest, self._pending = newest.before, iter(()), 0
        self._pass = _NewestPass(newest.before, is_shown=newest.is_shown)
        if not is_last:
            self._on_look()
        return True

    def stepped(self) -> None:
        """A training step was made."""
        self._has_stepped, self._pass.is_untrained, self._may_look_at_all = True, False, False
        if not self._pass.is_shown:
            self._lead.stepped(self.taken)

    def mark(self) -> int:
        """How many samples have been trained on, to be given to `committed` once the center has learned from them."""
        return 0

    def committed(self, mark: int) -> None:
        """The center has everything that was learned until `mark`."""

    def passed(self) -> None:
        """The loop has finished a pass and trained on all of it."""
        self._pass.is_untrained = False

    def finish(self, *, is_early: bool) -> None:
        """No more samples will be taken; `is_early`: some that were taken may not be trained on."""

    def _pieces(self) -> Iterator[Iterator[int]]:
        for indices in self._begin_pass():
            for start in range(0, len(indices), _PIECE):
                if self._should_stop():
                    return
                piece = indices[start : start + _PIECE].tolist()
                self._given += len(piece)
                self._rest = iter(piece)
                yield self._rest

    def _begin_pass(self) -> Iterator[Indices]:
        """The indices of the next pass, a lease or a share at a time."""
        self.rewind()
        epoch, self.epoch = self.epoch, self.epoch + 1
        self._given, self._rest, self._pending = self.taken, iter(()), 0  # the last pass may have been left early
        self._pass = newest = _NewestPass(self._given, is_untrained=True)
        is_look = not self.has_begun and self._is_looked_at()
        self.has_begun = True
        if epoch < self.first_epoch and not is_look:
            self._on_empty(self.first_epoch)
        if not self._max_epochs or epoch < self._max_epochs:
            yield from self._indices(epoch)
        if is_look and self._given == newest.before:
            newest.is_shown = True
            yield from self._shown()
        if self._should_stop():
            return
        newest.is_drawn = True
        self.is_finished = 0 < self._max_epochs <= self.epoch

    def _shown(self) -> Iterator[Indices]:
        """Samples to look at where none are left to train on; they end with the first step."""
        for index in self.permutation(self.first_epoch)[:_MAX_SHOWN]:
            yield np.array([index])
            if self._has_stepped:
                return

    def _indices(self, epoch: int) -> Iterator[Indices]:
        raise NotImplementedError


class Shard(SampleOrder):
    """A fixed share: worker r takes positions r, r + world, r + 2 world ... of each epoch's order.

    All workers take equally many: the last `count % world` samples of an epoch's order are left out, others in each
    epoch. With `is_whole`, for validation, none is left out: shares may differ by one sample, and some are empty if
    there are fewer samples than workers; `divide` gives the ranks that share a pass. Two runs with the same seed take
    the same samples. After `begin_at`, passes of earlier epochs are empty, and the first other one begins in the
    middle of its epoch.
    """

    def __init__(
        self,
        count: int,
        *,
        rank: int,
        world: int,
        is_whole: bool = False,
        divide: Callable[[int], Sequence[int]] | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(count, **rest)
        if count < world and not is_whole:
            raise InvalidArgument(
                f"{count} samples cannot be shared by {world} workers: each needs at least one. "
                "Use fewer workers or more data."
            )
        self._rank = self._own_rank = rank
        self._world, self._divide, self._is_whole = world, divide, is_whole
        self._begun = self.start = (0, 0)  # epoch and offset in its order, of the newest and of the first pass
        self._base = self._share = 0  # the samples taken before the newest pass, and those of the pass itself
        self._postponed: tuple[int, int] | None = None  # where to begin, if the first pass turns out to be a look

    def __len__(self) -> int:
        return len(self._positions(0))

    def _positions(self, start: int) -> range:
        """This worker's positions in an epoch's order, from `start` on."""
        rest = self.count - start
        end = self.count if self._is_whole else start + rest - rest % self._world
        return range(start + self._rank, end, self._world)

    def begin_at(self, epoch: int, offset: int) -> None:
        """Continue there: earlier epochs are done, and `offset` samples of this one's order. Before the first pass."""
        if not self.epoch:
            each = (self.count - offset) // self._world
            self._begun = (epoch, offset) if offset >= 0 and each > 0 else (epoch + 1, 0)
            self.first_epoch, self.start = self._begun[0], self._begun
        elif self.epoch == 1 and self._pass.is_untrained:
            self._postponed = epoch, offset

    def rewind(self, *, is_last: bool = False) -> bool:
        has_rewound = super().rewind(is_last=is_last)
        if has_rewound and self._postponed is not None:
            self.begin_at(*self._postponed)
            self._postponed = None
        return has_rewound

    @property
    def progress(self) -> float:
        epoch, offset = self._begun
        return epoch + min(1.0, (offset + (self.taken - self._base) * self._world) / self.count)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and how many samples of its order all workers have trained on, if all are as far as this one."""
        epoch, offset = self._begun
        trained = self._lead.trained - self._base
        return (epoch + 1, 0) if 0 < self._share <= trained else (epoch, offset + trained * self._world)

    def passed(self) -> None:
        super().passed()
        if self.taken - self._base == self._share:
            self._lead.trained = self.taken

    def _indices(self, epoch: int) -> Iterator[Indices]:
        if epoch < self.first_epoch:
            return
        if self._divide is not None and self._own_rank in (ranks := self._divide(epoch)):
            self._rank, self._world = ranks.index(self._own_rank), len(ranks)
        offset = self._begun[1] if epoch == self._begun[0] else 0
        if not self._share:
            self.start = (epoch, offset)
        positions = self._positions(offset)
        self._share = len(positions)
        self._begun, self._base = (epoch, offset), self.taken
        self._lead.drained(self.taken)
        yield self.permutation(epoch)[positions.start : positions.stop : positions.step]


class Sampler(SampleOrder):
    """Leases: ranges of an epoch's order, taken by any worker that asks.

    A pass has at most `len(sampler)` samples, from the earliest epochs with samples left. Each sample is taken exactly
    once per epoch if no worker dies, and at least once otherwise, by another worker or after a restart; samples that no
    worker took when all have made their passes are left to `--resume`. With `balance`, passes are not limited: the k-th
    pass of every worker is the k-th epoch, of which fast workers take more, and it ends when all its samples are handed
    out. For a worker that joins late or again, the passes of finished epochs are empty.

    A lease is done when the center has what was learned from it: loaders draw samples before they are trained on, so
    the lead is measured in the first two steps of a pass. Without a shared model it is done when the next one is taken.
    """

    def __init__(
        self,
        count: int,
        *,
        lender: Lender,
        world: int,
        balance: bool = False,
        on_wait: Callable[[], None] = lambda: None,
        **rest: Any,
    ) -> None:
        super().__init__(count, **rest)
        self._on_wait = on_wait  # called while waiting: the workers with the last samples may be blocked on this one
        self._lender, self._world = lender, max(1, world)
        self._limit = 0 if balance else len(self)  # of samples in a pass; 0: none
        self.first_epoch = lender.first_epoch(self._limit)
        self._progress = float(self.first_epoch)
        self._open: deque[tuple[int, int]] = deque()  # leases handed out as a whole: slot, and their end in `taken`
        self._held: int | None = None  # the slot of the lease being handed out
        self._is_rewound = False  # the leases of a look are still held
        self._committed = 0  # samples that the center has
        self._began_s = 0.0  # when the newest pass began
        self._longest_s = 0.0  # that a lease took

    def __len__(self) -> int:
        """The most samples that one pass has for this worker; an estimate with `balance`."""
        return math.ceil(self.count / self._world)

    @property
    def _is_training(self) -> bool:
        return self._has_stepped or self._is_shared()

    @property
    def progress(self) -> float:
        return self._progress

    def rewind(self, *, is_last: bool = False) -> bool:
        has_rewound = super().rewind(is_last=is_last)
        self._is_rewound |= has_rewound
        return has_rewound

    def mark(self) -> int:
        return self._lead.trained

    def committed(self, mark: int) -> None:
        self._committed = max(self._committed, mark)

    def finish(self, *, is_early: bool) -> None:
        self.rewind(is_last=True)
        untrained = self._untrained() if self._is_rewound else []
        if self._held is None and self._lead.has_drained(self.taken, is_early=is_early):
            self._lead.drained(self.taken)
            self._committed = self._lead.trained
        done = self._done(is_last=True)
        back = [slot for slot, _ in self._open] + ([] if self._held is None else [self._held])
        self._lender.take(-1, done=done, back=untrained + back)

    def _indices(self, epoch: int) -> Iterator[Indices]:
        back, drawn = self._untrained(), list[int]()
        self._began_s = clock.monotonic()
        self._lead.drained(self.taken)  # a pass begins when the loader has handed out the last one
        orders: dict[int, Indices] = {}
        rest = self._limit if epoch >= self.first_epoch else 0
        while (rest or not self._limit) and not self._should_stop():
            lease = self._next_lease(epoch, rest, drawn=drawn, back=back)
            if lease is None:
                return
            rest -= lease.samples if self._limit else 0
            self._progress = max(self._progress, lease.epoch + lease.stop / self.count)
            if lease.epoch not in orders:
                orders = {epoch: order for epoch, order in orders.items() if epoch >= lease.epoch - 1}
                orders[lease.epoch] = self.permutation(lease.epoch)
            self._held, back = lease.slot, []
            begin = clock.monotonic()
            yield orders[lease.epoch][lease.start : lease.stop]
            self._longest_s = max(self._longest_s, clock.monotonic() - begin)
            self._open.append((lease.slot, self._given))
            self._held, drawn = None, [lease.slot]
        self._lender.take(-1, drawn=drawn, done=self._done(), back=back)

    def _next_lease(self, epoch: int, most: int, *, drawn: list[int], back: list[int]) -> Lease | None:
        """The next lease; None at the end of the pass, or if the workers with the last samples take too long."""
        pause_s, deadline = 0.001, Deadline(max(_LAST_LEASES_S, 3 * self._longest_s))
        while True:
            answer = self._lender.take(epoch, most=most, drawn=drawn, done=self._done(), back=back)
            if isinstance(answer, Lease):
                return answer
            if answer is NoLease.FULL and self._open:
                self._committed = max(self._committed, self._open[0][1])  # the oldest counts as done
                drawn, back = [], []
                continue
            if answer is NoLease.END or self._should_stop() or deadline.is_over():
                return None
            self._on_wait()
            clock.sleep(pause_s)
            pause_s, drawn, back = min(2 * pause_s, 0.05), [], []

    def _untrained(self) -> list[int]:
        """Remove and return the slots of leases that were not trained on, of a pass that was left early."""
        if not self._is_rewound and self._held is None and self._lead.has_drained(self.taken):
            return []
        until = self._lead.trained if self._is_training and not self._is_rewound else self.taken
        self._is_rewound = False
        slots = [slot for slot, end in self._open if end > until] + ([] if self._held is None else [self._held])
        self._open = deque(one for one in self._open if one[1] <= until)
        self._held = None
        return slots

    def _done(self, *, is_last: bool = False) -> list[int]:
        """Remove and return the slots of leases that are done."""
        until = self._committed if self._is_training else self._given - self._pending
        is_first_pass = not (self._pass.before or self._is_training or is_last)
        if is_first_pass and clock.monotonic() - self._began_s < _PEEK_S:
            until = 0  # the script may look at a batch before it shares its model
        done: list[int] = []
        while self._open and (self._open[0][1] <= until or len(self._open) > _MAX_OPEN):
            done.append(self._open.popleft()[0])
        return done


class LoaderLead:
    """How many of the samples that a loader has drawn were trained on.

    With taken(s) samples drawn at the end of step s, a loader that draws `a - 1` batches ahead has trained on
    taken(s - a + 1) of them. `a` is the number of batches drawn before the first step of a pass has ended, which is
    known at the second step. The size of the first step is known from earlier passes, if it has not changed.
    """

    def __init__(self) -> None:
        self.trained = 0
        self._base = self._first = self._before = self._steps = 0
        self._batch = 0  # the fewest samples drawn in one step, once known
        self._largest = 0  # the most, in this pass
        self._whole_step = 0  # the samples of a whole step, by all passes
        self._usual = 0  # the same by any two steps of a pass; of short passes, it may be the last, smaller one
        self._taken: deque[int] = deque()

    def has_drained(self, taken: int, *, is_early: bool = False) -> bool:
        """Whether the steps of this pass suffice for all samples drawn, so that no loader still holds batches.

        A pass may end with less than a whole step's samples, on which no step is made. After an early end they count as
        not trained on, as does everything while the size of a step is unknown.
        """
        if not self._whole_step:
            return not is_early
        return (self._steps + (0 if is_early else 1)) * self._whole_step >= taken - self._base

    def drained(self, taken: int) -> None:
        """All samples drawn are trained on, and a new pass begins."""
        self.trained = self._base = taken
        self._first = self._batch = self._largest = self._steps = 0
        self._taken = deque()

    def stepped(self, taken: int) -> None:
        """A step has ended after `taken` samples were drawn."""
        self._steps += 1
        if not self._first:
            self._first = self._before = taken
            drawn = taken - self._base
            if self._usual and drawn and drawn % self._usual == 0:  # whole steps as before, one of which has ended
                self.trained = self._base + self._usual
            return
        grown, self._before = taken - self._before, taken
        if grown > 0:
            self._usual = max(self._usual, grown)
            if self._batch:  # the last batch of a pass may be short, so a single one tells nothing
                self._whole_step = max(self._whole_step, self._largest, grown)
            self._largest = max(self._largest, grown)
        if grown > 0 and not 0 < self._batch <= grown:  # a skipped step makes the next one seem larger
            self._batch = grown
            self._taken = deque(self._taken, maxlen=math.ceil((self._first - self._base) / grown) or 1)
        if self._batch:
            self._taken.append(taken)
            if len(self._taken) == self._taken.maxlen:
                self.trained = max(self.trained, self._taken[0])


def _check_not_sharded(world: int) -> None:
    """Raise InvalidArgument if the iterating code takes only some of these samples, for one of several processes.

    Accelerate wraps the batch sampler, Lightning and others the sampler, in classes that are on the stack when a pass
    begins. They are recognized by the number of processes that they share samples among.
    """
    frame = sys._getframe(2) if world > 1 else None  # pyright: ignore[reportPrivateUsage] - the caller of iter()
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        kinds = {kind.__name__ for kind in type(owner).__mro__}
        if kinds & {"BatchSamplerShard", "IterableDatasetShard"}:
            processes = getattr(owner, "num_processes", 1)
        elif kinds & {"DataLoaderDispatcher"}:
            processes = getattr(getattr(owner, "state", None), "num_processes", 1)
        else:
            processes = getattr(owner, "num_replicas", 1) if "DistributedSampler" in kinds else 1
        if processes > 1:
            raise InvalidArgument(
                f"{type(owner).__name__} shares these samples among {processes} processes, but they are one worker's "
                f"own share of {world} already: most of the data would be left out. Do not pass a DataLoader with "
                "worker.sampler to accelerator.prepare() or Trainer (in Lightning, set use_distributed_sampler=False); "
                "or let that library do the sharding, and leave worker.sampler out."
            )
        frame = frame.f_back
