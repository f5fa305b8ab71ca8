"""The producer's side of a feed: what a script that loads and augments data sees.

feed = maniple.Feed()
for x, y in batches:
    feed.push(x, y)             # waits while enough batches wait already
"""

import atexit
import os
import sys
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Protocol

from maniple.errors import HostAway, InvalidArgument, say
from maniple.feed.batch import Batch
from maniple.feed.batches import DEFAULT
from maniple.feed.near import NearSink, RunOver
from maniple.place import Place, find


class Sink(Protocol):
    """Where batches go. One suite, `tests/contract/test_feed.py`, holds for every implementation."""

    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    def put(self, batch: Batch) -> None: ...
    def end(self, failure: str | None) -> None: ...
    def close(self) -> None: ...


class Feed:
    """This process as a producer: it pushes minibatches to the workers of a run.

    The end of the data is signalled by `close`, by the end of a `with` block, or by the end of the script. An exception
    that ends the script or the block reaches the workers, with its traceback. If the run ends first, `push` ends the
    script, by SystemExit(0).

    Args:
        name: which feed, if the run has several; workers take it by `worker.feed(name)`.
        high_water: how many batches may wait; `push` waits while there are as many.
        address: HOST:PORT of the run's host; by default that of the environment. The token comes from there, too.

    Attributes:
        index, count: which of how many producers this one is, to take its share of the data; of those that the
            launcher has started, if it is one of them.
    """

    def __init__(self, name: str = DEFAULT, *, high_water: int = 8, address: str | None = None) -> None:
        place = find(address=address)
        self._sink = _sink(place, name, high_water)
        self.index, self.count = self._sink.index, self._sink.count
        self._pid = os.getpid()
        self._is_closed = False
        self._is_launched = place.is_near and place.producer_number >= 0
        if self._is_launched:  # the shares are those of the launcher's, whoever else may push
            self.index, self.count = place.producer, place.producers
        self._watch_the_end()

    def push(self, *arrays: Any) -> None:
        """Push one batch: any number of arrays of numbers, of any shapes, or what NumPy can make arrays of."""
        if self._is_closed or os.getpid() != self._pid:
            why = "it is closed" if self._is_closed else "this process was forked from its producer"
            raise InvalidArgument(f"nothing can be pushed: {why}. Push from the process that opened the feed.")
        batch = Batch.of(arrays)
        try:
            self._sink.put(batch)
        except RunOver as error:
            self._leave(error)

    def close(self) -> None:
        """Say that no more will come. It happens by itself when the script ends."""
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
            self._sink.end(failure)
        finally:
            self._sink.close()

    def _leave(self, error: RunOver) -> NoReturn:
        """End as the producers that a launcher has started do: with the run, and well."""
        self._is_closed = True  # there is nobody left to be told
        self._sink.close()
        say(str(error))
        raise SystemExit(0) from error

    def _watch_the_end(self) -> None:
        before = sys.excepthook

        def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            with suppress(HostAway):  # one error is enough
                self._end("".join(traceback.format_exception(kind, error, trace)))

        sys.excepthook = tell
        if not self._is_launched:  # else the launcher tells, by the exit code, which is not known here
            atexit.register(self.close)


def _sink(place: Place, name: str, high_water: int) -> Sink:
    index, count, number = place.producer, place.producers, place.producer_number
    if place.is_near:
        assert place.segment is not None
        return NearSink(place.segment, name, index=index, count=count, number=number, high_water=high_water)
    if place.address is None:
        raise InvalidArgument(
            "there is no run to push to. Start this script by `maniple run --feed SCRIPT ...`, or set MANIPLE_ADDRESS "
            "and MANIPLE_TOKEN_FILE to those of a host that listens."
        )
    from maniple.feed.remote import RemoteSink

    return RemoteSink(place, name, high_water)
