"""A target of training: a logged value and the number that it should reach, and when a run has reached it.

    loss=0.2           reached from above if the first logged value is above 0.2, else from below
    loss<=0.2          reached at or below 0.2
    accuracy>=0.9      reached at or above 0.9

What counts is the series of `value_series`: the center's values once there are any, else the mean over the workers of
each one's running mean. The first point of the series at the target, or beyond it, reaches the target for good.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from maniple.clock import clock
from maniple.errors import InvalidArgument
from maniple.monitor.series import CENTER
from maniple.monitor.value_series import ValueSeries, value_series

if TYPE_CHECKING:
    from maniple.monitor.run_state import RunState

_FORM = re.compile(r"(?:(?P<name>[^\s<>=]+)\s*(?P<sign><=|>=|=)\s*)?(?P<number>[^\s<>=]+)")
_SIGNS = {True: "<=", False: ">=", None: "="}
_COST_SHARE = 20  # a search that takes 0.1 s is repeated after 2 s: it must not slow down the launcher


@dataclass(frozen=True)
class Target:
    """A value to reach.

    Attributes:
        name: of the logged value.
        falling: it is reached from above; None: not known until the first value was logged.
    """

    name: str
    value: float
    falling: bool | None = None

    def __str__(self) -> str:
        return f"{self.name}{_SIGNS[self.falling]}{self.value:g}"

    @property
    def text(self) -> str:
        """`at or below 0.5`."""
        side = {True: "at or below ", False: "at or above ", None: ""}[self.falling]
        return f"{side}{self.value:g}"

    def resolve(self, series: ValueSeries) -> "Target":
        """The target with its direction, which follows from the first point of the series unless it was given."""
        if self.falling is not None or not len(series):
            return self
        return replace(self, falling=bool(series.ys[0] > self.value))

    def reached(self, series: ValueSeries) -> float | None:
        """The time since 1970 of the first point that reaches it; None if there is none, or no direction."""
        if self.falling is None:
            return None
        places = np.flatnonzero(series.ys <= self.value if self.falling else series.ys >= self.value)
        return float(series.xs[places[0]]) if len(places) else None

    def best(self, series: ValueSeries) -> float | None:
        """The value of the series that comes nearest; None if there is none."""
        if self.falling is None or not len(series):
            return None
        return float(series.ys.min() if self.falling else series.ys.max())


def parse_target(text: str, *, name: str = "", option: str = "--target") -> Target:
    """The target in `text`. A number alone is a target for the value `name`, if there is one."""
    found = _FORM.fullmatch(text.strip())
    number = _number(found["number"]) if found else None
    name = (found["name"] if found else None) or name
    if found is None or number is None or not name:
        example = "loss=0.2, loss<=0.2 or accuracy>=0.9"
        raise InvalidArgument(
            f"{option} {text!r} is no target: a logged value and a finite number are needed. Write {option} {example}."
        )
    falling = {"<=": True, ">=": False}.get(found["sign"] or "")
    return Target(name, number, falling)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class TargetStatus:
    """How far a run is from its target.

    Attributes:
        reached_s: training time at which it was reached; None if it was not.
        best: the value that came nearest; None if nothing was logged.
        of: "center" or "workers": whose value counts.
    """

    name: str
    value: float
    falling: bool | None
    reached_s: float | None = None
    best: float | None = None
    of: str = "workers"

    @property
    def target(self) -> Target:
        """The target with its direction, as far as that is known."""
        return Target(self.name, self.value, self.falling)

    @property
    def text(self) -> str:
        """`target loss 0.2: reached after 12.3 s`, for a run that may continue."""
        return self._say("not yet")

    @property
    def final_text(self) -> str:
        """The same for a run that has ended."""
        return self._say("not reached")

    def _say(self, missed: str) -> str:
        if self.reached_s is not None:
            return f"target {self.name} {self.value:g}: reached after {self.reached_s:,.1f} s"
        known = f"best {self.best:.4g}" if self.best is not None else f"no {self.name} was logged"
        return f"target {self.name} {self.value:g}: {missed}, {known}"


class TargetSearch:
    """Finds out when a run reaches its target, while the run continues.

    Attributes:
        reached: time since 1970 at which it was reached, as of the last call of `status`; None if it was not.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._status = TargetStatus(target.name, target.value, target.falling)
        self.reached: float | None = None
        self._searched: tuple[int, int] = (0, 0)  # generations and points of the series at the last search
        self._next = 0.0

    def status(self, state: "RunState", *, is_last: bool = False) -> TargetStatus:
        """The status as of a moment ago; of now if it `is_last`."""
        by_rank = state.logged.named.get(self.target.name, {})
        points = sum(one.generation for one in by_rank.values()), sum(map(len, by_rank.values()))
        # Later points do not change when a target was reached, except that the center's values replace the workers'.
        is_final = self.reached is not None and (self._status.of == "center" or CENTER not in by_rank)
        begin = clock.monotonic()
        if points != self._searched and not is_final and (is_last or begin >= self._next):
            self._search(state)
            self._searched, self._next = points, begin + _COST_SHARE * (clock.monotonic() - begin)
        if self.reached is None:
            return self._status
        return replace(self._status, reached_s=float(state.elapsed_at(np.array([self.reached]))[0]))

    def _search(self, state: "RunState") -> None:
        series = value_series(state, self.target.name)
        target = self.target.resolve(series)
        self.reached = target.reached(series)
        whose = "center" if series.is_center else "workers"
        self._status = TargetStatus(target.name, target.value, target.falling, best=target.best(series), of=whose)
