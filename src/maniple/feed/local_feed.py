"""Feeds on the host's machine: the two ends of a ring, and the time that training waits for batches.

feed = maniple.Feed()                   # in a script that loads and augments data
for x, y in batches:
    feed.push(x, y)                     # waits while enough batches are queued

for x, y in worker.feed():              # in the training script
    ...
"""

import atexit
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from maniple.clock import Deadline, clock
from maniple.contracts import Array
from maniple.environment import Environment, read_environment
from maniple.errors import HostAway, InvalidArgument, say
from maniple.feed import producer_registry
from maniple.feed.producer_registry import ProducerMonitor
from maniple.feed.ring import POLL_S, FeedBatch, Ring, RunOver, read
from maniple.record import Events

if TYPE_CHECKING:
    from maniple.feed.remote_feed import RemoteConsumer, RemoteProducer

DEFAULT_FEED = "batches"
_STOP_CHECK_S = 0.5  # how often a waiting worker checks whether it should stop
_PRODUCER_CHECK_S = 0.5  # how often producers are checked while batches keep coming
_ROW_EVERY_S = 0.5  # of the waits: often enough for a live view, and few rows for a fast loop


class Feed:
    """Makes this process a producer that pushes minibatches to the workers of a run.

    `close`, the end of a `with` block, or the end of the script marks the end of the data. An exception that ends the
    script or the block reaches the workers, with its traceback. If the run ends first, `push` ends the script by
    SystemExit(0).

    Args:
        name: which feed, if the run has several; workers read it by `worker.feed(name)`.
        high_water: how many batches may be queued; `push` waits while there are as many.
        address: HOST:PORT of the run's host; by default from the environment, as is the token.

    Attributes:
        index, count: which of how many producers this one is, for its share of the data; a producer that the launcher
            has started is counted among the launcher's only.
    """

    def __init__(self, name: str = DEFAULT_FEED, *, high_water: int = 8, address: str | None = None) -> None:
        environment = read_environment(address=address)
        self._producer = _open_producer(environment, name, high_water)
        self.index, self.count = self._producer.index, self._producer.count
        self._pid = os.getpid()
        self._is_closed = False
        if environment.is_near and environment.producer_number >= 0:
            self.index, self.count = environment.producer, environment.producers
        else:  # of its own producers the launcher records the exit code, which is not known here
            atexit.register(self.close)
        self._print_error, sys.excepthook = sys.excepthook, self._on_error

    def push(self, *arrays: Any) -> None:
        """Push one batch: any number of arrays of numbers, of any shapes, or values that NumPy can convert."""
        if self._is_closed or os.getpid() != self._pid:
            why = "it is closed" if self._is_closed else "this process was forked from its producer"
            raise InvalidArgument(f"nothing can be pushed: {why}. Push from the process that opened the feed.")
        batch = FeedBatch.of(arrays)
        try:
            self._producer.put(batch)
        except RunOver as error:
            self._is_closed = True
            self._producer.close()
            say(str(error))
            raise SystemExit(0) from error

    def close(self) -> None:
        """Mark the end of the data. It happens by itself when the script ends."""
        self._end(None)

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_well = kind is None or (isinstance(error, SystemExit) and not error.code)
        self._end(None if is_well else "".join(traceback.format_exception(kind, error, trace)))

    def _end(self, failure: str | None) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        try:
            self._producer.end(failure)
        finally:
            self._producer.close()

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._print_error(kind, error, trace)
        with suppress(HostAway):  # the first error is the one to show
            self._end("".join(traceback.format_exception(kind, error, trace)))


def _open_producer(environment: Environment, name: str, high_water: int) -> "LocalProducer | RemoteProducer":
    if environment.is_near:
        return LocalProducer(environment, name, high_water)
    if environment.address is None:
        raise InvalidArgument(
            "there is no run to push to. Start this script by `maniple run --feed SCRIPT ...`, or set MANIPLE_ADDRESS "
            "and MANIPLE_TOKEN_FILE to those of a host that listens."
        )
    from maniple.feed.remote_feed import RemoteProducer

    return RemoteProducer(environment, name, high_water)


class LocalProducer:
    """Pushes to a feed in the run's shared memory."""

    def __init__(self, environment: Environment, name: str, high_water: int) -> None:
        assert environment.segment is not None
        self._ring = Ring(environment.segment, name)
        registered = producer_registry.register(
            self._ring,
            secrets.randbits(62) + 1,
            environment.producer,
            environment.producers,
            high_water,
            number=environment.producer_number,
        )
        assert registered is not None  # a new identity has no former connection
        self.index, self.count, self._number = registered

    def put(self, batch: FeedBatch) -> None:
        """Wait for an empty slot, and copy the batch into it."""
        ring = self._ring
        slot = ring.await_change(ring.slot_freed, ring.reserve, self._check_run)
        try:
            batch.write(ring.buffer(slot, batch.size_bytes))
            self._number += 1
            ring.publish(slot, batch.size_bytes, producer=self.index, number=self._number)
        finally:
            ring.give_back()  # after an error only

    def end(self, failure: str | None) -> None:
        """Record the end of the data, or the traceback of a failure."""
        if not self._ring.is_gone:
            producer_registry.end(self._ring, self.index, failure)

    def close(self) -> None:
        """Close the ring."""
        self._ring.close()

    def _check_run(self) -> None:
        if self._ring.is_gone:
            raise RunOver


