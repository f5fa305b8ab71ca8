"""The lead: how far a loader draws samples ahead of training, found by counting."""

import math
from collections import deque


class Lead:
    """What was trained on of what was drawn.

    With taken(s) samples drawn at the end of step s, a loader that draws `a - 1` batches ahead has trained on
    taken(s - a + 1) of them. `a` is the number of batches drawn before the first step of a pass has ended, which the
    second step tells. What the first step was trained on is known from earlier passes, if its size has not changed.
    """

    def __init__(self) -> None:
        self.trained = 0
        self._base = self._first = self._before = self._steps = 0
        self._batch = 0  # the fewest samples drawn in one step, once known
        self._largest = 0  # the most, in this pass
        self._most = 0  # the samples of a whole step, by all passes
        self._usual = 0  # the same, by any two steps of a pass: of short passes, perhaps only by the last one
        self._taken: deque[int] = deque()

    def has_drained(self, taken: int, *, is_early: bool = False) -> bool:
        """The steps of this pass suffice for all that was drawn: no loader was left with batches in hand.

        A pass may end with less than a whole step's samples, on which no step is made; after an early end they count
        as not trained on, as does everything where the size of a step is not known yet.
        """
        if not self._most:
            return not is_early
        return (self._steps + (0 if is_early else 1)) * self._most >= taken - self._base

    def drained(self, taken: int) -> None:
        """All that was drawn is trained on, and a new pass begins."""
        self.trained = self._base = taken
        self._first = self._batch = self._largest = self._steps = 0
        self._taken = deque()

    def stepped(self, taken: int) -> None:
        """A step has ended, and so many samples were drawn by now."""
        self._steps += 1
        if not self._first:
            self._first = self._before = taken
            drawn = taken - self._base
            if self._usual and drawn and drawn % self._usual == 0:  # whole steps as before: one of them has ended
                self.trained = self._base + self._usual
            return
        grown, self._before = taken - self._before, taken
        if grown > 0:
            self._usual = max(self._usual, grown)
            if self._batch:  # the last batch of a pass may be short, so one alone tells nothing
                self._most = max(self._most, self._largest, grown)
            self._largest = max(self._largest, grown)
        if grown > 0 and not 0 < self._batch <= grown:  # a step that is skipped makes the next one seem larger
            self._batch = grown
            self._taken = deque(self._taken, maxlen=math.ceil((self._first - self._base) / grown) or 1)
        if self._batch:
            self._taken.append(taken)
            if len(self._taken) == self._taken.maxlen:
                self.trained = max(self.trained, self._taken[0])
