"""A link: messages from worker to worker, on which the circles of torch and MPI are built alike.

Whoever waits for a message knows from whom, so a worker that is dead or stuck is named by those who wait for it.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from maniple.circle.absence import LongWait, OnLongWait
from maniple.contracts import Array
from maniple.errors import ManipleError, PeerLost, WaitedTooLong

_LOOK_S = 0.5


@dataclass(slots=True)
class Message:
    """One that is under way. Its memory must live until it has come."""

    peer: int
    data: Array
    work: Any  # the transport's own


class Transport(Protocol):
    """What carries messages. Those between two workers with the same tag come in the order of sending."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def awaited(self) -> set[int]:
        """Those whose messages `wait` waits for, as far as it knows. They may themselves wait for another."""
        ...

    def send(self, peer: int, data: Array, tag: int) -> Message: ...
    def receive(self, peer: int, data: Array, tag: int) -> Message: ...
    def wait(self, messages: Sequence[Message], deadline_s: float) -> tuple[set[int], set[int]]:
        """Until all have come; gives those who are lost for certain, and those who are late."""
        ...

    def blame(self, lost: set[int], late: set[int]) -> tuple[set[int], set[int]]:
        """The same, once the others were asked whom they wait for: who is late may only wait for another."""
        ...

    def close(self) -> None: ...


class Link:
    """The messages of one circle, with a deadline. After a failure it cannot be used again."""

    def __init__(self, transport: Transport, deadline_s: float) -> None:
        self._transport, self._deadline_s = transport, deadline_s
        self.rank, self.size = transport.rank, transport.size
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self._failure: ManipleError | None = None
        self._under_way: dict[int, Message] = {}  # keeps memory that may still be written to, after a failure too
        self._since: float | None = None  # it waits, in the thread that makes the calls
        self._is_closed = threading.Event()

    def report_long_waits(self, on_report: OnLongWait) -> None:
        """Report waits that take unusually long; from a thread, since the transport itself may wait outside Python."""

        def look() -> None:
            wait, since = LongWait(), None
            wait.on_report = on_report
            while not self._is_closed.wait(_LOOK_S):
                before, since = since, self._since
                if before is not None and since != before:
                    wait.end(time.monotonic() - before)
                if since is not None:
                    wait.go_on(lambda: sorted(self._transport.awaited), time.monotonic() - since)

        threading.Thread(target=look, name="maniple waits", daemon=True).start()

    def send(self, peer: int, data: Array, tag: int) -> list[Message]:
        """Begin to send; nothing is sent of an empty array."""
        return self._note(self._transport.send(peer, data, tag)) if data.size else []

    def receive(self, peer: int, data: Array, tag: int) -> list[Message]:
        """Begin to receive into `data`."""
        return self._note(self._transport.receive(peer, data, tag)) if data.size else []

    def check(self) -> None:
        """Raise the error by which the circle has ended, if it has."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def finish(self, messages: list[Message], phase: str) -> float:
        """Wait for all; PeerLost or WaitedTooLong name those who are missing. Gives the seconds."""
        begin = time.monotonic()
        if messages:
            self._since = begin
            try:
                lost, late = self._transport.wait(messages, self._deadline_s)
            finally:
                self._since = None
            if lost or late:
                self._fail(*self._transport.blame(lost, late), phase, time.monotonic() - begin)
        for message in messages:
            del self._under_way[id(message)]
        return time.monotonic() - begin

    def close(self) -> None:
        """Let go of the connections."""
        self._failure = self._failure or PeerLost(
            "this circle is closed: its worker has left the run. Make all calls before worker.leave()."
        )
        self._is_closed.set()
        self._transport.close()

    def _note(self, message: Message) -> list[Message]:
        self._under_way[id(message)] = message
        return [message]

    def _fail(self, lost: set[int], late: set[int], phase: str, after_s: float) -> NoReturn:
        if lost:
            self._failure = PeerLost(
                f"{_workers(lost)} been lost: the connection broke or the process ended ({phase}, noticed by worker "
                f"{self.rank} after {after_s:.1f} s). The others cannot go on without it: look at its log, and start "
                "the run again."
            )
        else:
            self._failure = WaitedTooLong(
                f"{_workers(late)} not come within {after_s:.1f} s (limit {self._deadline_s:g} s) to {phase}, where "
                f"worker {self.rank} waits. Look at its log; raise --circle-deadline if its steps take longer."
            )
        raise self._failure


def _workers(ranks: set[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"worker {names} has" if len(ranks) == 1 else f"workers {names} have"
