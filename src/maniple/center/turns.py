"""Turns: which of a worker's connections may speak for it."""

import contextlib
import threading
from collections.abc import Generator

from maniple.center.stage import Stages
from maniple.wire.stream import Stream


class Superseded(ConnectionError):
    """The worker has made a newer connection; this one may not apply anything any more."""


class Left(ConnectionError):
    """The worker has said goodbye."""


class Turns:
    """Which connection speaks for each worker. Only the newest may: what lingers in an older one is void."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self._lock = threading.Lock()
        self._turns: dict[str, Turn] = {}

    def take(self, worker: str, stream: Stream) -> "Turn":
        """Make `stream` the connection of `worker`, once what the older one is applying is done."""
        with self._lock:
            before = self._turns.get(worker)
            turn = self._turns[worker] = Turn(stream, threading.Lock() if before is None else before.lock)
        if before is not None:
            before.stream.abort()
            with turn.lock:
                before.is_over = True
        return turn

    def end(self, worker: str, turn: "Turn") -> None:
        """The connection of a worker has ended; nothing is kept of it, unless the worker has a newer one."""
        with self._lock:
            if self._turns.get(worker) is turn:
                del self._turns[worker]

    def forget(self, worker: str) -> None:
        """The worker has left: it will not ask again what was applied."""
        with self._lock:
            turn = self._turns.pop(worker, None)
        if turn is not None:
            turn.stream.abort()
            with turn.lock:
                turn.is_over = True
        self.stages.forget(worker)


class Turn:
    """One connection's right to speak for its worker."""

    def __init__(self, stream: Stream, lock: threading.Lock) -> None:
        self.stream, self.lock = stream, lock
        self.is_over = False

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """For the time of one contribution."""
        with self.lock:
            if self.is_over:
                raise Superseded("the worker has connected anew")
            yield
