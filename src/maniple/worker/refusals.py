"""Refusals: offers of a replica that are not finite, which neither the center nor the circle takes."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from maniple.circle.call import nonfinite_weight
from maniple.contracts import Outcome, Part, Round
from maniple.errors import Diverged
from maniple.layout import Layout
from maniple.record import Events
from maniple.rules import Rule

_MOST = 3  # so many exchanges in a row with non-finite values end the worker


class Refusals:
    """Counts those that come in a row."""

    def __init__(self) -> None:
        self._count = 0

    def mind(self, outcome: Outcome, who: str = "this worker") -> None:
        """Warn of refused values; Diverged if they do not cease."""
        if not outcome.refused:
            self._count = 0
            return
        self._count += 1
        first = outcome.refused[0]
        if self._count >= _MOST:
            raise Diverged(
                f"{who} offered non-finite values {self._count} exchanges in a row (limit {_MOST}), first in "
                f"{first!r}; the center refused them and is unharmed. "
                "Lower the learning rate or clip gradients; with --restarts the worker begins again from the center."
            )
        warnings.warn(
            f"the center refused non-finite values of {first!r} and gave its own instead "
            f"({len(outcome.refused)} parameters)",
            stacklevel=5,
        )


class Contributions:
    """The contributions of all workers to the rounds of one circle: whether they are finite.

    Each worker checks its own before a round and tells the others with its weight, so all take the same decision in
    the same round.

    Attributes:
        in_a_row: by rank, how many contributions in a row were not finite.
    """

    def __init__(self, rule: Rule, layout: Layout, *, rank: int, events: Events) -> None:
        self.in_a_row: dict[int, int] = {}
        self._rule, self._layout, self._rank, self._events = rule, layout, rank, events

    def told_weight(self, weight: float, flat: Mapping[str, Any]) -> float:
        """The weight to send with these flat vectors, which also tells if they are not finite."""
        for dtype, vector in flat.items() if weight > 0 else ():
            if (entry := nonfinite_entry(self._layout, flat, (dtype, 0, len(vector)))) is not None:
                return nonfinite_weight(entry)
        return weight

    def judge(self, made: Round, step: int) -> Diverged | None:
        """Note what a round has left out; gives the error that ends the run, if it has to end."""
        self.in_a_row = {rank: self.in_a_row.get(rank, 0) + 1 for rank in made.nonfinite}
        if not made.nonfinite:
            return None
        rule, most = self._rule, max(self.in_a_row.values())
        ranks, entry = sorted(made.nonfinite), made.nonfinite[min(made.nonfinite)]
        what = f"{'the gradient of ' * (rule.meets == 'gradients')}{self._layout.entries[entry].name!r}"
        if self._rank in made.nonfinite:
            self._events.write("nonfinite", step=step, parameter=self._name(made), in_a_row=self.in_a_row[self._rank])
        who = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"
        if rule.nonfinite == "skip" and most < _MOST:
            if self._rank in made.nonfinite:
                warnings.warn(f"{what} of this worker is not finite in step {step}: left out of the mean", stacklevel=4)
            return None
        again = f", and {most} times in a row (limit {_MOST})" if rule.nonfinite == "skip" else ""
        remedy = "" if rule.nonfinite == "skip" else " nonfinite='skip' leaves such contributions out."
        return Diverged(
            f"{what} of {who} holds NaN or infinity in step {step}{again}. It has reached no other replica, and the "
            "center holds the last finite values. Lower the learning rate, clip gradients, or look at the data of that "
            f"worker; a buffer that is never finite stays local with share(..., buffers=False).{remedy}"
        )

    def _name(self, made: Round) -> str:
        return self._layout.entries[made.nonfinite[self._rank]].name


def nonfinite_entry(layout: Layout, flat: Mapping[str, Any], part: Part) -> int | None:
    """The first entry that is not finite in a part of the flat vectors; None if all are."""
    dtype, start, stop = part
    if is_finite(flat[dtype][start:stop]):
        return None
    for i, (its_dtype, low, high) in enumerate(layout.places):
        low, high = max(low, start), min(high, stop)
        if its_dtype == dtype and low < high and not is_finite(flat[dtype][low:high]):
            return i
    raise AssertionError("no entry of a vector that is not finite")


def is_finite(values: Any) -> bool:
    """Whether all of a flat vector is finite: a NumPy array or a torch tensor.

    A sum of squares is finite only if all values are, and reads them as fast as memory gives them; only if it is not,
    each value is looked at, since large finite ones overflow it.
    """
    if isinstance(values, np.ndarray):
        with np.errstate(all="ignore"):
            return bool(np.isfinite(np.dot(values, values))) or bool(np.isfinite(values).all())
    return bool(values.dot(values).isfinite()) or bool(values.isfinite().all())
