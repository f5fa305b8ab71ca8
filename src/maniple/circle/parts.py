"""Parts: vectors that go out piece by piece, while the worker still computes the rest of them.

A part is sent as soon as it is complete; a thread then hears from the others, adds up and sends the result. All workers
have the same parts in the same order, but a part may be sent early by one and late by another.
"""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from maniple.circle.rounds import Vectors
from maniple.contracts import Round

_Task = tuple[Vectors, str, float]


class Parts:
    """Vectors in parts (`contracts.Parted`). Whatever the thread waits for has the circle's deadline."""

    def __init__(self, flat: dict[str, Any], parts: Sequence[Vectors]) -> None:
        self.flat = flat
        self._parts = parts
        self._begun = 0
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._done: SimpleQueue[Round | Exception] = SimpleQueue()
        # A daemon: a worker that fails in the middle of a round ends without waiting for the others.
        threading.Thread(target=_work, args=(self._tasks, self._done), name="maniple parts", daemon=True).start()

    def begin(self, op: str, *, weight: float = 1.0) -> None:
        """The next part is complete: let it go out."""
        part = self._parts[self._begun]
        part.send(op)
        self._tasks.put((part, op, weight))
        self._begun += 1

    def all_reduce(self, op: str, *, weight: float = 1.0) -> Round:
        """Send the parts that are left, and wait for all."""
        while self._begun < len(self._parts):
            self.begin(op, weight=weight)
        start = time.monotonic()
        results = [self._done.get() for _ in self._parts]
        blocked_s = time.monotonic() - start
        self._begun = 0
        rounds = [_checked(result) for result in results]
        waited_s = min(blocked_s, sum(one.waited_s for one in rounds))
        # What is not finite is known with the last part at the latest.
        return Round(rounds[0].ranks, rounds[0].weight, waited_s, rounds[-1].nonfinite)

    def close(self) -> None:
        """Let the thread end."""
        self._tasks.put(None)


def _work(tasks: "SimpleQueue[_Task | None]", done: "SimpleQueue[Round | Exception]") -> None:
    while (task := tasks.get()) is not None:
        part, op, weight = task
        try:
            done.put(part.finish(op, weight=weight))
        except Exception as error:  # raised again by all_reduce, where somebody looks at it
            done.put(error)


def _checked(result: Round | Exception) -> Round:
    if isinstance(result, Exception):
        raise result
    return result
