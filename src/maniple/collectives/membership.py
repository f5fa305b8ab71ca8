"""Membership of a group in shared memory: which workers take part in each barrier, while some join, leave and die.

All members agree on who they are:

- A worker that leaves writes beforehand from which barrier on it is no member.
- A dead worker (the kernel has released its lock) that has not arrived is removed under the table's lock by one that
  waits for it. A dead process does not arrive later.
- Deadlock avoidance: a worker that is blocked on us in another group is removed like a dead one, since it does not
  arrive here before we arrive there. So workers with unequal numbers of batches do not wait for each other for ever.
- A join request is granted at the end of a call, if all members that arrived at the last barrier had seen it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from maniple.collectives.barrier import Barrier, Finish
from maniple.collectives.call import PassedOver
from maniple.collectives.member_table import FOREVER
from maniple.contracts import ElasticMembership
from maniple.memory.segment import DEAD, LEFT, Segment


class Membership(Barrier):
    """One worker's membership of a group (`contracts.ElasticMembership`).

    Args:
        world: how many workers form the group at the beginning. Others join later.
        calls: the group of the script's own calls, where members of this group may be blocked on this worker. One
            direction only, or both would deadlock.
        on_wait: called every 50 ms while waiting; may raise to give up.
    """

    def __init__(
        self,
        segment: Segment,
        name: str,
        rank: int,
        *,
        world: int,
        deadline_s: float | str,
        calls: ElasticMembership | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(segment.path / name, rank, deadline_s)
        self.incarnation = segment.incarnation(rank)
        self.has_joined = False
        self.on_wait = on_wait
        self._segment, self._world = segment, world
        self._owns_row = False
        self._is_restarted = False  # no member was left to give this worker their state
        self._write_state: Callable[[Path, int], None] = lambda _, __: None
        self._state_for = 0  # the barrier whose newcomers have the state that this worker wrote
        self._calls, self.dependents = calls, list[ElasticMembership]()
        if calls is not None:
            calls.dependents.append(self)

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the next barrier."""
        return tuple(self.table.members(self.barrier + 1))

    @property
    def is_current(self) -> bool:
        """Whether the others have not gone on without this worker."""
        return self.is_in and self.table.until[self.rank] == FOREVER

    def join(self, write_state: Callable[[Path, int], None] | None = None) -> bool:
        """Become a member: with all workers of the beginning, or by a join request. Returns True for the latter.

        Args:
            write_state: writes the state that newcomers begin with to a file, given the number of their first barrier.
        """
        table = self.table
        self.has_joined, self._is_restarted = True, False
        self._write_state = write_state or self._write_state
        self._take_row()
        self.wait(self._is_formed, "the beginning", range(self._world))
        with table.lock():
            if not table.header["is_formed"]:
                for rank in range(self._world):
                    if table.incarnation[rank] and (rank == self.rank or table.is_alive(rank)):
                        table.first[rank] = 1
                table.header["is_formed"] = 1
            if is_late := table.first[self.rank] == 0:
                table.request_join(self.rank)
        table.futex.ring()
        if is_late:
            self.wait(self._is_admitted, "the join request", table.ranks)
            self.barrier = table.first[self.rank] - 1
        self.is_in = True
        return is_late

    def admit(self, members: Sequence[int]) -> None:
        """Grant the join requests that all `members` had seen when they arrived at the last barrier of a call."""
        table, parity = self.table, self.barrier & 1
        if seen := min([table.requests_seen[rank, parity] for rank in members], default=0):
            self._admit(
                lambda: [r for r in self._requesting() if table.join_request[r] <= seen] if self.is_current else []
            )

    def end_round(self, members: Sequence[int]) -> None:
        """End a round after which newcomers may begin: admit them. Those whose first it was have read their state."""
        self.admit(members)
        if self._state_for:
            self._state_path(self._state_for).unlink(missing_ok=True)
            self._state_for = 0

    def leave(self) -> None:
        """Take no part from the next barrier on."""
        if self.is_in:
            self.is_in = False
            if not self._is_torn and self.table.until[self.rank] == FOREVER:
                self.table.until[self.rank] = self.barrier + 1
            self.table.futex.ring()

    def close(self) -> None:
        """Leave for good."""
        self.leave()
        self.table.close()

    def provide_state(self, barrier: int | None = None) -> None:
        """Write the state for newcomers of a barrier (default: the next), unless a member before us is alive to do it.

        Call it before a round, while this worker's state is that after the last one.
        """
        barrier = self.barrier + 1 if barrier is None else barrier
        table = self.table
        if barrier not in [table.first[rank] for rank in table.ranks]:
            return
        members = table.members(barrier)
        for rank in table.members(barrier - 1):
            if rank == self.rank and rank in members:
                self._state_for = barrier
                self._write_state(self._state_path(barrier), barrier)
            if rank in members and (rank == self.rank or table.is_alive(rank)):
                return

    def await_state(self) -> Path | None:
        """Wait for the state of the others, after `join` has returned True; None if no member is left to write it."""
        if self._is_restarted:
            return None
        path = self._state_path(self.barrier + 1)
        self.wait(
            lambda: path.exists() or self._is_alone() or not self.is_current,
            "the join request, for the others' state,",
            self.table.ranks,
        )
        if not path.exists() and not self.is_current:
            raise PassedOver
        return path if path.exists() else None

    def admit_awaited(self) -> None:
        """Deadlock avoidance while this worker waits in `calls`: admit here those for whom it waits there.

        Such a worker does not arrive in `calls` before it is admitted here, and join requests are granted only at the
        end of a call here, which no member makes while it waits in `calls`. Once all living members here are at the
        same barrier and wait in `calls`, admitting is safe: all find the newcomers in their next call.
        """
        calls, table = self._calls, self.table
        if calls is None or not self.is_current or not self.barrier:
            return

        def find_awaited() -> list[int]:
            awaited = [rank for rank in self._requesting() if calls.awaits(rank)]
            living = [rank for rank in self.members if rank == self.rank or table.is_alive(rank)]
            is_safe = all(table.arrived[rank] == self.barrier and calls.has_arrived(rank) for rank in living)
            return awaited if is_safe else []

        self._admit(find_awaited)
        self.provide_state()

    def has_arrived(self, rank: int) -> bool:
        """Whether `rank` has arrived at this worker's newest barrier; before the first one, whether it is here."""
        if self.is_in:
            return self.table.arrived[rank] >= self.barrier
        return rank == self.rank or (self.table.incarnation[rank] > 0 and self.table.is_alive(rank))

    def awaits(self, rank: int) -> bool:
        """Whether this worker, which waits here, is blocked until `rank` has arrived."""
        if self.has_arrived(rank):
            return False
        if self.is_in:
            return rank in self.table.members(self.barrier)
        return not self.table.header["is_formed"] and rank < self._world

    def blocks(self, rank: int) -> bool:
        """Whether `rank` waits here for this worker: to form the group, to arrive, or to admit it."""
        table = self.table
        if not self.is_in:
            return not self._owns_row and not table.header["is_formed"] and table.is_alive(rank)
        if self.rank not in self.members:
            return False
        if table.first[rank]:
            return table.arrived[rank] > self.barrier
        return table.join_request[rank] > 0 and table.is_alive(rank)

    def _take_row(self) -> None:
        """Own this rank's row, once no member needs what the rank's previous process left there and in its slots."""
        table = self.table
        table.add_row(self.rank)
        self.wait(self._is_row_free, "the row that its predecessor still holds", table.ranks)
        if not self._owns_row:
            table.show_life(self.rank)
            self._owns_row = True
            own = f"{self._name}.{self.rank}.{self.incarnation}."
            for path in self._segment.path.glob(f"{self._name}.{self.rank}.*"):
                if not path.name.startswith(own):
                    path.unlink(missing_ok=True)
        table.claim_row(self.rank, self.incarnation)

    def _is_row_free(self) -> bool:
        table, rank = self.table, self.rank
        if table.first[rank] == 0:
            return True
        if table.until[rank] == FOREVER and not self._owns_row:
            self._remove_dead()
        living = [r for r in table.ranks if r != rank and table.is_member(r) and table.is_alive(r)]
        return table.until[rank] < FOREVER and all(table.arrived[r] >= table.until[rank] for r in living)

    def _remove_dead(self) -> None:
        """Remove the dead members if no living one is left to do it."""
        table = self.table
        members = [r for r in table.ranks if table.is_member(r)]
        if members and not any(table.is_alive(r) for r in members if r != self.rank):
            with table.lock():
                barrier = self._next_barrier()
                for rank in members:
                    if not table.is_alive(rank):
                        table.until[rank] = barrier

    def _is_formed(self) -> bool:
        """Whether the group is formed, or each worker of the beginning is here or is known not to come."""
        table, gone = self.table, {LEFT, DEAD}
        return bool(table.header["is_formed"]) or all(
            rank == self.rank or (table.incarnation[rank] and table.is_alive(rank)) or self._segment.state(rank) in gone
            for rank in range(self._world)
        )

    def _is_admitted(self) -> bool:
        """Whether this worker is admitted; if no member is left to admit it, it continues alone."""
        table = self.table
        if not table.first[self.rank]:
            self._remove_dead()
            if not any(table.is_member(r) for r in table.ranks):
                with table.lock():
                    if not any(table.is_member(r) for r in table.ranks):
                        self._is_restarted = True
                        table.first[self.rank] = self._next_barrier()
        return table.first[self.rank] > 0

    def _next_barrier(self) -> int:
        return max(self.table.arrived[rank] for rank in self.table.ranks) + 1

    def _check_others(self, finish: Finish) -> None:
        """Remove missing members that will not arrive, and write the state that missing newcomers wait for."""
        for group in self.dependents:
            group.admit_awaited()
        self.on_wait()
        table, barrier = self.table, self.barrier
        if not barrier or not self.is_in:
            return
        for rank in table.missing(barrier):
            is_dead = not table.is_alive(rank)
            if not is_dead and (self._calls is None or not self._calls.blocks(rank)):
                if table.first[rank] == barrier:
                    self.provide_state(barrier)
                continue
            with table.lock():
                if rank not in table.missing(barrier):  # another has handled it, and its row may have a new owner
                    continue
                if is_dead and finish is not None:
                    finish(rank)
                    table.arrive_for(rank, barrier)
                else:
                    table.until[rank] = barrier
            table.futex.ring()

    def _requesting(self) -> list[int]:
        """The ranks whose join requests are not granted yet."""
        table = self.table
        return [rank for rank in table.ranks if table.join_request[rank] and not table.first[rank]]

    def _admit(self, find: Callable[[], Sequence[int]]) -> None:
        """Make the ranks that `find` gives members from the next barrier on; decided under the table's lock."""
        if find():  # locking only where it may be needed
            with self.table.lock():
                for rank in find():
                    self.table.first[rank] = self.barrier + 1
            self.table.futex.ring()

    def _is_alone(self) -> bool:
        """Whether no member is alive except for those that join now."""
        old = (rank for rank in self.members if self.table.first[rank] <= self.barrier)
        return not any(self.table.is_alive(rank) for rank in old)

    def _state_path(self, barrier: int) -> Path:
        return self._segment.path / f"{self._name}.parcel-{barrier}"
