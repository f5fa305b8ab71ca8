"""Pairwise rules: Swap and Tournament. In each round, random disjoint pairs of workers exchange their replicas."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from maniple.errors import InvalidArgument
from maniple.rules.rule import Rule, checked_count, checked_flag, checked_nonfinite, one_of

MODES = ("min", "max")
Perturb = Mapping[str, Sequence[float]] | Callable[[dict[str, Any], np.random.Generator], Any]


def draw_pairs(ranks: Iterable[int], *, seed: int, number: int) -> dict[int, int]:
    """The partner of each worker in round `number`. One without a partner, if their number is odd, is left out.

    It depends on nothing else, so all workers draw the same pairs.
    """
    order = np.random.default_rng([seed, number]).permutation(sorted(ranks)).tolist()
    pairs = list(zip(order[::2], order[1::2], strict=False))
    return dict(pairs) | {other: one for one, other in pairs}


class Pairwise(Rule):
    """The base of rules by which partners exchange replicas. A rule of your own derives from Swap or Tournament.

    Attributes:
        names: what is exchanged: names of parameters and buffers, or patterns; None for all.
        metric: the name of the logged value by which partners are compared; empty: they are not.
        takes_optimizer: who takes over a replica takes over the state and the settings of its optimizer.
        perturb: how the settings of an optimizer are changed after a replica was taken over; None: not at all.
    """

    every = 100
    is_synchronous = True
    names: str | Iterable[str] | None = None
    metric: str = ""
    takes_optimizer: bool = False
    perturb: Perturb | None = None

    def takes(self, own: float, other: float) -> bool:
        """Whether a worker with the value `own` takes over the replica of a partner with the value `other`."""
        raise NotImplementedError(f"{type(self).__name__} must define takes(self, own, other)")

    def best(self, values: Mapping[int, float]) -> int:
        """The worker whose replica the center shows, by the values of all."""
        return min(values)

    def perturb_settings(self, groups: list[dict[str, Any]], rng: np.random.Generator) -> None:
        """Change the optimizer's settings, by group, after a replica was taken over."""


class Swap(Pairwise):
    """Pairs of workers exchange their replicas, or named parts of them.

        x_i, x_j = x_j, x_i    for random disjoint pairs (i, j), after every `every` steps

    Nothing is averaged: each replica goes on with another worker's data. With the names of a discriminator, it serves
    for generative adversarial networks whose discriminators change places: Im et al.: Generative adversarial
    parallelization (arXiv:1612.04021).

        worker.share(gan, optimizer, rule=maniple.Swap(every=100, names="discriminator.*"))

    What is exchanged is conserved: after a round, each value is at exactly one worker, unless one has died.

    Args:
        every: steps between two rounds.
        names: of parameters and buffers, or patterns, as in `share(params=...)`; None for all.
        nonfinite: what happens when a replica holds NaN or infinity. "stop": all workers end with Diverged. "skip": it
            has no partner in this round and continues from the center; three in a row end the run.
    """

    def __init__(self, every: int = 100, names: str | Iterable[str] | None = None, *, nonfinite: str = "stop") -> None:
        self.every = checked_count("every", every, 1)
        self.names = names if names is None or isinstance(names, str) else tuple(names)
        self.nonfinite = checked_nonfinite("Swap", nonfinite)

    def takes(self, own: float, other: float) -> bool:
        del own, other
        return True


class Tournament(Pairwise):
    """Of each pair of workers, the one with the worse metric takes over the other's replica.

        x_i = x_j    if f_i > f_j,    for random disjoint pairs (i, j), after every `every` steps

    f_i is what worker i has logged last under the name of the metric, by `worker.log(loss=...)`: a loss that was
    averaged over some batches, or that of a validation set, compares better than that of one batch. NaN, and a replica
    that is not finite, lose to everything else; with equal values both keep theirs. With `perturb` it is a form of
    Jaderberg et al.: Population based training of neural networks (arXiv:1711.09846).

        worker.share(model, optimizer, rule=maniple.Tournament("loss", every=500, perturb={"lr": (0.8, 1.2)}))

    Args:
        metric: the name of the logged value.
        every: steps between two rounds.
        mode: "min" if smaller is better, else "max".
        optimizer: the loser takes over the winner's optimizer too: its state, such as moments, which belongs to these
            parameters, and its settings, such as the learning rate.
        perturb: how the loser's optimizer differs from then on: factors for settings by name, one of which is drawn
            for each setting and group, or a function of a group (a dict of its settings, which it changes) and a
            `numpy.random.Generator`. Both draw from the run's seed.
    """

    every = 500
    nonfinite = "skip"  # the loser of a pair anyway

    def __init__(
        self,
        metric: str = "loss",
        *,
        every: int = 500,
        mode: str = "min",
        optimizer: bool = True,
        perturb: Perturb | None = None,
    ) -> None:
        self.metric = metric
        self.every = checked_count("every", every, 1)
        self.mode = one_of("mode", mode, MODES)
        self.optimizer = self.takes_optimizer = checked_flag("Tournament", "optimizer", optimizer)
        self.perturb = perturb if perturb is None or callable(perturb) else _checked_factors(perturb)
        if not metric:
            raise InvalidArgument(
                "Tournament compares workers by what they log, but metric='' names nothing. Write metric='loss', and "
                "call worker.log(loss=...)."
            )

    def takes(self, own: float, other: float) -> bool:
        return self._cost(own) > self._cost(other)

    def best(self, values: Mapping[int, float]) -> int:
        return min(values, key=lambda rank: (self._cost(values[rank]), rank))

    def perturb_settings(self, groups: list[dict[str, Any]], rng: np.random.Generator) -> None:
        for group in groups if self.perturb is not None else ():
            if callable(self.perturb):
                self.perturb(group, rng)
                continue
            assert self.perturb is not None
            for name, factors in self.perturb.items():
                value = group.get(name)
                if isinstance(value, bool) or not isinstance(value, int | float):
                    known = [key for key, one in group.items() if type(one) in {int, float}]
                    raise InvalidArgument(
                        f"perturb names {name!r}, which is no number of the optimizer's settings (those are: "
                        f"{', '.join(known)}). Name one of these, or give a function of the group."
                    )
                group[name] = value * float(rng.choice(factors))

    def _cost(self, value: float) -> float:
        if math.isnan(value):
            return math.inf
        return value if self.mode == "min" else -value


def _checked_factors(perturb: Any) -> dict[str, tuple[float, ...]]:
    """`perturb` as factors by the name of a setting."""
    try:
        factors = {str(name): tuple(float(one) for one in values) for name, values in perturb.items()}
    except (AttributeError, TypeError, ValueError):
        factors = {}
    if not factors or not all(values and all(map(math.isfinite, values)) for values in factors.values()):
        raise InvalidArgument(
            f"perturb={perturb!r} says nothing to draw from: it gives finite factors for each setting, or is a "
            'function. Write perturb={"lr": (0.8, 1.2)}.'
        )
    return factors
