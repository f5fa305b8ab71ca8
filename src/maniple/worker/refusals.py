"""Refusals: offers of a replica that the center did not take, because they are not finite."""

import warnings

from maniple.contracts import Outcome
from maniple.errors import Diverged

_MOST = 3  # so many exchanges in a row with non-finite values end the worker


class Refusals:
    """Counts those that come in a row."""

    def __init__(self) -> None:
        self._count = 0

    def mind(self, outcome: Outcome) -> None:
        """Warn of refused values; Diverged if they do not cease."""
        if not outcome.refused:
            self._count = 0
            return
        self._count += 1
        first = outcome.refused[0]
        if self._count >= _MOST:
            raise Diverged(
                f"this worker offered non-finite values {self._count} exchanges in a row (limit {_MOST}), first in "
                f"{first!r}; the center refused them and is unharmed. "
                "Lower the learning rate or clip gradients; with --restarts the worker begins again from the center."
            )
        warnings.warn(
            f"the center refused non-finite values of {first!r} and gave its own instead "
            f"({len(outcome.refused)} parameters)",
            stacklevel=5,
        )
