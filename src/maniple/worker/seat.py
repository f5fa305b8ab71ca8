"""A worker's seat: how it belongs to its run. Alone it belongs to none; `Near` shares memory with its host; `far.Far`
reaches it over the network; `among.Among` has no host, but other workers of one MPI job."""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from maniple.adapters import Adapter
from maniple.center import Segment, Shared
from maniple.center.locks import Patience, held_by
from maniple.center.segment import DEAD, LEFT, LIVE, NEVER
from maniple.changes import Changes
from maniple.contracts import Center
from maniple.errors import HostAway, InvalidArgument, PeerLost
from maniple.place import Place
from maniple.place.launch import is_elastic
from maniple.record import Events, Folder
from maniple.rules import Rule, warm_up
from maniple.sampler import Lease, Lender, Table, Terms
from maniple.sampler.lease import Holder, Verdict

if TYPE_CHECKING:
    from maniple.wire.messages import Joined

_RETURN_S = 30.0  # for worker 0, of whom nothing is heard, before others begin without it
Count = Callable[[], tuple[int, int, bool]]  # steps and samples so far; whether there are none left


class Seat(Protocol):
    """How a worker belongs to its run."""

    @property
    def place(self) -> Place: ...
    @property
    def events(self) -> Events: ...
    @property
    def segment(self) -> Segment | None:
        """The run's shared memory, where it is on this machine."""
        ...

    @property
    def is_over(self) -> bool:
        """The host has ended the run."""
        ...

    @property
    def stop(self) -> str:
        """Why this worker should stop, once the controller has said so."""
        ...

    @property
    def changes(self) -> Changes:
        """Settings that a person has changed while the run goes on; another object when there is something new."""
        ...

    def open(self, name: str, model: Adapter, *, rule: Rule, lock: bool, wire: str) -> tuple[Center, bool]: ...
    def lock(self, timeout_s: float) -> AbstractContextManager[None]: ...
    def lender(self, number: int, terms: Terms) -> Lender: ...
    def ask(self, request: str, info: dict[str, Any], *, timeout_s: float) -> Any: ...
    def absence(self) -> HostAway | None:
        """The error to end with, if the host has been away for too long."""
        ...

    def leave(self, *, is_early: bool, **row: Any) -> None:
        """Say goodbye; `is_early`: before this worker has come to its end."""
        ...


def take_seat(place: Place, count: Count) -> Seat | None:
    """The seat that `place` describes; None for a worker alone."""
    if place.producer_number >= 0:
        raise InvalidArgument(
            "this process was started to produce batches (--feed), and cannot join as a worker. Call maniple.Feed()."
        )
    if place.is_guest and place.segment is None and place.center == "host":
        from maniple.worker.hosted import find_host

        place = find_host(place)
    elif place.is_alone and place.center == "host" and is_elastic():
        from maniple.worker.hosted import left_of_many

        place = left_of_many(place)
    if place.is_near:
        return Near(place, count)
    if place.address is None:
        return _among(place, count) if place.center == "mpi" else None
    from maniple.worker.far import Far  # what it needs takes its time to import, and few workers are far

    return Far(place, count)


def _among(place: Place, count: Count) -> Seat | None:
    if place.launcher not in {"mpirun", "srun", ""}:
        raise InvalidArgument(
            f"MANIPLE_CENTER=mpi needs workers that MPI has started, but these {place.world} were started by "
            f"{place.launcher}. Start them by `mpirun -n {place.world} python SCRIPT`, or unset MANIPLE_CENTER."
        )
    from maniple.worker.among import Among, ask_mpi  # imports MPI, which begins by that

    place = place if place.launcher else ask_mpi(place)
    return Among(place, count) if place.world > 1 else None


def told_place(place: Place, told: "Joined") -> Place:
    """A worker's place with what its host has told when it joined; guests know their number by themselves."""
    return place.told(
        rank=told.rank,
        world=place.world if place.is_guest else told.world,
        seed=told.seed,
        rule=told.rule or None,
        pace=told.pace or None,
        wire=told.wire or None,
        host_deadline_s=told.host_deadline_s,
        limits=replace(place.limits, max_epochs=told.max_epochs),
    )


