"""The sampler: which samples this worker trains on, for a DataLoader's `sampler` argument or a plain loop.

All workers draw the same permutation of an epoch from the run's seed. A `Sampler` takes ranges of it as leases, so
that what a dead worker has left goes to another; a `Shard` takes a fixed share.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from maniple.center.locks import Patience
from maniple.errors import InvalidArgument
from maniple.sampler.lead import Lead
from maniple.sampler.lease import Lease, Terms, Verdict

Indices = npt.NDArray[np.int64]

_PIECE = 128  # samples between two looks at whether to stop
_PATIENCE_S = 10.0  # at the end of a pass, at least, for those who are at their last samples
_MOST_FRAMES = 30  # of the stack that are looked at, at the beginning of a pass
_MOST_SHOWN = 1024  # samples of a pass that is only looked at: a batch, for any usual loader
_LOOK_S = 10.0  # for so long a loop without a model may be a look; what it draws then is taken for trained on
_MOST_OPEN = 256  # leases kept open until the center has them; of more, the oldest counts as done


class Lender(Protocol):
    """Where a sampler gets its leases."""

    @property
    def terms(self) -> Terms: ...
    def first_epoch(self, limit: int, /) -> int:
        """The pass in which this worker begins, if passes have at most `limit` samples (0: any number)."""
        ...

    def take(
        self, epoch: int, *, most: int = ..., drawn: list[int] = ..., done: list[int] = ..., back: list[int] = ...
    ) -> Lease | Verdict: ...


class Order:
    """The samples of all epochs, in their order, and how many of them this worker has taken.

    Attributes:
        count: the samples of an epoch, over all workers.
        epoch: the passes begun.
        first_epoch: the first epoch of which samples were left when this sampler was made.
        is_finished: the passes that were asked for are made.
        is_looping: a loop has asked for the first epoch, so that passes from here on are meant for training.

    A pass in which no training step was made, though a model is shared, is no epoch if it was left early or came
    before the first step of all: a script has looked at a batch, and the next pass is the same epoch again. In a run
    whose script does so, a worker that comes late or again may find its first pass over, and none left to look at: it
    is shown samples that others have.
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
        self.epoch = 0
        self.is_finished = False
        self.first_epoch = 0
        self._on_empty = on_empty  # is told of `first_epoch` when a pass of an earlier epoch begins
        self._max_epochs = max_epochs
        self.count = self._count = count
        self._seed, self._shuffle, self._should_stop = seed, shuffle, should_stop
        self._is_shared = is_shared  # a model is: what is drawn before its first step is not trained on yet
        self._is_looked_at, self._on_look = is_looked_at, on_look
        self.is_looping = self._is_shown = self._has_stepped = self._has_begun = False
        self._looks = 1  # whole passes without a step that may be no epochs
        self._is_open = False  # a pass was begun, and no step was made in it
        self._is_at_end = False  # all samples of that pass were drawn
        self._before = 0  # the samples taken before that pass
        self._skipped = 0  # by how much passes are ahead of what `set_epoch` calls them
        self._world = 1
        self._given = 0
        self._rest: Iterator[int] = iter(())  # of the piece being handed out
        self._pending = 0  # taken from pieces and not handed out yet, by `batches`

    @property
    def taken(self) -> int:
        """The samples handed out in all passes."""
        return self._given - self._rest.__length_hint__() - self._pending  # type: ignore[attr-defined] # pyright: ignore

    def __iter__(self) -> Iterator[int]:
        _refuse_sharded(self._world)
        return chain.from_iterable(self._pieces())  # between two pieces, a sample costs no Python code

    def _pieces(self) -> Iterator[Iterator[int]]:
        for chunk in self._pass():
            for start in range(0, len(chunk), _PIECE):
                if self._should_stop():
                    return
                piece = chunk[start : start + _PIECE].tolist()
                self._given += len(piece)
                self._rest = iter(piece)
                yield self._rest

    def batches(self, size: int, *, drop_last: bool = False) -> Iterator[Indices]:
        """One pass as arrays of `size` indices, for frameworks without a loader of their own."""
        if size < 1:
            raise InvalidArgument(f"batches of {size} samples cannot be made. Give 1 or more.")
        rest = np.empty(0, np.int64)
        for chunk in self._pass():
            rest = np.concatenate([rest, chunk])
            self._given += len(chunk)
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
            return np.arange(self._count)
        return np.random.default_rng([*self._seed, epoch]).permutation(self._count)

    @property
    def progress(self) -> float:
        """How many epochs of the run were handed out, as far as this worker knows: 2.5 in the middle of the third.

        For learning rates that follow the samples of all workers instead of this worker's steps.
        """
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be epoch `epoch`, for scripts that were written for torch's DistributedSampler.

        Passes count by themselves, so in a loop from 0 on this changes nothing. An epoch that was made is not made
        again: a second loop that begins at 0 continues with the epochs that follow.
        """
        if epoch < 0:
            raise InvalidArgument(f"epoch {epoch} cannot be set. Epochs count from 0; give 0 or more.")
        self.rewind()
        self._skipped = max(self._skipped, self.epoch - epoch)
        self.epoch = epoch + self._skipped

    def rewind(self, *, is_last: bool = False) -> bool:
        """If a script has only looked at the last pass, let the next one be the same epoch; True if so.

        With `is_last` there is no next one: perhaps this was no look, but training that came to no step.
        """
        may_be_one = not self._is_at_end or (self._looks and self._given > self._before)
        if not self._is_open or not may_be_one or not self._is_shared():
            return False
        # Of a small data set, a loader that draws ahead takes all when a script looks at one batch. Only once: a script
        # whose steps are not known here must not stay in its first epoch for ever.
        self._looks -= self._is_at_end
        self._is_open = self._is_at_end = self.is_finished = False
        self.epoch -= 1
        self._given, self._rest, self._pending = self._before, iter(()), 0
        if not is_last:
            self._on_look()
        return True

    def stepped(self) -> None:
        """A training step was made."""
        self._has_stepped, self._is_open, self._looks = True, False, 0

    def settled(self) -> None:
        """The center has all that was learned so far."""

    def passed(self) -> None:
        """The loop has come to the end of a pass, and has trained on all of it."""
        self._is_open = False

    def finish(self, *, is_early: bool) -> None:
        """No sample will be taken any more; `is_early`: perhaps not all that were taken are trained on."""

    def _pass(self) -> Iterator[Indices]:
        self.rewind()
        epoch, self.epoch = self.epoch, self.epoch + 1
        self._given, self._rest, self._pending = self.taken, iter(()), 0  # the last pass may have been left early
        self._before, self._is_open, self._is_at_end, self._is_shown = self._given, True, False, False
        is_first, self._has_begun = not (self._has_begun or self.is_looping), True
        is_look = is_first and self._is_looked_at()
        if epoch < self.first_epoch and not is_look:
            self._on_empty(self.first_epoch)
        if not self._max_epochs or epoch < self._max_epochs:
            yield from self._chunks(epoch)
        if is_look and self._given == self._before:
            yield from self._shown()
        if self._should_stop():
            return
        self._is_at_end = True
        self.is_finished = 0 < self._max_epochs <= self.epoch

    def _shown(self) -> Iterator[Indices]:
        """Samples to look at where there are none to train on; none any more if a step is made."""
        self._is_shown = True
        for index in self.permutation(self.first_epoch)[:_MOST_SHOWN]:
            yield np.array([index])
            if self._has_stepped:
                return

    def _chunks(self, epoch: int) -> Iterator[Indices]:
        raise NotImplementedError


class Shard(Order):
    """A fixed share: worker r takes places r, r + world, r + 2 world ... of each epoch's order.

    All workers take equally many: the last `count % world` samples of an epoch's order are left out, others in
    each epoch. With `is_whole`, for validation, none is left out: shares may differ by one sample, and with fewer
    samples than workers some are empty; `divide` gives the ranks that share a pass. Two runs of the same seed take the
    same samples. After `begin_at`, the passes of earlier epochs are empty, and the first one that is not begins in the
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
        self._rank, self._world = rank, world
        self._own_rank, self._divide = rank, divide
        self._is_whole = is_whole
        self._lead = Lead()
        self._begun = self._start = (0, 0)  # epoch and place in its order, at which the newest and the first pass begin
        self._base = self._share = 0  # the samples taken before that pass, and those of the pass itself
        self._told: tuple[int, int] | None = None  # where to begin, if the pass under way turns out to be no epoch

    def __len__(self) -> int:
        return len(self._places(0))

    def _places(self, start: int) -> range:
        """The places of this worker in an epoch's order, from `start` on."""
        rest = self._count - start
        end = self._count if self._is_whole else start + rest - rest % self._world
        return range(start + self._rank, end, self._world)

    def begin_at(self, epoch: int, place: int) -> None:
        """Continue there: earlier epochs are done, and so many places of this one's order; before the first pass."""
        if not self.epoch:
            each = (self._count - place) // self._world
            self._begun = (epoch, place) if place >= 0 and each > 0 else (epoch + 1, 0)
            self.first_epoch, self._start = self._begun[0], self._begun
        elif self.epoch == 1 and self._is_open:
            self._told = epoch, place

    def rewind(self, *, is_last: bool = False) -> bool:
        has_rewound = super().rewind(is_last=is_last)
        if has_rewound and self._told is not None:
            self.begin_at(*self._told)
            self._told = None
        return has_rewound

    @property
    def progress(self) -> float:
        epoch, place = self._begun
        return epoch + min(1.0, (place + (self.taken - self._base) * self._world) / self._count)

    @property
    def start(self) -> tuple[int, int]:
        """Where the first pass begins: its epoch, and the place in its order."""
        return self._start

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the places of its order whose samples all workers have trained on, if all are as far."""
        epoch, place = self._begun
        trained = self._lead.trained - self._base
        return (epoch + 1, 0) if 0 < self._share <= trained else (epoch, place + trained * self._world)

    def stepped(self) -> None:
        super().stepped()
        if not self._is_shown:
            self._lead.stepped(self.taken)

    def passed(self) -> None:
        """What the newest pass has handed out is trained on."""
        super().passed()
        if self.taken - self._base == self._share:
            self._lead.trained = self.taken

    def _chunks(self, epoch: int) -> Iterator[Indices]:
        if epoch < self.first_epoch:
            return
        if self._divide is not None and self._own_rank in (ranks := self._divide(epoch)):
            self._rank, self._world = ranks.index(self._own_rank), len(ranks)
        place = self._begun[1] if epoch == self._begun[0] else 0
        if not self._share:
            self._start = (epoch, place)
        places = self._places(place)
        self._share = len(places)
        self._begun, self._base = (epoch, place), self.taken
        self._lead.drained(self.taken)
        yield self.permutation(epoch)[places.start : places.stop : places.step]


class Sampler(Order):
    """Leases: ranges of an epoch's order, taken by whoever asks.

    A pass brings at most `len(sampler)` samples, from the earliest epochs of which samples are left. Each sample is
    taken exactly once per epoch while nobody dies, and at least once otherwise, by others or after a restart; what
    nobody has taken when all have made their passes is left to `--resume`. With `balance`, passes are not limited: the
    k-th pass of every worker is the k-th epoch, fast workers take more of it, and it ends when nobody has samples of it
    left to hand out. For a worker that comes late, or again, the passes of epochs that are over are empty.

    A lease is done when the center has what was learned from it: loaders draw samples before they are trained on, so
    the lead is counted in the first two steps of a pass and allowed for. Without a shared model it is done when the
    next one is asked for.
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
        self._on_wait = on_wait  # those who have the last samples may themselves wait for this worker
        self._lender, self._world = lender, max(1, world)
        self._limit = 0 if balance else len(self)  # of samples in a pass; 0: none
        self.first_epoch = lender.first_epoch(self._limit)
        self._progress = float(self.first_epoch)
        self._open: deque[tuple[int, int]] = deque()  # leases handed on in whole: slot, and where they end in `taken`
        self._held: int | None = None  # the one being handed on
        self._lead = Lead()
        self._is_rewound = False
        self._settled = 0
        self._began_s = 0.0  # the newest pass
        self._chunk_s = 0.0  # the longest time that a chunk took

    def __len__(self) -> int:
        """The most samples that one pass brings this worker; with `balance`, about how many."""
        return math.ceil(self._count / self._world)

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

    def stepped(self) -> None:
        super().stepped()
        if not self._is_shown:
            self._lead.stepped(self.taken)

    def settled(self) -> None:
        self._settled = self._lead.trained

    def finish(self, *, is_early: bool) -> None:
        """Give back what is done and what is not."""
        self.rewind(is_last=True)
        left = self._left() if self._is_rewound else []
        if self._held is None and self._lead.has_drained(self.taken, is_early=is_early):
            self._lead.drained(self.taken)
            self._settled = self._lead.trained
        done = self._done(is_last=True)
        back = [slot for slot, _ in self._open] + ([] if self._held is None else [self._held])
        self._lender.take(-1, done=done, back=left + back)

    def _chunks(self, epoch: int) -> Iterator[Indices]:
        back, drawn = self._left(), list[int]()
        self._began_s = time.monotonic()
        self._lead.drained(self.taken)  # a new pass begins when the loader has handed out the last one
        orders: dict[int, Indices] = {}
        rest = self._limit if epoch >= self.first_epoch else 0
        while (rest or not self._limit) and not self._should_stop():
            lease = self._await(epoch, rest, drawn=drawn, back=back)
            if lease is None:
                return
            rest -= lease.samples if self._limit else 0
            self._progress = max(self._progress, lease.epoch + lease.stop / self._count)
            if lease.epoch not in orders:
                orders = {epoch: order for epoch, order in orders.items() if epoch >= lease.epoch - 1}
                orders[lease.epoch] = self.permutation(lease.epoch)
            self._held, back = lease.slot, []
            begin = time.monotonic()
            yield orders[lease.epoch][lease.start : lease.stop]
            self._chunk_s = max(self._chunk_s, time.monotonic() - begin)
            self._open.append((lease.slot, self._given))
            self._held, drawn = None, [lease.slot]
        self._lender.take(-1, drawn=drawn, done=self._done(), back=back)

    def _await(self, epoch: int, most: int, *, drawn: list[int], back: list[int]) -> Lease | None:
        """The next lease; None at the end of the pass, or if those who have the last samples take too long."""
        pause_s, patience = 0.001, Patience(max(_PATIENCE_S, 3 * self._chunk_s))
        while True:
            answer = self._lender.take(epoch, most=most, drawn=drawn, done=self._done(), back=back)
            if isinstance(answer, Lease):
                return answer
            if answer is Verdict.FULL and self._open:
                self._settled = max(self._settled, self._open[0][1])  # of so many, the oldest counts as done
                drawn, back = [], []
                continue
            if answer is Verdict.END or self._should_stop() or patience.is_over():
                return None
            self._on_wait()
            time.sleep(pause_s)
            pause_s, drawn, back = min(2 * pause_s, 0.05), [], []

    def _left(self) -> list[int]:
        """The leases of a pass that was left early, as far as they were not trained on: others may."""
        if not self._is_rewound and self._held is None and self._lead.has_drained(self.taken):
            return []
        until = self._lead.trained if self._is_training and not self._is_rewound else self.taken
        self._is_rewound = False
        left = [slot for slot, end in self._open if end > until] + ([] if self._held is None else [self._held])
        self._open = deque(one for one in self._open if one[1] <= until)
        self._held = None
        return left

    def _done(self, *, is_last: bool = False) -> list[int]:
        until = self._settled if self._is_training else self._given - self._pending
        if not (self._before or self._is_training or is_last) and time.monotonic() - self._began_s < _LOOK_S:
            until = 0  # perhaps a script that looks at a batch, before it shares its model
        done: list[int] = []
        while self._open and (self._open[0][1] <= until or len(self._open) > _MOST_OPEN):
            done.append(self._open.popleft()[0])
        return done


def _refuse_sharded(world: int) -> None:
    """Raise InvalidArgument if whoever iterates takes only some of these samples, for one of several processes.

    Accelerate wraps the batch sampler, Lightning and others the sampler, in classes of their own. Those are known by
    the number of processes that they share the samples among, and are on the stack when a pass begins.
    """
    frame = sys._getframe(2) if world > 1 else None  # pyright: ignore[reportPrivateUsage] - of whoever iterates
    for _ in range(_MOST_FRAMES):
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
