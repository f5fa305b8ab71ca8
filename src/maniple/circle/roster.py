"""The roster: who belongs to a circle in shared memory, and their meetings.

Meetings are numbered. A worker comes to meeting k by writing k into its row, and goes on when all who belong to it have
come. Who belongs to it is the same for everybody:

- who leaves writes, before that, at which meeting it will be no more;
- who has died (the kernel gave its lock back) without coming is dismissed by one who waits for it, under the table's
  lock: a dead process does not come later;
- who waits for us in another circle is dismissed in the same way: it does not come before we come there. So workers
  that have different numbers of batches do not wait for each other for ever;
- who knocks is let in at the end of a call, if all who came to its last meeting had seen the knock.
"""

import functools
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from maniple.bell import AWAKE_S
from maniple.center.locks import Patience
from maniple.circle.absence import LongWait, PassedOver, missed, torn
from maniple.circle.call import Call, compare
from maniple.circle.table import NEVER, Table
from maniple.errors import CallMismatch

_NAP_S = 0.01  # of two rings at once one may be lost: who waits looks by itself, too
_AWAKE_S = 5e-3  # of a wait, if each has a core: one that falls idle comes back slowly, and its caches are cold
_CORES = os.cpu_count() or 1
_LOOK_S = 0.05  # how often it looks after those it waits for


