"""The circles of one worker: one for its own calls, one for each replica whose rule meets there."""

from collections.abc import Callable

from maniple.center import Segment
from maniple.circle.shared import Shared
from maniple.contracts import Circle
from maniple.errors import InvalidArgument
from maniple.place import Place


class Circles:
    """Opens circles, and lets them know of each other."""

    def __init__(self, place: Place, on_wait: Callable[[], None]) -> None:
        self._place, self._on_wait = place, on_wait
        self._opened: list[Circle] = []

    def open(self, segment: Segment | None, name: str, *, is_boundary: bool) -> Circle:
        """The circle of that name."""
        if segment is None:
            raise InvalidArgument("this worker is not on its host's machine, so it cannot enter the circle there.")
        place = self._place
        circle = Shared(segment, name, rank=place.rank, world=place.world, deadline_s=600.0, is_boundary=is_boundary)
        circle.roster.on_wait = self._on_wait
        for other in self._opened:
            if isinstance(other, Shared):
                other.roster.others.append(circle.roster)
                circle.roster.others.append(other.roster)
        self._opened.append(circle)
        return circle

    def close(self) -> None:
        """Leave all circles."""
        for circle in self._opened:
            circle.close()
