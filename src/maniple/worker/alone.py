"""A worker alone is its own controller: the default one, with the limits that the environment tells."""

import time
from typing import Any

from maniple.decisions import Decisions
from maniple.place import Limits
from maniple.worker.seat import Count

_ME = (0, 0)


class Alone:
    """The decisions of a world of one."""

    def __init__(self, limits: Limits, count: Count) -> None:
        self._decisions, self._count = Decisions(limits), count

    @property
    def stop(self) -> str:
        """Why to stop, or nothing."""
        steps, samples, _ = self._count()
        self._decisions.count(_ME, steps, samples)
        return self._decisions.mind_limits(time.time())

    def ask(self, request: str, info: dict[str, Any]) -> Any:
        """The default controller's answer."""
        _ = self.stop
        return self._decisions.answer(_ME, request, info, is_finished=self._count()[2])