class Roster:
    """One worker's part in a circle.

    Attributes:
        others: those in circles where one may wait for this worker meanwhile; not both ways, else neither were whole.
        on_wait: called again and again while waiting; may raise to give up.
        on_missing: called under the table's lock for one who has died, before it is dismissed; True: it counts as come.
        on_newcomers: makes the newcomers' parcel, if they need one to begin.
        waited_s: the time spent waiting for others.
        long_wait: reports a wait that takes unusually long.
    """

    def __init__(self, path: Path, rank: int, incarnation: int, *, deadline_s: float) -> None:
        self.rank, self.incarnation, self.deadline_s = rank, incarnation, deadline_s
        self.table = Table(path)
        self.meeting = 0  # the newest that this worker has come to
        self.is_in = False
        self.others: list[Roster] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.on_missing: Callable[[int], bool] = lambda _: False
        self.on_newcomers: Callable[[int], None] = lambda _: None
        self.waited_s = 0.0
        self.long_wait = LongWait()
        self.greeted = 0  # the meeting that this worker has made a parcel for
        self._name, self._is_torn = path.name, False
        self._is_claimed = False  # the lock of this worker's row is held
        self.is_refounded = False  # nobody was there to give this worker the others' state

    def members(self, meeting: int | None = None) -> tuple[int, ...]:
        """Who belongs to a meeting; by default to the next one."""
        return tuple(self.table.members(self.meeting + 1 if meeting is None else meeting))

    def enter(self, expected: range, is_absent: Callable[[int], bool]) -> bool:
        """Take part from now on: with all `expected` but those who are absent, or by knocking; True: by knocking."""
        table, self.is_refounded = self.table, False
        self._take_row()
        self.wait(lambda: self._is_settled(expected, is_absent), "the beginning", expected)
        with table.alone():
            if not table.is_founded:
                for rank in expected:
                    if table.holder(rank) >= 0 and (rank == self.rank or table.is_alive(rank)):
                        table.admit(rank, 1)
                table.found()
            if not (is_late := table.first(self.rank) == 0):
                self.is_in = True
            else:
                table.knock(self.rank)
        table.bell.ring()
        if is_late:
            self.wait(self._is_let_in, "the entrance", range(table.height))
            self.meeting = table.first(self.rank) - 1
            self.is_in = True
        return is_late

    def meet(
        self, call: Call, *, slot: int = 0, expected: int = 0, quorum: int = 0, is_end: bool = False
    ) -> tuple[int, ...]:
        """Come to the next meeting; gives those who belong to it when all have come, or `quorum` of them.

        Raises PassedOver if the others have gone on without this worker.
        """
        table, meeting = self.table, self.meeting + 1
        if self._is_torn:
            raise torn(self.rank, self._name)
        if not self.is_in or table.last(self.rank) <= meeting:
            raise PassedOver
        with self.whole():
            table.say(self.rank, meeting, call, slot=slot, expected=expected)
            self.meeting = meeting
            table.come(self.rank, meeting)
            table.bell.ring()
            self.wait(functools.partial(self._is_closed, meeting, quorum), call.kind, None)
        members = self.members(meeting)
        if self.rank not in members:
            raise PassedOver
        # The end of a call is not compared: with a quorum, the others may be far ahead when this worker wakes.
        if not is_end and not table.are_same(members, meeting):
            compare(self.rank, {rank: table.said(rank, meeting) for rank in members})
        return members

    @contextmanager
    def whole(self) -> Generator[None]:
        """What is begun in this block is owed to the others: cut short, this worker is as good as dead to them."""
        try:
            yield
        except (PassedOver, CallMismatch):  # all are at the same point
            raise
        except BaseException:
            self._is_torn = True
            raise

    def let_in(self, members: tuple[int, ...]) -> None:
        """At the end of a call, whose last meeting these came to: those who knocked belong to the next one."""
        table = self.table
        seen = min((table.heard(rank, self.meeting) for rank in members), default=0)
        news = [r for r in range(table.height) if seen and 0 < table.knocked(r) <= seen and table.first(r) == 0]
        if not news:
            return
        with table.alone():
            for rank in news:
                if self.is_current and 0 < table.knocked(rank) <= seen and table.first(rank) == 0:
                    table.admit(rank, self.meeting + 1)
        table.bell.ring()

    def leave(self) -> None:
        """Take no part from now on."""
        if self.is_in:
            self.is_in = False
            if not self._is_torn and self.table.last(self.rank) == NEVER:
                self.table.dismiss(self.rank, self.meeting + 1)
            self.table.bell.ring()

    def close(self) -> None:
        """Leave for good."""
        self.leave()
        self.table.close()

    def is_waiting_for(self, rank: int) -> bool:
        """`rank` has come to this circle, or to a meeting of it, and this worker still has to."""
        table = self.table
        if not self.is_in:
            return not self._is_claimed and not table.is_founded and table.is_alive(rank)
        if self.rank not in table.members(self.meeting + 1):
            return False
        is_knocking = table.first(rank) == 0 and table.knocked(rank) > 0 and table.is_alive(rank)
        return is_knocking or (table.first(rank) > 0 and table.count(rank) > self.meeting)

    @property
    def is_current(self) -> bool:
        """The others have not gone on without this worker."""
        return self.is_in and self.table.last(self.rank) == NEVER

    @property
    def is_alone(self) -> bool:
        """Nobody is alive who belonged to it before those who enter now."""
        old = (rank for rank in self.members() if self.table.first(rank) <= self.meeting)
        return not any(self.table.is_alive(rank) for rank in old)

    def _take_row(self) -> None:
        """Wait until the row is free: until nobody needs what the process before this one has left there."""
        table = self.table
        table.grow(self.rank)
        self.wait(self._is_row_free, "the entrance, which its predecessor still holds,", range(table.height))
        if not self._is_claimed:
            table.live(self.rank)
            self._is_claimed = True
        table.claim(self.rank, self.incarnation)

    def _is_row_free(self) -> bool:
        table = self.table
        if table.first(self.rank) == 0:
            return True
        if table.last(self.rank) == NEVER and not self._is_claimed:
            self._bury_all()
        living = [r for r in range(table.height) if r != self.rank and self._belongs(r) and table.is_alive(r)]
        return table.last(self.rank) < NEVER and all(table.count(r) >= table.last(self.rank) for r in living)

    def _belongs(self, rank: int) -> bool:
        return self.table.first(rank) > 0 and self.table.last(rank) == NEVER

    def _bury_all(self) -> None:
        """If nobody is left who could do it, dismiss the dead."""
        table = self.table
        belonging = [r for r in range(table.height) if self._belongs(r)]
        if belonging and not any(table.is_alive(r) for r in belonging if r != self.rank):
            with table.alone():
                end = max(table.count(r) for r in range(table.height)) + 1
                for rank in belonging:
                    if not table.is_alive(rank):
                        table.dismiss(rank, end)

    def _is_settled(self, expected: range, is_absent: Callable[[int], bool]) -> bool:
        table = self.table
        return table.is_founded or all(
            is_absent(rank) if table.holder(rank) < 0 else table.is_alive(rank) or rank == self.rank or is_absent(rank)
            for rank in expected
        )

    def _is_let_in(self) -> bool:
        """We belong to it; or nobody is left to let us in: then we go on alone."""
        table = self.table
        if table.first(self.rank):
            return True
        self._bury_all()
        if not any(self._belongs(r) for r in range(table.height)):
            with table.alone():
                if not any(self._belongs(r) for r in range(table.height)):
                    self.is_refounded = True
                    table.admit(self.rank, max(table.count(r) for r in range(table.height)) + 1)
        return bool(table.first(self.rank))

    def _is_closed(self, meeting: int, quorum: int) -> bool:
        table = self.table
        if not quorum or table.settled >= meeting:
            return bool(quorum) or not table.missing(meeting)
        with table.alone():
            if table.settled < meeting:
                members = table.members(meeting)
                missing = self.table.missing(meeting)
                late = [rank for rank in missing if table.first(rank) < meeting]  # newcomers come at once, and must
                if len(missing) == len(late) and len(members) - len(late) >= min(quorum, len(members)):
                    for rank in late:
                        table.dismiss(rank, meeting)
                    table.settle(meeting)
                    table.bell.ring()
        return table.settled >= meeting

    def wait(self, is_done: Callable[[], bool], phase: str, whom: range | None) -> None:
        """Until `is_done`; looks after those it waits for, and raises WaitedTooLong past the deadline."""
        bell, count = self.table.bell, self.table.bell.count
        if is_done():
            return
        begin = looked = now = time.perf_counter()
        patience = Patience(self.deadline_s)
        awake_s = _AWAKE_S if self.table.height <= _CORES else AWAKE_S
        while True:
            bell.wait(count, _NAP_S, awake_s=begin + awake_s - now)
            count = bell.count
            now = time.perf_counter()
            if is_done():
                break
            if now - looked >= _LOOK_S:
                looked = now
                self.on_wait()
                self._look_after(self.meeting)
                is_over = patience.is_over()
                self.long_wait.go_on(functools.partial(self._awaited, whom), patience.waited_s)
                if is_over:
                    who = self._awaited(whom)
                    raise missed(self.rank, who, phase, self._name, patience.waited_s, self.deadline_s)
        patience.is_over()
        self.waited_s += patience.waited_s
        self.long_wait.end(patience.waited_s)

    def _look_after(self, meeting: int) -> None:
        """Dismiss those who will not come, and see to it that newcomers have what they need."""
        if not meeting or not self.is_in:
            return
        table = self.table
        for rank in self.table.missing(meeting):
            is_dead = not table.is_alive(rank)
            if not is_dead and not any(other.is_waiting_for(rank) for other in self.others):
                if table.first(rank) == meeting:
                    self.greet(meeting)
                continue
            with table.alone():
                if rank not in self.table.missing(meeting):  # another has seen to it, and it may be a successor now
                    continue
                if is_dead and self.on_missing(rank):
                    table.repeat(rank, meeting)
                    table.come(rank, meeting)
                else:
                    table.dismiss(rank, meeting)
            table.bell.ring()

    def greet(self, meeting: int) -> None:
        """Make the parcel of those whose first meeting this is, if nobody before us among the living will."""
        if not self.table.begins(meeting):
            return
        there = self.table.members(meeting)
        for rank in self.table.members(meeting - 1):
            if rank not in there:
                continue
            if rank == self.rank:
                self.greeted = meeting
                self.on_newcomers(meeting)
                return
            if self.table.is_alive(rank):
                return

    def _awaited(self, whom: range | None) -> list[int]:
        """Those of `whom`, or of the members of the meeting, who have not come yet."""
        if whom is None:
            return self.table.missing(self.meeting)
        return [rank for rank in whom if rank != self.rank and (self.table.holder(rank) < 0 or self._belongs(rank))]
