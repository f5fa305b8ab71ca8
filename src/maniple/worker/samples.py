"""The samples of one worker: all its samplers, what they have handed out, and when that is done."""

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec

from maniple.errors import InvalidArgument, ManipleError, say
from maniple.place import Place
from maniple.sampler import Order, Sampler, Shard, Terms, chunk_for
from maniple.sampler.position import Position, divided, is_looked_at, of_worker, read, remaining
from maniple.sampler.remote import LOOK, Ask
from maniple.worker.seat import Seat

Kind = TypeVar("Kind", bound=Order)

_ASK_S = 5.0  # a host that does not answer is not worth more for a look
_NOTE_EVERY_S = 0.2  # a position of a worker's own, which costs a small file


class Traveller(Protocol):
    """What is told of a replica with a position."""

    steps: int

    @property
    def rounds(self) -> int: ...


class Samples:
    """Makes samplers and tells them how training goes."""

    def __init__(self) -> None:
        self._samplers: list[Order] = []
        self._trained: list[Order] = []  # those whose samples are trained on
        self._segment: Path | None = None
        self._ask: Ask | None = None
        self._rank, self._world = 0, 1
        self._begin = Position(0, 1, False, 0, 0)  # where this worker continues
        self._settled: dict[int, tuple[int, int]] = {}  # where fixed shares were at the last exchange, and the steps
        self._settled_steps = self._steps_since = 0
        self._noted = 0.0
        self._loops = 0  # the epochs of all loops over `worker.epochs` that were begun
        self._is_told = False

    def settle_in(self, seat: Seat | None, place: Place) -> None:
        """This worker has joined: it continues where the center is, if the run or the worker was started before."""
        self._rank, self._world = place.rank, place.world
        self._ask = None if seat is None else seat.ask
        if seat is not None and seat.segment is not None:
            self._segment = seat.segment.path
            self._begin = of_worker(read(self._segment), place.rank) or self._begin

    def sampler(
        self,
        count: int,
        *,
        seat: Seat | None,
        place: Place,
        static: bool,
        balance: bool,
        shuffle: bool,
        chunk: int | None,
        validation: bool,
        should_stop: Callable[[], bool],
        is_shared: Callable[[], bool],
        on_wait: Callable[[], None],
    ) -> Sampler | Shard:
        """One more sampler. All workers make theirs in the same order; `--max-epochs` holds for the first."""
        if count < 1 or (chunk is not None and chunk < 1):
            raise InvalidArgument(f"{count} samples in chunks of {chunk} cannot be taken. Both must be 1 or more.")
        number = len(self._samplers)
        settings: dict[str, Any] = {
            "seed": (place.seed, number),
            "shuffle": shuffle,
            "max_epochs": 0 if self._trained or validation else place.limits.max_epochs,
            # Else a lease is done when the next is asked for.
            "is_shared": (lambda: False) if validation else is_shared,
            "is_looked_at": lambda: not validation and self._is_looked_at(),
            "on_look": lambda: self._is_looked_at(has_looked=True),
            "should_stop": should_stop,
            "on_empty": self._tell_of_empty,
        }
        sampler: Sampler | Shard
        if static or seat is None or place.deterministic:
            divide = self._divide(number, place) if validation else None  # what is trained on keeps its length
            shares: dict[str, Any] = {"rank": place.rank, "world": place.world, "divide": divide}
            sampler = _kind(Shard)(count, is_whole=validation, **shares, **settings)
            if not validation:
                self._continue(number, sampler, count)
        else:
            lender = seat.lender(number, Terms(count, chunk or chunk_for(count, place.world), shuffle))
            settings |= {"balance": balance or validation, "on_wait": on_wait}
            sampler = _kind(Sampler)(count, lender=lender, world=place.world, **settings)
        self._samplers.append(sampler)
        if not validation:
            self._trained.append(sampler)
        return sampler

    def _divide(self, number: int, place: Place) -> Callable[[int], Sequence[int]] | None:
        """Among whom a sampler divides each pass, where the launcher may have given up workers."""
        if self._segment is None or place.launcher != "maniple":
            return None
        segment, world = self._segment, place.world
        return lambda epoch: divided(segment, number, epoch, world)

    @property
    def remaining(self) -> int:
        """The workers of this run that were not given up."""
        return self._world if self._segment is None else len(remaining(self._segment, self._world))

    def check_circle(self, circle: str) -> None:
        """Raise InvalidArgument if workers may have different numbers of batches in a circle that needs everybody."""
        if circle != "shared" and self.are_leased:
            raise InvalidArgument(
                "the sampler was made before share(), so workers may have different numbers of batches, and "
                f"cannot meet in the circle {circle}. Make it after share(), or with static=True."
            )

    @property
    def are_leased(self) -> bool:
        """Samples that are trained on go to whoever asks first: workers may have different numbers of batches."""
        return any(isinstance(sampler, Sampler) for sampler in self._trained)

    @property
    def are_divided(self) -> bool:
        """There is a sampler, which divides the samples that are trained on among the workers."""
        return bool(self._trained)

    @property
    def taken(self) -> int:
        """The samples handed out to be trained on, by all samplers."""
        return sum(sampler.taken for sampler in self._trained)

    @property
    def were_gone(self) -> bool:
        """This worker has begun an epoch or more, and there was no sample left for it in any."""
        return not self.taken and any(sampler.epoch for sampler in self._trained)

    @property
    def are_finished(self) -> bool:
        """The epochs that were asked for are made."""
        return bool(self._trained) and self._trained[0].is_finished

    def stepped(self) -> None:
        """A training step was made."""
        self._steps_since += 1
        for sampler in self._trained:
            sampler.stepped()

    def settled(self, replica: Traveller) -> None:
        """The center, or all workers who meet, have what was learned so far."""
        self._settled_steps, self._steps_since = replica.steps, 0
        for sampler in self._trained:
            sampler.settled()
        self._note_shares()

    def _note_shares(self) -> None:
        for number, shard in self._shards().items():
            self._settled[number] = shard.position

    def begin_loop(self, epochs: int) -> int:
        """A loop over so many epochs begins; gives the first that has samples left, to which all samplers move on."""
        for sampler in self._samplers:
            sampler.rewind()
            sampler.is_looping = True
        first = self._trained[0].first_epoch if self._trained else 0
        for sampler in self._samplers:
            sampler.epoch = sampler.epoch or max(first, sampler.first_epoch)
        before, self._loops = self._loops, self._loops + epochs
        return max(0, first - before)

    def passed(self) -> None:
        """The loop has come to the end of an epoch, and has trained on all samples that it was given."""
        for sampler in self._trained:
            sampler.passed()
        if not self._steps_since:
            self._note_shares()

    def note(self, replica: Traveller, *, is_common: bool, is_last: bool = False) -> None:
        """The center has all that was learned so far: write down where who continues from it finds the next samples.

        With `is_common`, all workers are as far, since they make their steps together.
        """
        now = time.monotonic()
        is_due = is_common or is_last or now - self._noted >= _NOTE_EVERY_S
        if self._segment is None or not is_due or not (is_common or self._shards()):
            return
        self._noted = now
        with suppress(OSError):  # no room in memory: the last one stays, and more is repeated
            self._position(replica, is_common=is_common).write(self._segment)

    def position(self, replica: Traveller) -> Any:
        """Where all workers are, for one that comes to them."""
        return msgspec.to_builtins(self._position(replica, is_common=True), str_keys=True)

    def continue_at(self, told: Any, rounds: int) -> None:
        """Begin where the others are, who have made so many rounds; samplers that are in use stay as they are."""
        position = msgspec.convert(told, Position, strict=False)
        self._begin = msgspec.structs.replace(position, rounds=position.rounds - rounds)
        for number, sampler in self._shards().items():
            self._continue(number, sampler, sampler.count)

    def _position(self, replica: Traveller, *, is_common: bool) -> Position:
        """At the last exchange: steps after it are in no center, and a newcomer makes its own up to the next one."""
        done = {
            number: (*self._settled.get(number, shard.start), shard.count) for number, shard in self._shards().items()
        }
        steps, rounds = self._begin.steps + self._settled_steps, self._begin.rounds + replica.rounds
        return Position(self._rank, self._world, is_common, steps, self._settled_steps, rounds, done)

    def _shards(self) -> dict[int, Shard]:
        """The fixed shares that are trained on, by their numbers."""
        return {
            number: sampler
            for number, sampler in enumerate(self._samplers)
            if isinstance(sampler, Shard) and sampler in self._trained
        }

    def _continue(self, number: int, shard: Shard, count: int) -> None:
        epoch, place, before = self._begin.samplers.get(number, (0, 0, count))
        if before != count:
            warnings.warn(
                f"sampler {number} has {count:,} samples, and had {before:,} before the run was resumed: epoch {epoch} "
                "begins again, as its order is another one now",
                stacklevel=5,
            )
            place = 0
        shard.begin_at(epoch, place)

    def _is_looked_at(self, *, has_looked: bool = False) -> bool:
        """The run's script looks at a batch before it trains, as this or another process of it has noticed."""
        if self._segment is not None:
            with suppress(OSError):  # no room in memory
                return is_looked_at(self._segment, has_looked=has_looked)
        elif self._ask is not None:
            with suppress(ManipleError):  # the host is away, or there is none
                return bool(self._ask(LOOK, {"has_looked": has_looked}, timeout_s=_ASK_S))
        return False

    def _tell_of_empty(self, first: int) -> None:
        if self._rank == 0 and not self._is_told:
            self._is_told = True
            over = "epoch 0 is" if first == 1 else f"epochs 0 to {first - 1} are"
            say(
                f"{over} over, so these passes are empty. Write `for epoch in worker.epochs(n):` to leave "
                "them out, with what the loop does after each pass (validation, checkpoints)",
            )

    def finish(self, *, is_early: bool) -> None:
        """No sample will be taken any more; `is_early`: perhaps not all that were taken are trained on."""
        for sampler in self._samplers:
            sampler.finish(is_early=is_early and sampler in self._trained)


def _kind(sampler: type[Kind]) -> type[Kind]:
    """The class of a sampler; a torch Sampler too, where torch is in use, as some trainers ask for."""
    torch = sys.modules.get("torch.utils.data")
    return sampler if torch is None else cast(type[Kind], type(sampler.__name__, (sampler, torch.Sampler), {}))
