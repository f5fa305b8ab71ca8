"""A feed on its host's machine: both ends use the ring in shared memory themselves."""

import secrets
import time
from pathlib import Path

import numpy as np

from maniple.contracts import Array
from maniple.errors import HostAway
from maniple.feed import roll
from maniple.feed.batch import Batch, read
from maniple.feed.ring import Ring
from maniple.feed.roll import Ticket, Watch

LOOK_S = 0.1  # so often a waiter looks whether the others are alive
_GLANCE_S = 0.5  # and so often one who need not wait


class RunOver(HostAway):
    """The run has ended, and its feeds with it."""


class NearSink:
    """The producer's end."""

    def __init__(self, segment: Path, name: str, *, index: int, count: int, number: int, high_water: int) -> None:
        self._ring = Ring(segment, name)
        ticket = Ticket(secrets.randbits(62) + 1, index, count, high_water, number)
        entered = roll.enrol(self._ring, ticket)
        assert entered is not None  # a new producer has no former connection
        self.index, self.count, _ = entered
        self._number = 0

    def put(self, batch: Batch) -> None:
        """Wait for room, and copy the batch in."""
        ring = self._ring
        slot = self._reserve()
        try:
            batch.write(ring.buffer(slot, batch.size_bytes))
            self._number += 1
            ring.publish(slot, batch.size_bytes, producer=self.index, number=self._number)
        finally:
            ring.give_back()  # nothing, unless something went wrong

    def end(self, failure: str | None) -> None:
        """Say that no more will come."""
        if not self._ring.is_gone:
            roll.end(self._ring, self.index, failure)

    def close(self) -> None:
        """Let go of the ring."""
        self._ring.close()

    def _reserve(self) -> int:
        bell = self._ring.room
        rung = bell.count
        while (slot := self._ring.reserve()) is None:
            if self._ring.is_gone:
                raise RunOver("the run has ended, and nobody takes batches any more. Push while it goes on.")
            bell.wait(rung, LOOK_S)
            rung = bell.count
        return slot


class Outlook:
    """What a worker can see of a feed: the next batch, the end, or the failure of a producer."""

    def __init__(self, ring: Ring) -> None:
        self._ring, self._watch = ring, Watch(ring)
        self._looked = 0.0
        self.is_ended = False

    def next(self) -> int | None:
        """The slot of the next batch, which is this side's own now; None if there is none yet, or ever."""
        if time.monotonic() - self._looked > _GLANCE_S:  # a failure must show, also while batches come
            self._look()
        slot = None if self.is_ended else self._ring.take()
        if slot is None and not self.is_ended:
            self._look()
        return slot

    def _look(self) -> None:
        self._looked = time.monotonic()
        if self._ring.is_gone:
            raise HostAway("the run has ended, and its feeds with it.")
        self.is_ended = self._watch.has_ended()


class NearSource:
    """The worker's end."""

    def __init__(self, segment: Path, name: str) -> None:
        self._ring = Ring(segment, name)
        self._outlook = Outlook(self._ring)

    @property
    def is_ended(self) -> bool:
        """No more will come."""
        return self._outlook.is_ended

    def take(self, patience_s: float) -> list[Array] | None:
        """The next batch, in arrays of one's own; None if none came in time, or ever will."""
        deadline, bell = time.monotonic() + patience_s, self._ring.full
        rung = bell.count
        while (slot := self._outlook.next()) is None:
            left_s = deadline - time.monotonic()
            if self.is_ended or left_s <= 0:
                return None
            bell.wait(rung, min(LOOK_S, left_s))
            rung = bell.count
        return self._copy(slot)

    def close(self) -> None:
        """Let go of the ring."""
        self._ring.close()

    def _copy(self, slot: int) -> list[Array]:
        ring = self._ring
        try:
            size = ring.size(slot)
            own = np.empty(size, np.uint8)
            np.copyto(own, ring.buffer(slot, size))
            ring.release(slot)
        finally:
            ring.give_back()  # nothing, unless something went wrong
        return read(own)
