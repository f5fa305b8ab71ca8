"""The worker's side of feeds: `worker.feed(name)` gives a `Batches`, which a training loop runs over."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.feed.near import NearSource
from maniple.feed.waits import Waits, report_to
from maniple.place import Place
from maniple.record import Events

DEFAULT = "batches"
_PATIENCE_S = 0.5  # so often a waiting worker looks whether it should stop


class Source(Protocol):
    """Where batches come from. One suite, `tests/contract/test_feed.py`, holds for every implementation."""

    @property
    def is_ended(self) -> bool: ...
    def take(self, patience_s: float) -> list[Array] | None: ...
    def close(self) -> None: ...


class Batches:
    """The batches of one feed, as they come, each to exactly one worker: lists of NumPy arrays of one's own.

    It ends when all producers have ended and nothing is left, or when the worker should stop; after the end it is
    empty. ProducerFailed is raised if a producer has not ended well.
    """

    def __init__(self, name: str, source: Source, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._source, self._should_stop = source, should_stop
        self._waits = Waits(name)
        self._pid = os.getpid()

    def __iter__(self) -> Iterator[list[Array]]:
        if os.getpid() != self._pid:
            raise InvalidArgument(
                "a feed cannot be taken from in a process that was forked from its worker, by Prefetch or a DataLoader "
                "say. Take in the training loop itself: producers are ahead of it already."
            )
        try:
            while not self._should_stop():
                begin = time.perf_counter()
                arrays = self._source.take(_PATIENCE_S)
                self._waits.add(time.perf_counter() - begin, 0 if arrays is None else 1)
                if arrays is not None:
                    yield arrays
                elif self._source.is_ended:
                    return
        finally:
            self._waits.tell()

    def close(self) -> None:
        """Take no more."""
        self._source.close()


class Feeds:
    """All feeds that one worker takes from."""

    def __init__(self, place: Place, events: Events, should_stop: Callable[[], bool]) -> None:
        self._place, self._should_stop = place, should_stop
        report_to(events)
        self._open: dict[str, Batches] = {}

    def open(self, name: str) -> Batches:
        """The batches of feed `name`, the same for every call."""
        if name not in self._open:
            self._open[name] = Batches(name, _source(self._place, name), self._should_stop)
        return self._open[name]

    @property
    def is_used(self) -> bool:
        """The worker takes batches from a feed."""
        return bool(self._open)

    def close(self) -> None:
        """Take no more from any of them."""
        for batches in self._open.values():
            batches.close()


def _source(place: Place, name: str) -> Source:
    if place.is_near:
        assert place.segment is not None
        return NearSource(place.segment, name)
    if place.address is None:
        raise InvalidArgument(
            f"nobody pushes to feed {name!r}: this worker is alone. Start it by `maniple run --feed produce.py "
            "train.py`, or load in the worker itself, with maniple.Prefetch(batches)."
        )
    from maniple.feed.remote import RemoteSource  # what it needs takes its time to import, and few workers are far

    return RemoteSource(place, name)