class Near:
    """A worker on its host's machine. Its control connection is made in the background: nothing waits for it.

    A guest has variables that its launcher wrote, and not the host: it waits to be told the rest. It has a connection
    before it counts as alive, by which the host knows when it dies.
    """

    def __init__(self, place: Place, count: Count) -> None:
        from maniple.center.link import Door
        from maniple.wire.messages import Join
        from maniple.worker.control import Control
        from maniple.worker.questions import Questions

        assert place.segment is not None
        self._segment = self.segment = Segment(place.segment)
        if self._segment.state(place.rank) == LEFT:  # this process has joined, left, and joins again
            self._segment.renew(place.rank)
        elif self._segment.state(place.rank) == LIVE and not place.is_guest:  # the launcher has started it once
            raise InvalidArgument(
                f"process {os.getpid()} cannot join as worker {place.rank}: another process with the same variables "
                "has joined already, and has not left. Of all processes that one script of `maniple run` starts, let "
                "only one call maniple.join(), or start more workers (-n)."
            )
        self.events = Events(Folder(place.run).events(place.rank) if place.run else None, worker=place.rank)
        self._tables: list[Table] = []
        door = Door.of(place)
        guests = place.world if place.is_guest else 0
        who = Join(place.node, os.getpid(), place.rank, place.restarts, is_near=True, guests=guests)
        self._control = Control(door, who, count=count)
        self.place = self._told(place) if place.is_guest else place
        self._holder = Holder(place.rank, self._segment.incarnation(place.rank))
        self._segment.mark(place.rank, LIVE)
        self._control.start()
        holder = (self._holder.rank, self._holder.incarnation)
        self._questions = Questions(door, who=lambda: holder, count=count, is_over=lambda: self.is_over)

    def _told(self, place: Place) -> Place:
        from maniple.worker.hosted import joined

        return told_place(place, joined(self._control, place))

    @property
    def is_over(self) -> bool:
        """The host has ended the run."""
        return self._control.is_over

    @property
    def stop(self) -> str:
        """Why this worker should stop, once the controller has said so."""
        return self._control.stop

    @property
    def changes(self) -> Changes:
        """Settings that a person has changed while the run goes on."""
        return self._control.changes

    def open(self, name: str, model: Adapter, *, rule: Rule, lock: bool, wire: str) -> tuple[Center, bool]:
        """The center `name`, and whether this worker has made it."""
        del wire  # in shared memory nothing travels
        if rule.meets != "center" and self.place.rank:
            self._await_first(name)
        center, is_creator = Shared.open_or_create(
            self._segment, name, model, rank=self.place.rank, lock=lock, note=repr(rule)
        )
        warm_up(list(center.layout.sizes))  # here it is this worker that computes
        return center, is_creator

    def _await_first(self, name: str) -> None:
        """Wait until worker 0 has made the center: where all begin together, they begin with its values.

        One that was silent for a while, on a busy machine say, counts as dead and yet returns.
        """
        patience, seen_s = Patience(self.place.circle_deadline_s), 0.0
        while not (self._segment.path / name).exists() and not self.is_over:
            state = self._segment.state(0)
            seen_s = patience.waited_s if state in {NEVER, LIVE} else seen_s
            if state == LEFT or patience.waited_s - seen_s > _RETURN_S:
                self._do_without_first(name)
                return
            patience.wait(f"worker 0 to make {name}")

    def _do_without_first(self, name: str) -> None:
        if self.place.deterministic:
            raise PeerLost(
                f"worker 0 is gone and has not made {name}, with whose values all begin in a repeatable run "
                "(--deterministic). Look at what it printed, and start the run again."
            )

    def lock(self, timeout_s: float) -> AbstractContextManager[None]:
        """Hold the lock that the workers of this machine share."""
        return held_by(self.place.rank, self._segment.path / "node", timeout_s=timeout_s)

    def lender(self, number: int, terms: Terms) -> "Lender":
        """The leases of this worker's sampler `number`, straight from the table."""
        table = Table.open(self._segment, number, terms)
        self._tables.append(table)
        return _Local(table, self._holder)

    def ask(self, request: str, info: dict[str, Any], *, timeout_s: float) -> Any:
        """The controller's answer."""
        return self._questions.ask(request, info, timeout_s=timeout_s)

    def absence(self) -> None:
        """The host's memory is never away."""

    def leave(self, *, is_early: bool, **row: Any) -> None:
        """Say goodbye."""
        self._segment.mark(self.place.rank, DEAD if is_early and self.place.is_guest else LEFT)
        self.events.write("leave", **row)
        self._control.leave(patience_s=1.0 if self._control.joined else 0.0, is_early=is_early)
        for table in self._tables:
            table.close()
        self._segment.close()
        self.events.close()


class _Local:
    """A table of leases as one worker sees it."""

    def __init__(self, table: Table, holder: Holder) -> None:
        self.take: Callable[..., Lease | Verdict] = functools.partial(table.take, holder)
        self.first_epoch: Callable[[int], int] = functools.partial(table.first_epoch, holder.rank)
        self.terms = table.terms
