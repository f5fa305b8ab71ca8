"""Members of collectives in shared memory, all in one process: locks belong to opened files, not to processes."""

import threading
from collections.abc import Callable
from typing import Any

from maniple.center import Segment
from maniple.collectives.shared_memory import SharedMemoryCollectives

PATIENCE_S = 30.0  # only against hanging


class Died(BaseException):
    """What ends a worker in the middle of something."""


def open_collectives(segment: Segment, rank: int, world: int, **options: Any) -> SharedMemoryCollectives:
    """One worker's collectives, which it has not joined yet."""
    return SharedMemoryCollectives(segment, "collectives-0", rank=rank, world=world, **{"deadline_s": 20.0} | options)


def collective_groups(segment: Segment, world: int, **options: Any) -> list[SharedMemoryCollectives]:
    """As many workers, all of them members."""
    made = [open_collectives(segment, rank, world, **options) for rank in range(world)]
    together([collectives.membership.join for collectives in made])
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


def die(collectives: SharedMemoryCollectives) -> None:
    """End without a word, as a process that is killed: the kernel gives its locks back."""
    collectives.membership.table.close()
