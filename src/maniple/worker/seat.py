"""A worker's seat: how it belongs to its run. Alone it belongs to none; `Near` shares memory with its host; `Far`
reaches it over the network."""

import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Protocol

from maniple.adapters import Adapter
from maniple.center import ByteLocks, Door, Link, Segment, Shared, Tcp
from maniple.center.segment import LEFT, LIVE
from maniple.contracts import Center
from maniple.errors import HostAway, InvalidArgument
from maniple.place import Place
from maniple.record import Events, Folder
from maniple.wire import Address
from maniple.wire.messages import Welcome
from maniple.worker.control import Control

_JOIN_S = 60.0  # for so long a worker that starts waits for its host


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
    if place.segment is not None and (place.address is None or place.segment.exists()):
        return Near(place)
    return Far(place) if place.address is not None else None


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
        return Shared.open_or_create(self._segment, name, model, rank=self.place.rank, lock=lock, note=note)

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


class Far:
    """A worker that reaches its host over the network."""

    def __init__(self, place: Place) -> None:
        assert place.address is not None
        if not place.token:
            raise InvalidArgument(
                f"no token for the host at {place.address}. Set MANIPLE_TOKEN_FILE to a copy of the file `token` in "
                "the run folder, or MANIPLE_TOKEN to what it says."
            )
        tls = None
        if place.certificate is not None:
            from maniple.wire.tls import worker_context

            tls = worker_context(place.certificate)
        door = Door(Address.parse(place.address), place.token, tls)
        self._control = Control(door, node=place.node, pid=os.getpid(), restarts=place.restarts, deadline_s=_JOIN_S)
        told = self._control.joined
        self.place = place.told(
            rank=told.rank,
            world=told.world,
            seed=told.seed,
            rule=told.rule or None,
            pace=told.pace or None,
            wire=told.wire or None,
            host_deadline_s=told.host_deadline_s,
        )
        self.events = Events(None, sink=self._control.write, worker=told.rank)
        self._link = Link(
            door,
            "data",
            lineage=self._control.lineage,
            may_try=lambda: self._control.is_connected,
            on_restored=self._tell_restored,
        )

    @property
    def is_over(self) -> bool:
        """The host has ended the run."""
        return self._control.is_over

    def open(self, name: str, model: Adapter, *, lock: bool, wire: str, note: str) -> tuple[Center, bool]:
        """The center `name`, and whether this worker has made it."""
        if not lock:
            raise InvalidArgument(
                "lock=False works in shared memory only, and this worker reaches its host by network."
            )
        place = self.place
        center, is_creator = Tcp.open_or_create(
            self._link,
            name,
            model,
            rank=place.rank,
            wire=wire,
            note=note,
            deadline_s=place.host_deadline_s,
            live=lambda: self._control.live,
        )
        return center, is_creator

    def locks(self) -> ByteLocks:
        """The lock that the workers of this machine share."""
        return ByteLocks(Path(tempfile.gettempdir()) / f"maniple-{self._control.lineage}-{os.getuid()}.lock")

    def leave(self, **row: Any) -> None:
        """Send the last rows and say goodbye."""
        self.events.write("leave", **row)
        self._link.drop("this worker has left")
        self._control.leave()

    def absence(self) -> HostAway | None:
        """The error to end with, if the host has been away for too long."""
        if self._control.away_s <= self.place.host_deadline_s:
            return None
        return HostAway(
            f"the host at {self.place.address} has been away for {self._control.away_s:.0f} s (limit "
            f"{self.place.host_deadline_s:g} s): {self._control.reason}. Start it again with "
            "`maniple serve --resume RUN`; raise --host-deadline if it may be away for longer."
        )

    def _tell_restored(self, welcome: Welcome) -> None:
        when = time.strftime("%H:%M:%S", time.localtime(welcome.restored_from))
        lost_s = max(0.0, time.time() - welcome.restored_from)
        self.events.write("restored", snapshot_time=welcome.restored_from)
        warnings.warn(
            f"the host began again from its snapshot of {when}: contributions of the last {lost_s:.0f} s are lost",
            stacklevel=2,
        )
