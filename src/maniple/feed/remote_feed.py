"""Feeds over TCP: a producer's or a worker's connection to the host, and the host's side, which holds the ring.

Both reconnect after a break. A pushed batch enters the ring exactly once: the producer keeps it until the host has
acknowledged it, and asks after a break how many have arrived. A batch that a worker has not acknowledged is given to
another one, so across a break a batch may be given twice.
"""

import atexit
import hashlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from maniple.clock import Deadline, clock
from maniple.connection.link import Endpoint, Link, check_reply
from maniple.connection.retry import BLOCKED_S, retry_until
from maniple.contracts import Array
from maniple.environment import Environment
from maniple.errors import BadFrame, HostAway, InvalidArgument, ManipleError
from maniple.feed import producer_registry
from maniple.feed.local_feed import LocalConsumer
from maniple.feed.ring import FeedBatch, Ring, RunOver, read
from maniple.wire.frames import NO_TIMEOUT_S, TIMEOUT_S, Stream
from maniple.wire.messages import (
    BatchData,
    BatchReceived,
    FeedOver,
    FetchBatch,
    Message,
    NoBatchYet,
    ProducerEnd,
    ProducerRegistered,
    PushBatch,
    Refusal,
    RegisterProducer,
    SendBatch,
)

T = TypeVar("T")

_CONNECT_S = 60.0  # for the first contact: the host may still be starting
_END_S = 60.0  # to report the end of the data: all batches have arrived, so little is left to lose
_RETRY_S = 0.02  # between attempts to reconnect
_KEEPALIVE_S = 1.0  # how often a waiting client hears from the host
_MAX_TRACE_BYTES = 1 << 19  # of a traceback; the host accepts twice as many
_MAX_FEEDS = 64  # a bound for clients that make up names


class _FeedConnection:
    """A connection to the host that is made again when it breaks."""

    def __init__(self, environment: Environment) -> None:
        self._link = Link(Endpoint.of(environment), "feed")
        self._deadline_s = environment.host_deadline_s
        self._break: Deadline | None = None  # since the connection broke
        retry_until(self._link, lambda: None, _CONNECT_S)

    def close(self) -> None:
        """Close the connection."""
        self._link.drop("closed")

    def _receive(self, stream: Stream) -> tuple[Message, int]:
        """The host's next message, and the size of its payload."""
        message, size = stream.receive()
        self._break = None
        if isinstance(message, Refusal) and message.kind == "RunOver":
            raise RunOver
        return check_reply(message, Message), size

    def _receive_reply(self, stream: Stream, expected: type[T]) -> T:
        """The host's next message without a payload, skipping `NoBatchYet`; BadFrame if it is of another type."""
        while True:
            message, size = self._receive(stream)
            if size:
                raise BadFrame(f"{type(message).__name__} came with a payload, which it never has.")
            if isinstance(message, expected):
                return message
            if not isinstance(message, NoBatchYet):
                raise BadFrame(f"{expected.__name__} was expected from the host, not {type(message).__name__}.")

    def _attempt(self, act: Callable[[], T]) -> T | None:
        """Call `act`; None if the connection breaks or cannot be made. HostAway if that lasts for too long."""
        try:
            return act()
        except BaseException as error:
            self._link.drop(str(error))  # a late reply must not be taken for that of another request
            is_away = isinstance(error, HostAway) and not isinstance(error, RunOver)
            if not is_away and (isinstance(error, ManipleError) or not isinstance(error, OSError)):
                raise
            if self._break is None:
                self._break = Deadline(self._deadline_s, slice_s=BLOCKED_S)
            if self._break.is_over():
                raise HostAway(
                    f"the host has been away for {self._deadline_s:g} s: {error}. Start it again with `maniple serve "
                    "--resume RUN`; raise --host-deadline if it may be away for longer."
                ) from error
            clock.sleep(_RETRY_S)
            return None


