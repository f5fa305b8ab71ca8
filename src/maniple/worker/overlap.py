"""Overlap: gradients go out while the backward pass still computes the others."""

from collections.abc import Callable
from typing import Protocol

from maniple.adapters import Adapter, InBuckets
from maniple.circle.call import nonfinite_weight
from maniple.contracts import Background, Circle, Part, Parted
from maniple.errors import InvalidArgument
from maniple.rules import Rule
from maniple.worker.refusals import nonfinite_entry


class Whole(Protocol):
    """What the overlap asks of its replica."""

    is_exchanging: bool

    @property
    def weight(self) -> float: ...
    def end_pass(self) -> None:
        """Average the gradients of a backward pass that has ended."""
        ...


class Overlap:
    """Gradients in buckets, in a circle that carries these meanwhile."""

    def __init__(self, buckets: InBuckets, resident: Parted) -> None:
        self.buckets, self.resident = buckets, resident
        self._parts = buckets.parts
        self._sent = 0  # parts of this round
        self._nonfinite: int | None = None  # the first entry in them that is not finite

    def watch(self, replica: Whole) -> Callable[[], None]:
        """Average the gradients of each backward pass of `replica`; gives back what undoes it."""

        def send() -> None:
            replica.is_exchanging = True  # a SIGTERM waits until the round is whole
            self._check(self._parts[self._sent])  # afterwards it holds what all workers have made of it
            self._sent += 1
            self.resident.begin("mean", weight=replica.weight)

        return self.buckets.watch(send, replica.end_pass)

    def told_weight(self, weight: float) -> float:
        """The weight to send with what is left of this round, which also tells if any part is not finite."""
        for part in self._parts[self._sent :]:
            self._check(part)
        bad, self._sent, self._nonfinite = self._nonfinite, 0, None
        return weight if bad is None or weight <= 0 else nonfinite_weight(bad)

    def _check(self, part: Part) -> None:
        if self._nonfinite is None:
            self._nonfinite = nonfinite_entry(self.buckets.layout, self.resident.flat, part)


def overlap(model: Adapter, circle: Circle, rule: Rule, wire: str) -> Overlap | None:
    """None if the rule does not ask for it, or if the model or the circle have nothing to gain by it."""
    if not rule.overlap or not isinstance(circle, Background):
        return None
    buckets = model.buckets(norm=rule.norm)
    if buckets is None:
        return None
    return Overlap(buckets, circle.reside_in_parts(buckets.sizes, buckets.parts, wire=wire, device=model.device))


def check_weight(now: float, sent: float) -> None:
    """Raise InvalidArgument if the gradients went out with another weight than they should have."""
    if now != sent:
        raise InvalidArgument(
            f"replica.samples makes the weight {now:g}, but the gradients went out with {sent:g} during the backward "
            "pass (overlap=True). Set replica.samples before loss.backward()."
        )
