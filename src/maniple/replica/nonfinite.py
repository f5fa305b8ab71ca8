"""Values that are not finite: found before they are shared, reported, and limited to a few in a row."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from maniple.collectives.call import nonfinite_weight
from maniple.contracts import Bucket, Outcome, Round
from maniple.errors import Diverged
from maniple.layout import Layout
from maniple.record import Events
from maniple.rules import Pairwise, Rule

_LIMIT = 3  # in a row: one or two may be a bad batch, three are a training that has diverged


class Refusals:
    """Counts consecutive exchanges in which the center has refused values of this worker."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def check(self, outcome: Outcome, who: str = "this worker") -> None:
        """Warn about refused values; raise Diverged at the third exchange in a row."""
        if not outcome.refused:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        first = outcome.refused[0]
        if self.in_a_row >= _LIMIT:
            raise Diverged(
                f"{who} offered non-finite values {self.in_a_row} exchanges in a row (limit {_LIMIT}), first in "
                f"{first!r}; the center refused them and is unharmed. "
                "Lower the learning rate or clip gradients; with --restarts the worker starts again from the center."
            )
        warnings.warn(
            f"the center refused non-finite values of {first!r} and gave its own instead "
            f"({len(outcome.refused)} parameters)",
            stacklevel=5,
        )


class Contributions:
    """Checks the contributions of all workers to synchronous rounds.

    Each worker checks its own before a round and reports the result with its weight, so all workers take the same
    decision in the same round.

    Attributes:
        in_a_row: consecutive contributions that were not finite, by rank.
        layout: of the vectors of a round; messages name its entries.
    """

    def __init__(self, rule: Rule, layout: Layout, *, rank: int, events: Events) -> None:
        self.in_a_row: dict[int, int] = {}
        self.layout = layout
        self._rule, self._rank, self._events = rule, rank, events

    def checked_weight(self, weight: float, flat: Mapping[str, Any]) -> float:
        """The weight to send with these flat vectors: `weight`, or a code for the first entry that is not finite."""
        for dtype, vector in flat.items() if weight > 0 else ():
            if (entry := nonfinite_entry(self.layout, flat, (dtype, 0, len(vector)))) is not None:
                return nonfinite_weight(entry)
        return weight

    def check_round(self, made: Round, step: int) -> Diverged | None:
        """Count what a round has left out; gives the error that ends the run, if it has to end."""
        if not made.nonfinite:
            self.in_a_row = {}
            return None
        self.in_a_row = {rank: self.in_a_row.get(rank, 0) + 1 for rank in made.nonfinite}
        is_skipping, most = self._rule.nonfinite == "skip", max(self.in_a_row.values())
        ranks, entry = sorted(made.nonfinite), made.nonfinite[min(made.nonfinite)]
        what = f"{'the gradient of ' * self._rule.averages_gradients}{self.layout.entries[entry].name!r}"
        if self._rank in made.nonfinite:
            name = self.layout.entries[made.nonfinite[self._rank]].name
            self._events.write("nonfinite", step=step, parameter=name, in_a_row=self.in_a_row[self._rank])
        if is_skipping and most < _LIMIT:
            if self._rank in made.nonfinite:
                whole = "pairs" if isinstance(self._rule, Pairwise) else "mean"
                warnings.warn(
                    f"{what} of this worker is not finite in step {step}: left out of the {whole}", stacklevel=4
                )
            return None
        who = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"
        again = f", and {most} times in a row (limit {_LIMIT})" if is_skipping else ""
        remedy = "" if is_skipping else " nonfinite='skip' leaves such contributions out."
        return Diverged(
            f"{what} of {who} holds NaN or infinity in step {step}{again}. It has reached no other replica, and the "
            "center holds the last finite values. Lower the learning rate, clip gradients, or look at the data of that "
            f"worker; a buffer that is never finite stays local with share(..., buffers=False).{remedy}"
        )


def nonfinite_entry(layout: Layout, flat: Mapping[str, Any], part: Bucket) -> int | None:
    """The first entry that is not finite in a part of the flat vectors; None if all are finite."""
    dtype, start, stop = part
    if is_finite(flat[dtype][start:stop]):
        return None
    for i, (entry_dtype, low, high) in enumerate(layout.places):
        low, high = max(low, start), min(high, stop)
        if entry_dtype == dtype and low < high and not is_finite(flat[dtype][low:high]):
            return i
    raise AssertionError("no entry of a vector that is not finite")


def is_finite(values: Any) -> bool:
    """True if all values of a flat NumPy array or torch tensor are finite.

    A sum of squares is finite only if all values are, and is computed at memory bandwidth. It overflows for large
    finite values; only then each value is checked.
    """
    if isinstance(values, np.ndarray):
        with np.errstate(all="ignore"):
            return bool(np.isfinite(np.dot(values, values))) or bool(np.isfinite(values).all())
    return bool(values.dot(values).isfinite()) or bool(values.isfinite().all())
