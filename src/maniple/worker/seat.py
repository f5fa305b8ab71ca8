"""A worker's seat: how it belongs to its run. Alone it belongs to none; `Near` shares memory with its host; `far.Far`
reaches it over the network."""

from typing import Any, Protocol

from maniple.adapters import Adapter
from maniple.center import ByteLocks, Segment, Shared
from maniple.center.segment import LEFT, LIVE
from maniple.contracts import Center
from maniple.errors import HostAway, InvalidArgument
from maniple.place import Place
from maniple.record import Events, Folder
from maniple.rules import warm_up


class Seat(Protocol):
    """How a worker belongs to its run."""

    @property
    def place(self) -> Place: ...
    @property
    def events(self) -> Events: ...
    @property
    def is_over(self) -> bool:
        """The host has ended the run."""
        ...

    def open(self, name: str, model: Adapter, *, lock: bool, wire: str, note: str) -> tuple[Center, bool]: ...
    def locks(self) -> ByteLocks: ...
    def absence(self) -> HostAway | None:
        """The error to end with, if the host has been away for too long."""
        ...

    def leave(self, **row: Any) -> None: ...


def take_seat(place: Place) -> Seat | None:
    """The seat that `place` describes; None for a worker alone."""
    if place.producer_number >= 0:
        raise InvalidArgument(
            "this process was started to produce batches (--feed), and cannot join as a worker. Call maniple.Feed()."
        )
    if place.is_near:
        return Near(place)
    if place.address is None:
        return None
    from maniple.worker.far import Far  # what it needs takes its time to import, and few workers are far

    return Far(place)


class Near:
    """A worker on its host's machine."""

    is_over = False

    def __init__(self, place: Place) -> None:
        assert place.segment is not None
        self.place = place
        self._segment = Segment(place.segment)
        self.events = Events(Folder(place.run).events(place.rank) if place.run else None, worker=place.rank)
        self._segment.mark(place.rank, LIVE)

    def open(self, name: str, model: Adapter, *, lock: bool, wire: str, note: str) -> tuple[Center, bool]:
        """The center `name`, and whether this worker has made it."""
        del wire  # in shared memory nothing travels
        center, is_creator = Shared.open_or_create(
            self._segment, name, model, rank=self.place.rank, lock=lock, note=note
        )
        warm_up(list(center.layout.sizes))  # here it is this worker that computes
        return center, is_creator

    def locks(self) -> ByteLocks:
        """The lock that the workers of this machine share."""
        return ByteLocks(self._segment.path / "node")

    def absence(self) -> None:
        """The host's memory is never away."""

    def leave(self, **row: Any) -> None:
        """Say goodbye."""
        self._segment.mark(self.place.rank, LEFT)
        self.events.write("leave", **row)
        self._segment.close()
        self.events.close()
