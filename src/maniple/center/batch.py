"""A batch: the offers of one exchange, sent by one thread while another takes the answers."""

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from maniple.center.link import Link, checked
from maniple.contracts import Array, Outcome
from maniple.errors import BadFrame
from maniple.layout import Layout
from maniple.wire.messages import Answer, Ask, Offer, Told
from maniple.wire.stream import Stream

_FEW = 256
_SMALL_BYTES = 1 << 16  # with a few headers, so much fits into the buffers on the way: no second thread is needed


def ask(link: Link, center: str, sequence: int, first: int, parameters: Sequence[int]) -> list[bool]:
    """Which items of exchange `sequence`, from `first` on, the host has applied."""
    stream = link.stream()
    stream.send(Ask(center, sequence, first), np.array(parameters, np.int64))
    answer, size = stream.receive()
    if not isinstance(checked(answer), Told) or size != len(parameters):
        raise BadFrame("the host was asked what it has applied, and said something else.")
    return [bool(byte) for byte in stream.receive_bytes(size, at_most=len(parameters))]


class Trade(Protocol):
    """What is offered for each parameter, and what becomes of the answer."""

    def offer(self, i: int, sequence: int, item: int) -> Offer: ...
    def payload(self, i: int) -> Array: ...
    def take(self, i: int, answer: Answer, stream: Stream, size: int) -> None: ...
    def begin(self) -> None:
        """A pass over the model begins."""
        ...

    def settle(self, i: int) -> None:
        """Parameter i was applied, but its answer was lost."""
        ...


class Batch:
    """One exchange under way: which items were acknowledged, and after a break, which were applied."""

    def __init__(self, link: Link, center: str, layout: Layout, parameters: Sequence[int], trade: Trade) -> None:
        self._link, self._center, self._layout, self._trade = link, center, layout, trade
        self._parameters = list(parameters)
        self._acknowledged = 0
        self._unsettled: list[int] | None = None  # applied, but their answers were lost; None: not known yet
        self._unapplied: list[int] = []
        link.sequence += 1
        self._sequence = link.sequence

    def run(self, outcome: Outcome, size_bytes: int) -> None:
        """Send all offers and take all answers; OSError if the connection breaks on the way."""
        stream = self._link.stream()
        if size_bytes <= _SMALL_BYTES and len(self._parameters) <= _FEW:
            self._send(stream)
            self._receive(stream, outcome)
            return
        failures: list[BaseException] = []

        def send() -> None:
            try:
                self._send(stream)
            except BaseException as error:
                failures.append(error)
                stream.abort()  # wakes the thread that waits for answers

        sender = threading.Thread(target=send, name="maniple-send", daemon=True)
        sender.start()
        try:
            self._receive(stream, outcome)
        except BaseException:
            stream.abort()
            raise
        finally:
            sender.join()
            if failures and not isinstance(failures[0], OSError):
                raise failures[0]

    def resolve(self) -> list[int]:
        """After a break: settle what was applied; gives what was not. If it breaks again, call again."""
        if self._unsettled is None:
            open_items = self._parameters[self._acknowledged :]
            told = ask(self._link, self._center, self._sequence, self._acknowledged, open_items)
            applied = list(zip(open_items, told, strict=True))
            self._unsettled = [i for i, was_applied in applied if was_applied]
            self._unapplied = [i for i, was_applied in applied if not was_applied]
        if self._unsettled:
            self._trade.begin()
        while self._unsettled:
            self._trade.settle(self._unsettled[0])
            self._unsettled.pop(0)
        return self._unapplied

    def _send(self, stream: Stream) -> None:
        for item, i in enumerate(self._parameters):
            stream.send(self._trade.offer(i, self._sequence, item), self._trade.payload(i))

    def _receive(self, stream: Stream, outcome: Outcome) -> None:
        for item, i in enumerate(self._parameters):
            answer, size = stream.receive()
            checked(answer)
            if not isinstance(answer, Answer) or answer.item != item:
                raise BadFrame(f"the answer to item {item} was expected.")
            self._trade.take(i, answer, stream, size)
            self._acknowledged = item + 1
            name = self._layout.entries[i].name
            outcome.staleness += answer.staleness / len(self._layout.entries)
            outcome.live = answer.live
            if answer.is_torn:
                outcome.torn.append(name)
            if not answer.is_clean:
                outcome.refused.append(name)
