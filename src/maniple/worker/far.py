"""The seat of a worker that reaches its host over the network."""

import os
import tempfile
import time
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from maniple.adapters import Adapter
from maniple.center.link import Door, Link
from maniple.center.locks import Patience, held_by
from maniple.center.remote import find_layout
from maniple.center.tcp import Tcp, insist
from maniple.changes import Changes
from maniple.contracts import Center
from maniple.errors import HostAway, InvalidArgument
from maniple.place import Place
from maniple.record import Events
from maniple.rules import Rule
from maniple.sampler import Terms
from maniple.sampler.remote import Borrower
from maniple.wire.messages import Join, Welcome
from maniple.worker.control import Control
from maniple.worker.questions import Questions
from maniple.worker.seat import Count, told_place

_ASK_AGAIN_S = 0.05  # for what is not there yet


class Far:
    """A worker that reaches its host over the network."""

    def __init__(self, place: Place, count: Count) -> None:
        self._door = door = Door.of(place)
        self._count = count
        # A launcher that has started it from another machine tells its segment, which is not here, and a rank. A queue
        # tells a rank too, but no launcher waits for it.
        is_expected = place.segment is not None
        rank = place.rank if is_expected or place.is_queued else -1
        guests = place.world if place.is_guest and is_expected else 0
        who = Join(place.node, os.getpid(), rank, place.restarts, is_expected=is_expected, guests=guests)
        self._control = Control(door, who, count=count)
        self.place = told_place(place, told := self._control.join(place.join_deadline_s))
        self._lenders: list[Questions] = []
        self._questions = self._new_questions()
        self.events = Events(None, sink=self._control.write, worker=told.rank)
        self._link = Link(
            door,
            "data",
            lineage=self._control.lineage,
            may_try=lambda: self._control.is_connected,
            on_restored=self._tell_restored,
        )
        self._control.on_away = self._link.abort  # an exchange under way need not find out by itself
        self._control.start()

    segment = None

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
        if not lock:
            raise InvalidArgument(
                "lock=False works in shared memory only, and this worker reaches its host by network."
            )
        place = self.place
        if rule.meets != "center" and place.rank:
            self._await_first(name)
        center, is_creator = Tcp.open_or_create(
            self._link,
            name,
            model,
            rank=place.rank,
            wire=wire,
            note=repr(rule),
            deadline_s=place.host_deadline_s,
            live=lambda: self._control.live,
        )
        return center, is_creator

    def _await_first(self, name: str) -> None:
        """Wait until worker 0 has made the center: where all begin together, they begin with its values."""
        patience = Patience(self.place.circle_deadline_s)
        while not self.is_over:
            try:
                insist(self._link, lambda: find_layout(self._link, name), self.place.host_deadline_s)
                return
            except InvalidArgument:
                patience.wait(f"worker 0 to make {name}")
                time.sleep(_ASK_AGAIN_S)

    def lock(self, timeout_s: float) -> AbstractContextManager[None]:
        """Hold the lock that the workers of this machine share."""
        path = Path(tempfile.gettempdir()) / f"maniple-{self._control.lineage}-{os.getuid()}.lock"
        return held_by(self.place.rank, path, timeout_s=timeout_s)

    def lender(self, number: int, terms: Terms) -> Borrower:
        """The leases of this worker's sampler `number`, by questions over a connection of their own."""
        questions = self._new_questions()
        self._lenders.append(questions)
        return Borrower(questions.ask, number, terms, on_away=self._mind_absence)

    def ask(self, request: str, info: dict[str, Any], *, timeout_s: float) -> Any:
        """The controller's answer."""
        return self._questions.ask(request, info, timeout_s=timeout_s)

    def _new_questions(self) -> Questions:
        return Questions(self._door, who=self._who, count=self._count, is_over=lambda: self.is_over)

    def _who(self) -> tuple[int, int]:
        joined = self._control.joined
        assert joined is not None
        return joined.rank, joined.incarnation

    def _mind_absence(self) -> None:
        if (error := self.absence()) is not None:
            raise error

    def leave(self, *, is_early: bool, **row: Any) -> None:
        """Send the last rows and say goodbye."""
        self.events.write("leave", **row)
        self._link.drop("this worker has left")
        for questions in self._lenders:
            questions.close()
        # A worker that ends because its host is gone has waited for it long enough.
        patience = {} if self._control.is_connected else {"patience_s": 1.0}
        self._control.leave(**patience, is_early=is_early)

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
        self.events.write("restored", snapshot_time=welcome.restored_from)
        if not welcome.restored_from:  # it had ended in order, and has all
            return
        when = time.strftime("%H:%M:%S", time.localtime(welcome.restored_from))
        lost_s = max(0.0, time.time() - welcome.restored_from)
        warnings.warn(
            f"the host began again from its snapshot of {when}: contributions of the last {lost_s:.0f} s are lost",
            stacklevel=2,
        )