class RemoteProducer(_FeedConnection):
    """Pushes to a feed at the host."""

    def __init__(self, environment: Environment, name: str, high_water: int) -> None:
        super().__init__(environment)
        self._registration = RegisterProducer(name, environment.producer, environment.producers, high_water)
        self._registered: Stream | None = None  # the connection on which the host knows this producer
        self._pushed = self._number = 0
        self._retry(self._register)

    def put(self, batch: FeedBatch) -> None:
        """Wait for an empty slot, and send the batch."""
        self._number += 1
        self._retry(lambda: self._push(batch))

    def end(self, failure: str | None) -> None:
        """Report the end of the data, or the traceback of a failure."""
        trace = (failure or "").encode(errors="replace")[-_MAX_TRACE_BYTES:]
        self._deadline_s = min(_END_S, self._deadline_s)

        def report() -> FeedOver:
            stream = self._register()
            stream.send(ProducerEnd(failure is not None), trace)
            return self._receive_reply(stream, FeedOver)

        with suppress(RunOver):  # then it does not matter
            self._retry(report)

    def _retry(self, act: Callable[[], object]) -> None:
        while self._attempt(act) is None:
            pass

    def _register(self) -> Stream:
        stream = self._link.stream()
        if stream is not self._registered:
            stream.send(self._registration)
            reply = self._receive_reply(stream, ProducerRegistered)
            self.index, self.count, self._pushed = reply.index, reply.count, reply.pushed
            self._registered = stream
        return stream

    def _push(self, batch: FeedBatch) -> bool:
        stream = self._register()
        if self._pushed < self._number:  # otherwise it arrived before the break
            stream.send(PushBatch(self._number, batch.size_bytes))
            self._receive_reply(stream, SendBatch)
            stream.send(BatchData(self._number), *batch.parts())
            received = self._receive_reply(stream, BatchReceived)
            if received.number != self._number:
                raise BadFrame(f"batch {self._number} was sent, but the host acknowledged {received.number}.")
            self._pushed = self._number
        return True


class RemoteConsumer(_FeedConnection):
    """Reads a feed at the host."""

    def __init__(self, environment: Environment, name: str) -> None:
        super().__init__(environment)
        self._fetch = FetchBatch(name)
        self.is_ended = False

    def take(self, timeout_s: float) -> list[Array] | None:
        """The next batch; None if none came in time, or the feed has ended."""
        del timeout_s  # the host replies within a second if there is none
        try:
            return None if self.is_ended else self._attempt(self._request)
        except RunOver:
            self.is_ended = True
            return None

    def _request(self) -> list[Array] | None:
        stream = self._link.stream()
        stream.send(self._fetch)
        message, size = self._receive(stream)
        if isinstance(message, BatchData):
            own = np.empty(size, np.uint8)
            stream.receive_into(own)
            arrays = read(own)
            stream.send(BatchReceived(message.number))
            return arrays
        if not isinstance(message, FeedOver | NoBatchYet):
            raise BadFrame(f"a batch was expected from the host, not {type(message).__name__}.")
        self.is_ended = isinstance(message, FeedOver)
        return None


def serve_feed(
    stream: Stream, segment: Path, worker: str, is_over: Callable[[], bool], allow: Callable[[int], None]
) -> None:
    """Serve a connection until it or the run ends. `allow(n)` raises if a batch may not take `n` more bytes."""
    stream.set_timeout(NO_TIMEOUT_S)
    message, size = stream.receive()
    if size or not isinstance(message, RegisterProducer | FetchBatch):
        raise BadFrame(f"RegisterProducer or FetchBatch was expected, not {type(message).__name__}.")
    feeds = {path.name for path in segment.glob("feed-*")}
    if f"feed-{message.feed}" not in feeds and len(feeds) >= _MAX_FEEDS:
        raise InvalidArgument(f"feed {message.feed!r} exceeds the limit of {_MAX_FEEDS} feeds. Use one that exists.")
    with suppress(_RunEnded):
        if isinstance(message, RegisterProducer):
            with closing(Ring(segment, message.feed)) as ring:
                _ProducerService(stream, ring, is_over, allow).serve(message, worker)
        else:
            with closing(LocalConsumer(segment, message.feed)) as consumer:
                _serve_consumer(stream, consumer, message, is_over)


class _RunEnded(Exception):
    """The run has ended, and the client was notified."""


def _check_run(stream: Stream, is_over: Callable[[], bool]) -> None:
    if is_over():
        stream.send(_RUN_OVER)
        stream.linger()
        raise _RunEnded


_RUN_OVER = Refusal("RunOver", "the run has ended")


