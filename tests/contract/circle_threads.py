"""Workers of a circle in shared memory, all in one process: locks belong to opened files, not to processes."""

import threading
import time
from collections.abc import Callable
from typing import Any

from maniple.center import Segment
from maniple.circle.shared import Shared

PATIENCE_S = 30.0  # only against hanging


class Died(BaseException):
    """What ends a worker in the middle of something."""


def open_circle(segment: Segment, rank: int, world: int, **options: Any) -> Shared:
    """One worker's circle, which it has not entered yet."""
    return Shared(segment, "circle-0", rank=rank, world=world, **{"deadline_s": 20.0} | options)


def circles(segment: Segment, world: int, **options: Any) -> list[Shared]:
    """As many workers, all in their circle."""
    made = [open_circle(segment, rank, world, **options) for rank in range(world)]
    together([circle.enter for circle in made])
    return made


def together(acts: list[Callable[[], Any]]) -> list[Any]:
    """Do all at once; gives their results or errors."""
    begun = [Begun(act) for act in acts]
    return [one.result() for one in begun]


class Begun:
    """What one worker does meanwhile."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act, self._result = act, None
        self._thread = threading.Thread(target=self._do, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        """What came of it: a value or an error."""
        self._thread.join(PATIENCE_S)
        assert self.is_over
        return self._result

    def _do(self) -> None:
        try:
            self._result = self._act()
        except BaseException as error:
            self._result = error


def await_(look: Callable[[], Any]) -> None:
    """Look until something true is seen."""
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def die(circle: Shared) -> None:
    """End without a word, as a process that is killed: the kernel gives its locks back."""
    circle.roster.table.close()
