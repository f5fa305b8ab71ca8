"""The samples of one worker: all its samplers, what they have handed out, and when that is done."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from maniple.errors import InvalidArgument
from maniple.place import Place
from maniple.sampler import Order, Sampler, Shard, Terms, chunk_for
from maniple.worker.seat import Seat

Kind = TypeVar("Kind", bound=Order)


class Samples:
    """Makes samplers and tells them how training goes."""

    def __init__(self) -> None:
        self._samplers: list[Order] = []
        self._trained: list[Order] = []  # those whose samples are trained on

    def sampler(
        self,
        count: int,
        *,
        seat: Seat | None,
        place: Place,
        static: bool,
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
            "should_stop": should_stop,
        }
        is_trained = (lambda: False) if validation else is_shared  # else a lease is done when the next is asked for
        sampler: Sampler | Shard
        if static or seat is None or place.deterministic:
            sampler = _kind(Shard)(count, rank=place.rank, world=place.world, is_whole=validation, **settings)
        else:
            lender = seat.lender(number, Terms(count, chunk or chunk_for(count, place.world), shuffle))
            settings |= {"is_shared": is_trained, "on_wait": on_wait}
            sampler = _kind(Sampler)(count, lender=lender, world=place.world, **settings)
        self._samplers.append(sampler)
        if not validation:
            self._trained.append(sampler)
        return sampler

    def check_circle(self, circle: str) -> None:
        """Raise InvalidArgument if workers may have different numbers of batches in a circle that needs everybody."""
        if circle != "shared" and any(isinstance(sampler, Sampler) for sampler in self._trained):
            raise InvalidArgument(
                "the sampler was made before share(), so workers may have different numbers of batches, and "
                f"cannot meet in the circle {circle}. Make it after share(), or with static=True."
            )

    @property
    def taken(self) -> int:
        """The samples handed out to be trained on, by all samplers."""
        return sum(sampler.taken for sampler in self._trained)

    @property
    def are_finished(self) -> bool:
        """The epochs that were asked for are made."""
        return bool(self._trained) and self._trained[0].is_finished

    def stepped(self) -> None:
        """A training step was made."""
        for sampler in self._trained:
            sampler.stepped()

    def settled(self) -> None:
        """The center has all that was learned so far."""
        for sampler in self._trained:
            sampler.settled()

    def finish(self, *, is_early: bool) -> None:
        """No sample will be taken any more; `is_early`: perhaps not all that were taken are trained on."""
        for sampler in self._samplers:
            sampler.finish(is_early=is_early and sampler in self._trained)


def _kind(sampler: type[Kind]) -> type[Kind]:
    """The class of a sampler; a torch Sampler too, where torch is in use, as some trainers ask for."""
    torch = sys.modules.get("torch.utils.data")
    return sampler if torch is None else cast(type[Kind], type(sampler.__name__, (sampler, torch.Sampler), {}))