class _ProducerService:
    def __init__(self, stream: Stream, ring: Ring, is_over: Callable[[], bool], allow: Callable[[int], None]) -> None:
        self._stream, self._ring, self._is_over, self._allow = stream, ring, is_over, allow
        self._sent = clock.monotonic()

    def serve(self, request: RegisterProducer, worker: str) -> None:
        """Register the producer, and receive batches until it ends."""
        ring = self._ring
        identity = (int.from_bytes(hashlib.blake2b(worker.encode(), digest_size=8).digest(), "little") >> 2) + 1
        place = request.index, request.count, request.high_water
        registered = ring.await_change(
            ring.slot_freed,
            lambda: producer_registry.register(ring, identity, *place, is_remote=True),
            self._on_wait,
        )
        self._index, _, self._pushed = registered
        self._stream.send(ProducerRegistered(*registered))
        _open_producers.add(self)
        try:
            while self._serve_message():
                pass
        finally:
            _open_producers.discard(self)

    def notify_end(self) -> None:
        """Leave a notification for a producer that computes its next batch: it reads it when it pushes."""
        if self._is_over():
            with suppress(OSError):
                self._stream.set_timeout(1.0)
                self._stream.send(_RUN_OVER)

    def _on_wait(self) -> None:
        _check_run(self._stream, self._is_over)
        if clock.monotonic() - self._sent > _KEEPALIVE_S:
            self._stream.send(NoBatchYet())
            self._sent = clock.monotonic()

    def _serve_message(self) -> bool:
        """Handle one message; False after the last."""
        message, size = self._stream.receive()
        self._sent = clock.monotonic()
        if isinstance(message, PushBatch) and not size:
            self._receive_batch(message)
            return True
        if not isinstance(message, ProducerEnd):
            raise BadFrame(f"PushBatch or ProducerEnd was expected, not {type(message).__name__}.")
        text = self._stream.receive_bytes(size, at_most=2 * _MAX_TRACE_BYTES).decode(errors="replace")
        producer_registry.end(self._ring, self._index, text if message.is_failure else None)
        self._stream.send(FeedOver())
        return False

    def _receive_batch(self, push: PushBatch) -> None:
        ring, stream = self._ring, self._stream
        if push.number <= self._pushed or push.size_bytes <= 0:
            raise BadFrame(f"batch {push.number} of {push.size_bytes} bytes came, after {self._pushed} others.")
        slot = ring.await_change(ring.slot_freed, ring.reserve, self._on_wait)
        try:
            self._allow(max(0, push.size_bytes - ring.reserved_bytes(slot)))
            buffer = ring.buffer(slot, push.size_bytes)
            stream.set_timeout(TIMEOUT_S)
            stream.send(SendBatch())
            message, size = stream.receive()
            if message != BatchData(push.number) or size != push.size_bytes:
                raise BadFrame(
                    f"batch {push.number} of {push.size_bytes} bytes was announced, and something else came."
                )
            stream.receive_into(buffer)
            read(buffer)  # raises BadFrame if it is not a batch
            ring.publish(slot, size, producer=self._index, number=push.number)
            self._pushed = push.number
            stream.send(BatchReceived(push.number))
            stream.set_timeout(NO_TIMEOUT_S)
        finally:
            ring.give_back()  # after an error only


_open_producers: set[_ProducerService] = set()


@atexit.register
def _notify_producers() -> None:
    # The server's process ends with the run, without waiting for producers that are busy computing.
    for producer in list(_open_producers):
        producer.notify_end()


def _serve_consumer(stream: Stream, consumer: LocalConsumer, fetch: FetchBatch, is_over: Callable[[], bool]) -> None:
    """Reply to each request with a batch, or that there is none."""
    ring = consumer.ring
    while True:
        slot = consumer.next_slot(_KEEPALIVE_S, lambda: _check_run(stream, is_over))
        if slot is None:
            stream.send(FeedOver() if consumer.is_ended else NoBatchYet())
        else:
            try:
                number = ring.table.sequence[slot]
                stream.set_timeout(TIMEOUT_S)
                stream.send(BatchData(number), ring.buffer(slot, ring.table.size[slot]))
                if stream.receive_message() != BatchReceived(number):
                    raise BadFrame(f"batch {number} was sent, and something else was acknowledged.")
                ring.release(slot)
            finally:
                ring.give_back()  # a batch that was not acknowledged is given to another worker
            stream.set_timeout(NO_TIMEOUT_S)
        message, size = stream.receive()
        if message != fetch or size:
            raise BadFrame(f"{fetch} was expected, not {type(message).__name__}.")
