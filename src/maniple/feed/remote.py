"""A feed over TCP: a producer's or a worker's connection to the host that holds the ring.

A break is mended. A batch that is pushed comes into the ring exactly once: the producer keeps it until the host has
said that it has it, and asks after a break how many have come. A batch that a worker takes is given to another one if
the worker has not said that it has it: across a break it may be given twice.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np

from maniple.center.link import Door, Link, checked
from maniple.center.locks import Patience
from maniple.center.tcp import insist
from maniple.contracts import Array
from maniple.errors import BadFrame, HostAway, ManipleError
from maniple.feed.batch import Batch as Arrays
from maniple.feed.batch import read
from maniple.feed.near import RunOver
from maniple.place import Place
from maniple.wire.batches import Batch, End, Fetch, Got, Later, Over, Push, Room, Supplied, Supply
from maniple.wire.messages import Message, Refusal
from maniple.wire.stream import TIMEOUT_S, Stream

T = TypeVar("T")

_FIRST_S = _LAST_S = 60.0  # for so long a host is waited for at the first contact, and to be told of the end
_MAX_TRACE_BYTES = 1 << 19


class _Line:
    """A connection that is mended when it breaks, unless that takes longer than `deadline_s`."""

    def __init__(self, place: Place) -> None:
        self._link = Link(Door.of(place), "feed")
        self.deadline_s = place.host_deadline_s
        self._break: Patience | None = None  # for as long as it has been broken
        insist(self._link, lambda: None, _FIRST_S)

    def stream(self) -> Stream:
        """The connection, made anew if it broke. HostAway while it cannot be made."""
        return self._link.stream()

    def hear(self, stream: Stream) -> tuple[Message, int]:
        """What the host says next."""
        message, size = stream.receive()
        self._break = None
        if isinstance(message, Refusal) and message.kind == "RunOver":
            raise RunOver("the run has ended, and nobody takes batches any more. Push while it goes on.")
        return checked(message), size

    def hear_out(self, stream: Stream) -> Message:
        """What the host says next but for `Later`, without a payload."""
        while True:
            message, size = self.hear(stream)
            if size:
                raise BadFrame(f"{type(message).__name__} came with a payload, which it never has.")
            if not isinstance(message, Later):
                return message

    def attempt(self, act: Callable[[], T]) -> T | None:
        """Do `act`; None if the connection breaks or cannot be made. Raises HostAway if that has gone on too long."""
        try:
            return act()
        except BaseException as error:
            self._link.drop(str(error))  # a late answer must not be taken for that of another question
            if not _is_break(error):
                raise
            self._mind_break(error)
            return None

    def _mind_break(self, error: BaseException) -> None:
        if self._break is None:
            self._break = Patience(self.deadline_s, slice_s=TIMEOUT_S + 1.0)  # for as long as a message may take
        if self._break.is_over():
            raise HostAway(
                f"the host has been away for {self.deadline_s:g} s: {error}. Start it again with `maniple serve "
                "--resume RUN`; raise --host-deadline if it may be away for longer."
            ) from error
        time.sleep(0.02)

    def insist(self, act: Callable[[], T]) -> T:
        """Do `act` until it is done."""
        while (done := self.attempt(act)) is None:
            pass
        return done

    def close(self) -> None:
        """End the connection."""
        self._link.drop("closed")


class RemoteSink:
    """The producer's end."""

    def __init__(self, place: Place, name: str, high_water: int) -> None:
        self._supply = Supply(name, place.producer, place.producers, high_water)
        self._line = _Line(place)
        self._greeted: Stream | None = None
        self._pushed = self._number = 0
        self._line.insist(self._meet)

    def put(self, batch: Arrays) -> None:
        """Wait for room, and send the batch."""
        self._number += 1
        self._line.insist(lambda: self._push(batch))

    def end(self, failure: str | None) -> None:
        """Say that no more will come."""
        trace = (failure or "").encode(errors="replace")[-_MAX_TRACE_BYTES:]
        self._line.deadline_s = min(_LAST_S, self._line.deadline_s)  # all batches have come: little is left to lose
        with suppress(RunOver):  # nobody is left to be told
            self._line.insist(lambda: self._say_end(End(failure is not None), trace))

    def close(self) -> None:
        """End the connection."""
        self._line.close()

    def _meet(self) -> Stream:
        """The connection, on which the host knows this producer."""
        stream = self._line.stream()
        if stream is not self._greeted:
            stream.send(self._supply)
            answer = self._line.hear_out(stream)
            if not isinstance(answer, Supplied):
                raise BadFrame("the host was told of a producer, and said something else.")
            self.index, self.count, self._pushed = answer.index, answer.count, answer.pushed
            self._greeted = stream
        return stream

    def _push(self, batch: Arrays) -> bool:
        stream = self._meet()
        if self._pushed >= self._number:  # it came before the break
            return True
        stream.send(Push(self._number, batch.size_bytes))
        if not isinstance(self._line.hear_out(stream), Room):
            raise BadFrame("the host was asked for room, and said something else.")
        stream.send(Batch(self._number), *batch.parts())
        if self._line.hear_out(stream) != Got(self._number):
            raise BadFrame("the host was sent a batch, and said something else.")
        self._pushed = self._number
        return True

    def _say_end(self, end: End, trace: bytes) -> bool:
        stream = self._meet()
        stream.send(end, trace)
        if not isinstance(self._line.hear_out(stream), Over):
            raise BadFrame("the host was told of the end, and said something else.")
        return True


class RemoteSource:
    """The worker's end."""

    def __init__(self, place: Place, name: str) -> None:
        self._fetch = Fetch(name)
        self._line = _Line(place)
        self.is_ended = False

    def take(self, patience_s: float) -> list[Array] | None:
        """The next batch, in arrays of one's own; None if none came in time, or ever will."""
        del patience_s  # the host says within a second that there is none
        if self.is_ended:
            return None
        try:
            got = self._line.attempt(self._ask)
        except RunOver:
            self.is_ended = True
            return None
        return None if got is None else got[0]

    def close(self) -> None:
        """End the connection."""
        self._line.close()

    def _ask(self) -> tuple[list[Array]] | None:
        stream = self._line.stream()
        stream.send(self._fetch)
        message, size = self._line.hear(stream)
        if isinstance(message, Batch):
            own = np.empty(size, np.uint8)
            stream.receive_into(own)
            arrays = read(own)
            stream.send(Got(message.number))
            return (arrays,)
        if not isinstance(message, Over | Later):
            raise BadFrame("the host was asked for a batch, and said something else.")
        self.is_ended = isinstance(message, Over)
        return None


def _is_break(error: BaseException) -> bool:
    """The connection broke or cannot be made; other errors of ours are kin of OSError, too."""
    if isinstance(error, ManipleError):
        return isinstance(error, HostAway) and not isinstance(error, RunOver)
    return isinstance(error, OSError)
