"""The host's half of a feed over TCP: one producer's or one worker's connection, served from the ring."""

import atexit
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from maniple.bell import Bell
from maniple.errors import BadFrame, InvalidArgument
from maniple.feed import roll
from maniple.feed.batch import check
from maniple.feed.near import LOOK_S, Outlook
from maniple.feed.ring import SEQUENCE, Ring
from maniple.feed.roll import Ticket
from maniple.wire.batches import Batch, End, Fetch, Got, Later, Over, Push, Room, Supplied, Supply
from maniple.wire.messages import Refusal
from maniple.wire.stream import NEVER_S, TIMEOUT_S, Stream

_SAY_S = 1.0  # so often the other side hears that the host is alive
_MAX_TRACE_BYTES = 1 << 20
_MAX_FEEDS = 64

_intakes: "set[_Intake]" = set()  # those that are open


def serve_feed(
    stream: Stream, segment: Path, worker: str, is_over: Callable[[], bool], allow: Callable[[int], None]
) -> None:
    """Serve a connection until it ends, or the run does. `allow` raises if a batch may not take so many bytes more."""
    stream.set_timeout(NEVER_S)
    message, size = stream.receive()
    if size or not isinstance(message, Supply | Fetch):
        raise BadFrame("a producer or a worker of a feed was expected.")
    feeds = {path.name for path in segment.glob("feed-*")}
    if f"feed-{message.feed}" not in feeds and len(feeds) >= _MAX_FEEDS:
        raise InvalidArgument(
            f"feed {message.feed!r} cannot be opened: there are {_MAX_FEEDS} already. Use one of them."
        )
    ring = Ring(segment, message.feed)
    try:
        if isinstance(message, Supply):
            _Intake(stream, ring, is_over, allow).serve(message, worker)
        else:
            _Outlet(stream, ring, is_over).serve(message)
    finally:
        ring.close()


class _RunOver(Exception):
    """The run has ended, and the other side was told so."""


class _Side:
    def __init__(self, stream: Stream, ring: Ring, is_over: Callable[[], bool]) -> None:
        self._stream, self._ring, self._is_over = stream, ring, is_over
        self._said = time.monotonic()

    def say_over(self) -> None:
        """Tell the other side that the run has ended."""
        self._stream.send(Refusal("RunOver", "the run has ended"))

    def _pause(self, bell: Bell, rung: int) -> int:
        """Wait a little, and say now and then that it goes on; gives the bell's count."""
        if self._is_over():
            self.say_over()
            self._stream.linger()
            raise _RunOver
        if time.monotonic() - self._said > _SAY_S:
            self._stream.send(Later())
            self._said = time.monotonic()
        bell.wait(rung, LOOK_S)
        return bell.count


class _Intake(_Side):
    """A producer's connection."""

    def __init__(self, stream: Stream, ring: Ring, is_over: Callable[[], bool], allow: Callable[[int], None]) -> None:
        super().__init__(stream, ring, is_over)
        self._allow = allow

    def serve(self, supply: Supply, worker: str) -> None:
        """Enter the producer, and take what it pushes until it ends."""
        who = int.from_bytes(hashlib.blake2b(worker.encode(), digest_size=8).digest(), "little") >> 2
        ticket = Ticket(who + 1, supply.index, supply.count, supply.high_water, is_far=True)
        try:
            while (entered := roll.enrol(self._ring, ticket)) is None:
                self._pause(self._ring.room, self._ring.room.count)
            self._index, _, self._pushed = entered
            self._stream.send(Supplied(*entered))
            _intakes.add(self)
            while self._hear():
                pass
        except _RunOver:
            return
        finally:
            _intakes.discard(self)

    def part(self) -> None:
        """Leave a word for a producer that computes its next batch: it reads it when it comes to push."""
        if self._is_over():
            with suppress(OSError):
                self._stream.set_timeout(1.0)
                self.say_over()

    def _hear(self) -> bool:
        """One thing that the producer says; False after its last word."""
        message, size = self._stream.receive()
        self._said = time.monotonic()
        if isinstance(message, Push) and not size:
            self._take_in(message)
            return True
        if not isinstance(message, End):
            raise BadFrame("a producer that pushes or ends was expected.")
        text = self._stream.receive_bytes(size, at_most=_MAX_TRACE_BYTES).decode(errors="replace")
        roll.end(self._ring, self._index, text if message.is_failure else None)
        self._stream.send(Over())
        return False

    def _take_in(self, push: Push) -> None:
        ring, stream = self._ring, self._stream
        if push.number <= self._pushed or push.size_bytes <= 0:
            raise BadFrame(f"batch {push.number} of {push.size_bytes} bytes came, after {self._pushed} others.")
        rung = ring.room.count
        while (slot := ring.reserve()) is None:
            rung = self._pause(ring.room, rung)
        try:
            self._allow(max(0, push.size_bytes - ring.room_bytes(slot)))
            buffer = ring.buffer(slot, push.size_bytes)
            stream.set_timeout(TIMEOUT_S)
            stream.send(Room())
            message, size = stream.receive()
            if message != Batch(push.number) or size != push.size_bytes:
                raise BadFrame(f"batch {push.number} was announced, and something else came.")
            stream.receive_into(buffer)
            check(buffer)
            ring.publish(slot, size, producer=self._index, number=push.number)
            self._pushed = push.number
            stream.send(Got(push.number))
            stream.set_timeout(NEVER_S)
        finally:
            ring.give_back()  # nothing, unless something went wrong


class _Outlet(_Side):
    """A worker's connection."""

    def serve(self, fetch: Fetch) -> None:
        """Give one batch for each question, or say that there is none."""
        outlook = Outlook(self._ring)
        try:
            while True:
                self._answer(outlook)
                self._stream.set_timeout(NEVER_S)
                message, size = self._stream.receive()
                if message != fetch or size:
                    raise BadFrame("a worker that asks for the next batch of its feed was expected.")
        except _RunOver:
            return

    def _answer(self, outlook: Outlook) -> None:
        deadline = time.monotonic() + _SAY_S
        self._said = deadline  # one answer to a question: nothing is said meanwhile
        rung = self._ring.full.count
        while (slot := outlook.next()) is None:
            if outlook.is_ended or time.monotonic() > deadline:
                self._stream.send(Over() if outlook.is_ended else Later())
                return
            rung = self._pause(self._ring.full, rung)
        try:
            self._hand_over(slot)
        finally:
            self._ring.give_back()  # if the worker has not got it, another one will

    def _hand_over(self, slot: int) -> None:
        ring, stream = self._ring, self._stream
        number = ring.words[SEQUENCE + slot]
        stream.set_timeout(TIMEOUT_S)
        stream.send(Batch(number), ring.buffer(slot, ring.size(slot)))
        if stream.receive_message() != Got(number):
            raise BadFrame(f"batch {number} was sent, and something else was got.")
        ring.release(slot)


@atexit.register
def _part() -> None:
    # When the server's process ends with the run, without waiting for producers that are busy elsewhere.
    for intake in list(_intakes):
        intake.part()
