"""The barrier of a group in shared memory: arriving at a round, and waiting for the others.

Barriers are numbered. A worker arrives at barrier k by writing k into its row of the member table, and proceeds when
all members of barrier k have arrived (`membership` says who they are), or with a quorum when enough have.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

from maniple.clock import Deadline
from maniple.collectives.call import CollectiveCall, LongWait, PassedOver, compare
from maniple.collectives.member_table import MemberTable
from maniple.errors import CallMismatch, PeerLost, WaitedTooLong
from maniple.memory.locks import AWAKE_S

_NAP_S = 0.01  # of two wake-ups at once one may be lost, so a sleeper looks by itself too
_SPIN_S = 5e-3  # of a wait, if each worker has a core: an idle core comes back slowly, and its caches are cold
_CORES = os.cpu_count() or 1
_CHECK_S = 0.05  # how often a waiting worker checks on the missing members

Finish = Callable[[int], None] | None  # does the rest of a round for a member that died in it


class Barrier:
    """One worker's barriers.

    Attributes:
        barrier: the newest that this worker has arrived at.
        is_in: this worker has joined, and not left.
        waited_s: the time spent waiting for others.
        long_wait: reports waits that take unusually long.
        may_spin: a wait may begin by looking again and again, since this worker has nothing else to do.
    """

    def __init__(self, path: Path, rank: int, deadline_s: float) -> None:
        self.rank, self.table = rank, MemberTable(path)
        self.barrier = 0
        self.is_in = False
        self.waited_s = 0.0
        self.long_wait = LongWait()
        self.may_spin = True
        self._name, self._deadline_s = path.name, deadline_s
        self._is_torn = False  # it gave up in the middle of a round

    def arrive(
        self,
        call: CollectiveCall,
        *,
        slot: int = 0,
        shown_bytes: int = 0,
        quorum: int = 0,
        is_end: bool = False,
        finish: Finish = None,
    ) -> tuple[int, ...]:
        """Arrive at the next barrier. Returns its members when all have arrived, or `quorum` of them.

        Args:
            slot, shown_bytes: what the others need to find this worker's values.
            is_end: it ends a call whose first barrier has compared the calls.
            finish: does the rest of the call for a member that died in it; without it, such a member is removed.

        Raises:
            PassedOver: the others have gone on without this worker.
        """
        table, rank, barrier = self.table, self.rank, self.barrier + 1
        if self._is_torn:
            raise PeerLost(
                f"worker {rank} has given up in the middle of a round of {self._name}; the others continue without it. "
                "It cannot come back in this process: let it end, and start it again (--restarts)."
            )
        if not self.is_in or table.until[rank] <= barrier:
            raise PassedOver
        try:
            table.announce(rank, barrier, call, slot, shown_bytes)
            self.barrier = barrier
            table.arrived[rank] = barrier
            table.futex.ring()
            if quorum or table.missing(barrier):
                is_closed = functools.partial(self._is_closed, barrier, quorum)
                self.wait(is_closed, call.kind, None, finish)
        except BaseException as error:
            self.give_up(error)
            raise
        members = table.members(barrier)
        if rank not in members:
            raise PassedOver
        # The end of a call is not compared: with a quorum, the others may be far ahead when this worker wakes.
        # Calls with partners always are: where all name the same one, they are equal, and no pairs.
        if not is_end and (call.kind == "exchange_pairs" or not table.are_same(members, barrier)):
            compare(rank, {one: table.call(one, barrier) for one in members})
        return tuple(members)

    def give_up(self, error: BaseException) -> None:
        """Note that this worker leaves a round unfinished: the others treat it as dead once it closes or ends.

        Not after errors that leave all workers at the same point.
        """
        self._is_torn = self._is_torn or not isinstance(error, (PassedOver, CallMismatch))

    def wait(self, is_done: Callable[[], bool], phase: str, ranks: range | None = None, finish: Finish = None) -> None:
        """Wait until `is_done`; every 50 ms, look for members that have died or given up.

        Raises:
            WaitedTooLong: after the deadline; the error names the missing workers of `ranks`, or of all members.
        """
        futex, count = self.table.futex, self.table.futex.count
        if is_done():
            return
        begin = checked = now = time.perf_counter()
        deadline = Deadline(self._deadline_s)
        spin_s = _SPIN_S if self.table.header["height"] <= _CORES else AWAKE_S
        if not self.may_spin:
            spin_s = 0.0
        while True:
            futex.wait(count, _NAP_S, awake_s=begin + spin_s - now)
            count = futex.count
            now = time.perf_counter()
            if is_done():
                break
            if now - checked >= _CHECK_S:
                checked = now
                self._check_others(finish)
                is_over = deadline.is_over()
                self.long_wait.check(lambda: self._missing(ranks), deadline.waited_s)
                if is_over:
                    self._raise_waited(phase, self._missing(ranks), deadline.waited_s)
        deadline.is_over()
        self.waited_s += deadline.waited_s
        self.long_wait.end(deadline.waited_s)

    def _check_others(self, finish: Finish) -> None:
        """Called every 50 ms while this worker waits: decide about members that will not arrive."""
        raise NotImplementedError

    def _is_closed(self, barrier: int, quorum: int) -> bool:
        """Whether all members of a barrier have arrived; with a quorum, whether it was closed without the late ones."""
        table = self.table
        if not quorum:
            return not table.missing(barrier)
        if table.header["closed"] < barrier:
            with table.lock():
                if table.header["closed"] < barrier:
                    members, late = table.members(barrier), table.missing(barrier)
                    has_newcomers = any(table.first[rank] == barrier for rank in late)  # they arrive at once, and must
                    if not has_newcomers and len(members) - len(late) >= min(quorum, len(members)):
                        for rank in late:
                            table.until[rank] = barrier
                        table.header["closed"] = barrier
                        table.futex.ring()
        return bool(table.header["closed"] >= barrier)

    def _missing(self, ranks: range | None) -> list[int]:
        """The missing ones of `ranks`, or of the members of the newest barrier."""
        table = self.table
        if ranks is None:
            return table.missing(self.barrier)
        return [rank for rank in ranks if rank != self.rank and (not table.incarnation[rank] or table.is_member(rank))]

    def _raise_waited(self, phase: str, missing: list[int], waited_s: float) -> None:
        names = ", ".join(f"worker {one}" for one in missing) or "others"
        raise WaitedTooLong(
            f"worker {self.rank} has waited {waited_s:.1f} s for {names} in {phase} of {self._name} (limit "
            f"{self._deadline_s:g} s). They are alive but have not arrived: look at the log and the stack of each, and "
            "whether all make the same calls; raise --collectives-deadline if their steps take longer."
        )