class Batches:
    """The batches of one feed, each given to exactly one worker, as lists of NumPy arrays that the worker owns.

    The iteration ends when all producers have ended and no batch is left, or when the worker should stop. It raises
    ProducerFailed if a producer has failed.
    """

    def __init__(
        self, name: str, consumer: "LocalConsumer | RemoteConsumer", should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._consumer, self._should_stop = consumer, should_stop
        self._waits = WaitTimes(name)
        self._pid = os.getpid()

    def __iter__(self) -> Iterator[list[Array]]:
        if os.getpid() != self._pid:
            raise InvalidArgument(
                "a feed cannot be read in a process that was forked from its worker, by Prefetch or a DataLoader for "
                "example. Read it in the training loop itself: producers work ahead already."
            )
        try:
            while not self._should_stop():
                begin = time.perf_counter()
                arrays = self._consumer.take(_STOP_CHECK_S)
                self._waits.add(time.perf_counter() - begin, 0 if arrays is None else 1)
                if arrays is not None:
                    yield arrays
                elif self._consumer.is_ended:
                    return
        finally:
            self._waits.flush()

    def close(self) -> None:
        """Close the feed."""
        self._consumer.close()


class Feeds:
    """All feeds that one worker reads."""

    def __init__(self, environment: Environment, events: Events, should_stop: Callable[[], bool]) -> None:
        self._environment, self._should_stop = environment, should_stop
        self._open: dict[str, Batches] = {}
        WaitTimes.events = events

    def open(self, name: str) -> Batches:
        """The batches of feed `name`; the same object for every call."""
        if name not in self._open:
            self._open[name] = Batches(name, open_consumer(self._environment, name), self._should_stop)
        return self._open[name]

    @property
    def is_used(self) -> bool:
        """Whether the worker reads any feed."""
        return bool(self._open)

    def close(self) -> None:
        """Close all feeds."""
        for batches in self._open.values():
            batches.close()


def open_consumer(environment: Environment, name: str) -> "LocalConsumer | RemoteConsumer":
    """Open feed `name` in the run's shared memory, or at its host."""
    if environment.is_near:
        assert environment.segment is not None
        return LocalConsumer(environment.segment, name)
    if environment.address is None:
        raise InvalidArgument(
            f"no producer can push to feed {name!r}: this worker runs alone. Start it by `maniple run --feed "
            "produce.py train.py`, or load in the worker itself, with maniple.Prefetch(batches)."
        )
    from maniple.feed.remote_feed import RemoteConsumer

    return RemoteConsumer(environment, name)


class LocalConsumer:
    """Reads a feed from the run's shared memory."""

    def __init__(self, segment: Path, name: str) -> None:
        self.ring = Ring(segment, name)
        self._monitor = ProducerMonitor(self.ring)
        self._checked = 0.0
        self.is_ended = False  # no more batches will come

    def take(self, timeout_s: float) -> list[Array] | None:
        """The next batch; None if none came in time, or the feed has ended."""
        slot = self.next_slot(timeout_s)
        return None if slot is None else self._copy(slot)

    def next_slot(self, timeout_s: float, on_wait: Callable[[], None] = lambda: None) -> int | None:
        """The slot of the next batch, which this process then holds; None if none came in time, or the feed has ended.

        The producers are checked on every miss, and twice a second otherwise: a failure is raised while batches still
        come. `on_wait` is called before each wait, and may raise.
        """
        ring, deadline = self.ring, Deadline(timeout_s)
        while not self.is_ended:
            count = ring.slot_filled.count
            if clock.monotonic() - self._checked > _PRODUCER_CHECK_S:
                self._check_producers()
            if (slot := ring.take()) is not None:
                return slot
            self._check_producers()
            if self.is_ended or deadline.is_over():
                break
            on_wait()
            ring.slot_filled.wait(count, min(POLL_S, timeout_s))
        return None

    def close(self) -> None:
        """Close the ring."""
        self.ring.close()

    def _check_producers(self) -> None:
        self._checked = clock.monotonic()
        if self.ring.is_gone:
            raise HostAway("the run has ended, and its feeds with it.")
        self.is_ended = self._monitor.has_ended()

    def _copy(self, slot: int) -> list[Array]:
        ring = self.ring
        try:
            own = np.array(ring.buffer(slot, ring.table.size[slot]))
            ring.release(slot)
        finally:
            ring.give_back()  # after an error only
        return read(own)


class WaitTimes:
    """Adds up the waits for one feed, and writes at most two rows `wait` per second."""

    events = Events(None)  # of the worker that has joined: one process is one worker
    total_s = 0.0  # waited for batches in this process, over all feeds and prefetchers

    def __init__(self, feed: str) -> None:
        self._feed = feed
        self._seconds, self._batches = 0.0, 0
        self._written = clock.monotonic()

    def add(self, seconds: float, batches: int = 1) -> None:
        """Add a wait of `seconds`, in which `batches` were received."""
        WaitTimes.total_s += seconds
        self._seconds += seconds
        self._batches += batches
        if clock.monotonic() - self._written >= _ROW_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write a row for what was added since the last one."""
        self._written = clock.monotonic()
        if self._batches or self._seconds:
            self.events.write("wait", feed=self._feed, seconds=self._seconds, batches=self._batches)
            self._seconds, self._batches = 0.0, 0
