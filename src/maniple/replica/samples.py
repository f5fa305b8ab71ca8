"""The samples of one worker: its samplers, how far training is in them, and where to continue after an interruption."""

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec

from maniple.clock import clock
from maniple.environment import Environment
from maniple.errors import InvalidArgument, ManipleError, say
from maniple.sampler import LeaseTerms, Lender, SampleOrder, Sampler, Shard, lease_size_for
from maniple.sampler.position import Position, divided, is_looked_at, of_worker, read, remaining
from maniple.sampler.remote_leases import LOOK, AskHost

if TYPE_CHECKING:
    from maniple.replica.replica import Replica

Kind = TypeVar("Kind", bound=SampleOrder)
OpenLender = Callable[[int, LeaseTerms], Lender]

_LOOK_TIMEOUT_S = 5.0  # the question is only about a warning-free first pass; a host that is away must not delay it
_WRITE_EVERY_S = 0.2  # a worker's own position costs a small file; repeating 0.2 s of steps after a resume is cheap


class SamplesMark(NamedTuple):
    """How far training was in all samplers at one time."""

    trained: list[int]  # the samples trained on, by sampler
    positions: dict[int, tuple[int, int]]  # of the fixed shares


class Samples:
    """Creates the samplers of one worker and tells them how training progresses.

    Attributes:
        trained: the samplers whose samples are trained on.
        shards: the fixed shares among them, by the sampler's number.
    """

    def __init__(
        self, environment: Environment, *, segment: Path | None = None, ask_host: AskHost | None = None
    ) -> None:
        self._environment, self._segment, self._ask_host = environment, segment, ask_host
        self._rank, self._world = environment.rank, environment.world
        self._samplers: list[SampleOrder] = []
        self.trained: list[SampleOrder] = []
        self.shards: dict[int, Shard] = {}
        self._start = Position(0, 1, False, 0, 0)  # where this worker continues
        if segment is not None:
            self._start = of_worker(read(segment), environment.rank) or self._start
        self._exchanged: dict[int, tuple[int, int]] = {}  # the positions of the shards at the last exchange
        self._written = 0.0
        self._loops = 0  # the epochs of all loops over `worker.epochs` so far
        self._has_told_empty = False

    def sampler(
        self,
        count: int,
        *,
        lender: OpenLender | None,
        static: bool,
        balance: bool,
        shuffle: bool,
        chunk: int | None,
        validation: bool,
        should_stop: Callable[[], bool],
        is_shared: Callable[[], bool],
        on_wait: Callable[[], None],
    ) -> Sampler | Shard:
        """Create a sampler. All workers create theirs in the same order; `--max-epochs` holds for the first."""
        if count < 1 or (chunk is not None and chunk < 1):
            raise InvalidArgument(f"{count} samples in chunks of {chunk} cannot be taken. Both must be 1 or more.")
        environment, number = self._environment, len(self._samplers)
        settings: dict[str, Any] = {
            "seed": (environment.seed, number),
            "shuffle": shuffle,
            "max_epochs": 0 if self.trained or validation else environment.limits.max_epochs,
            # A lease of validation samples is done when the next is asked for, not when a step has used them.
            "is_shared": (lambda: False) if validation else is_shared,
            "is_looked_at": lambda: not validation and self._is_looked_at(),
            "on_look": lambda: self._is_looked_at(has_looked=True),
            "should_stop": should_stop,
            "on_empty": self._warn_empty,
        }
        sampler: Sampler | Shard
        if static or lender is None or environment.deterministic:
            divide = self._divide(number) if validation else None  # training samples keep the length of their shares
            shares: dict[str, Any] = {"rank": environment.rank, "world": environment.world, "divide": divide}
            sampler = _class_of(Shard)(count, is_whole=validation, **shares, **settings)
            if not validation:
                self.shards[number] = sampler
                self._continue(number, sampler, count)
        else:
            terms = LeaseTerms(count, chunk or lease_size_for(count, environment.world), shuffle)
            settings |= {"balance": balance or validation, "on_wait": on_wait}
            sampler = _class_of(Sampler)(count, lender=lender(number, terms), world=environment.world, **settings)
        self._samplers.append(sampler)
        if not validation:
            self.trained.append(sampler)
        return sampler

    def _divide(self, number: int) -> Callable[[int], Sequence[int]] | None:
        """The function that names the workers of a pass, where the launcher may have given up some of them."""
        if self._segment is None or self._environment.launcher != "maniple":
            return None
        segment, world = self._segment, self._world
        return lambda epoch: divided(segment, number, epoch, world)

    @property
    def remaining(self) -> int:
        """The number of workers that the launcher has not given up."""
        return self._world if self._segment is None else len(remaining(self._segment, self._world))

    def check_collectives(self, collectives: str) -> None:
        """Raise InvalidArgument if workers may make different numbers of steps with collectives that need all."""
        if collectives != "shared" and self.are_leased:
            raise InvalidArgument(
                "the sampler was made before share(), so workers may have different numbers of batches, and the "
                f"{collectives} collectives need every worker at every step. Make it after share(), or with "
                "static=True."
            )

    @property
    def are_leased(self) -> bool:
        """Training samples are leased, so workers may have different numbers of batches."""
        return any(isinstance(sampler, Sampler) for sampler in self.trained)

    @property
    def taken(self) -> int:
        """The training samples handed out so far, by all samplers."""
        return sum(sampler.taken for sampler in self.trained)

    @property
    def were_gone(self) -> bool:
        """This worker has begun at least one epoch, and none had a sample left for it."""
        return not self.taken and any(sampler.epoch for sampler in self.trained)

    @property
    def are_finished(self) -> bool:
        """The requested epochs are done."""
        return bool(self.trained) and self.trained[0].is_finished

    def step(self) -> None:
        """Count a training step."""
        for sampler in self.trained:
            sampler.stepped()

    def mark(self) -> "SamplesMark":
        """How far training is now, to be given to `exchange` once that is shared."""
        marks = [sampler.mark() for sampler in self.trained]
        return SamplesMark(marks, {number: shard.position for number, shard in self.shards.items()})

    def exchange(self, mark: "SamplesMark") -> None:
        """Count what was learned until `mark` as shared: the center, or all workers, have it."""
        for sampler, trained in zip(self.trained, mark.trained, strict=False):  # some may be newer than the mark
            sampler.committed(trained)
        self._exchanged |= mark.positions

    def begin_loop(self, epochs: int) -> int:
        """Begin a loop over `epochs` epochs; gives the first that has samples left, to which all samplers advance."""
        for sampler in self._samplers:
            sampler.rewind()
            sampler.has_begun = True
        first = self.trained[0].first_epoch if self.trained else 0
        for sampler in self._samplers:
            sampler.epoch = sampler.epoch or max(first, sampler.first_epoch)
        before, self._loops = self._loops, self._loops + epochs
        return max(0, first - before)

    def passed(self, *, is_shared: bool) -> None:
        """End an epoch of the loop, which has trained on all samples that it was given.

        `is_shared`: no step has followed the last exchange.
        """
        for sampler in self.trained:
            sampler.passed()
        if is_shared:
            self._exchanged |= self.mark().positions

    def write_position(self, replica: "Replica", *, is_common: bool, is_last: bool = False) -> None:
        """Write down where training continues from the center, which has all that was learned so far.

        Call it after the center was updated. With `is_common` all workers are at the same step.
        """
        if self._segment is None or not (is_common or self.shards):
            return
        now = clock.monotonic()
        if is_common or is_last or now - self._written >= _WRITE_EVERY_S:
            self._written = now
            with suppress(OSError):  # /dev/shm is full: the previous position stays, and a resume repeats more steps
                self._position(replica, is_common=is_common).write(self._segment)

    def position(self, replica: "Replica") -> Any:
        """The common position of all workers, for one that joins them."""
        return msgspec.to_builtins(self._position(replica, is_common=True), str_keys=True)

    def continue_at(self, position: Any, rounds: int) -> None:
        """Continue at the position of the other workers after `rounds` rounds; samplers in use stay as they are."""
        start = msgspec.convert(position, Position, strict=False)
        self._start = msgspec.structs.replace(start, rounds=start.rounds - rounds)
        for number, shard in self.shards.items():
            self._continue(number, shard, shard.count)

    def _position(self, replica: "Replica", *, is_common: bool) -> Position:
        """The position at the last exchange: the center lacks later steps, and a newcomer makes its own from there."""
        done = {
            number: (*self._exchanged.get(number, shard.start), shard.count) for number, shard in self.shards.items()
        }
        own_steps, start = replica.steps - replica.steps_since_exchange, self._start
        rounds = start.rounds + replica.rounds
        return Position(self._rank, self._world, is_common, start.steps + own_steps, own_steps, rounds, done)

    def _continue(self, number: int, shard: Shard, count: int) -> None:
        epoch, place, before = self._start.samplers.get(number, (0, 0, count))
        if before != count:
            warnings.warn(
                f"sampler {number} has {count:,} samples, and had {before:,} before the run was resumed: epoch {epoch} "
                "begins again, as its order is another one now",
                stacklevel=5,
            )
            place = 0
        shard.begin_at(epoch, place)

    def _is_looked_at(self, *, has_looked: bool = False) -> bool:
        """The run's script looks at a batch before it trains, as this or another worker has noticed."""
        if self._segment is not None:
            with suppress(OSError):  # /dev/shm is full
                return is_looked_at(self._segment, has_looked=has_looked)
        elif self._ask_host is not None:
            with suppress(ManipleError):  # the host is away, or there is none
                return bool(self._ask_host(LOOK, {"has_looked": has_looked}, timeout_s=_LOOK_TIMEOUT_S))
        return False

    def _warn_empty(self, first: int) -> None:
        if self._rank == 0 and not self._has_told_empty:
            self._has_told_empty = True
            over = "epoch 0 is" if first == 1 else f"epochs 0 to {first - 1} are"
            say(
                f"{over} over, so these passes are empty. Write `for epoch in worker.epochs(n):` to leave "
                "them out, with what the loop does after each pass (validation, checkpoints)",
            )

    def finish(self, *, is_early: bool) -> None:
        """Take no more samples. With `is_early`, some of those taken may not have been trained on."""
        for sampler in self._samplers:
            sampler.finish(is_early=is_early and sampler in self.trained)


def _class_of(sampler: type[Kind]) -> type[Kind]:
    """The sampler's class; derived from torch's Sampler too where torch is in use, since some trainers check it."""
    torch = sys.modules.get("torch.utils.data")
    return sampler if torch is None else cast(type[Kind], type(sampler.__name__, (sampler, torch.Sampler), {}))
