"""The circle over MPI (mpi4py), for workers that mpirun, mpiexec or srun has started.

Each circle has a communicator of its own. Nothing waits inside MPI, which knows no deadlines: messages are begun, and
looked after. A launcher of MPI usually ends all workers when one is killed. Where it does not, a dead worker of the
same machine is known by its process, and any other by the deadline.
"""

import atexit
import os
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from maniple.center.locks import Patience, start_of, this_process
from maniple.center.window import MPI
from maniple.circle.link import Link, Message
from maniple.circle.rounds import Rounds
from maniple.contracts import Array
from maniple.errors import CallMismatch, InvalidArgument, WaitedTooLong
from maniple.place import CIRCLE_DEADLINE_S, Place

_OPENING = 31013  # tags in the world's communicator, which the script may use too
_AWAKE_S = 2e-3  # a short wait is passed awake
_NAP_S = 1e-4
_LOOK_S = 0.5  # how often those who are waited for are looked at
_END_S = 3.0  # for MPI's own end after a failure, which may wait for the dead for ever
_NOBODY = (0, 0, 0)
_failures: list[str] = []
_met: list[str] = []  # the circles that were opened


class Mpi(Rounds):
    """A circle on MPI (`contracts.Circle`)."""

    name = "mpi"

    @classmethod
    def open(
        cls, place: Place, name: str, *, deadline_s: float = CIRCLE_DEADLINE_S, deterministic: bool = False
    ) -> "Mpi":
        """Meet the other workers.

        Args:
            place: who am I; MPI must agree about the number of workers.
            name: of this circle, the same for all workers, who open their circles in the same order.
            deadline_s: how long a worker waits for the others in a round.
            deterministic: it always is.
        """
        del deterministic
        comm, who = meet(place, name, deadline_s=deadline_s)
        return cls(Link(_Messages(comm, who), deadline_s))


def meet(place: Place, name: str, *, deadline_s: float) -> tuple[Any, dict[int, tuple[int, int, int]]]:
    """Meet all other workers, under a name that is the same for all: a communicator of their own, and who they are."""
    if not _met:
        atexit.register(_end_soon)
    _met.append(name)
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (place.rank, place.world):
        raise InvalidArgument(
            f"MPI says worker {world.rank} of {world.size}, but the launcher says worker {place.rank} of "
            f"{place.world}. Start all by the mpirun or mpiexec of the MPI that mpi4py uses ({_library()})."
        )
    link = Link(_Messages(world, {}), deadline_s)
    mine = np.array([zlib.crc32(name.encode()), *this_process()], np.int64)
    told = {rank: np.empty_like(mine) for rank in link.others}
    messages = [m for rank in link.others for m in link.receive(rank, told[rank], _OPENING)]
    messages += [m for rank in link.others for m in link.send(rank, mine, _OPENING)]
    link.finish(messages, f"open the circle {name!r}")
    if others := [rank for rank, one in told.items() if one[0] != mine[0]]:
        raise CallMismatch(
            f"worker {place.rank} opens the circle {name!r}, worker {others[0]} another one. "
            "All workers open their circles in the same order: look for a call that only some of them reach."
        )
    comm, request = world.Idup()
    _await_dup(request, deadline_s)
    return comm, {rank: (int(one[1]), int(one[2]), int(one[3])) for rank, one in told.items()}


class _Messages:
    """Messages over one communicator; `who` tells the process of each other worker."""

    def __init__(self, comm: Any, who: dict[int, tuple[int, int, int]]) -> None:
        self._comm, self._who = comm, who
        self.rank, self.size = comm.rank, comm.size
        self.awaited: set[int] = set()

    def send(self, peer: int, data: Array, tag: int) -> Message:
        return Message(peer, data, self._comm.Isend(data.view(np.uint8), peer, tag))

    def receive(self, peer: int, data: Array, tag: int) -> Message:
        return Message(peer, data, self._comm.Irecv(data.view(np.uint8), peer, tag))

    def wait(self, messages: Sequence[Message], deadline_s: float) -> tuple[set[int], set[int]]:
        begin = looked = time.monotonic()
        patience, dead = Patience(deadline_s), set[int]()
        while not MPI.Request.Testall([message.work for message in messages]):
            now = time.monotonic()
            if now - looked > _LOOK_S:
                self.awaited = missing = {message.peer for message in messages if not message.work.Test()}
                # What somebody had sent before he died may still come: he is lost at the second look.
                if lost := dead & missing:
                    return lost, set()
                if patience.is_over():
                    return set(), missing
                dead, looked = {rank for rank in missing if self._is_dead(rank)}, now
            if now - begin < _AWAKE_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
        return set(), set()

    def blame(self, lost: set[int], late: set[int]) -> tuple[set[int], set[int]]:
        note_failure("a worker is missing")
        return lost, late

    def close(self) -> None:
        """The communicator is left to MPI's own end: to free it would be one more meeting of all, without deadline."""

    def _is_dead(self, rank: int) -> bool:
        pid, started, node = self._who.get(rank, _NOBODY)
        return node == this_process()[2] and start_of(pid) != started


def note_failure(reason: str) -> None:
    """Something went wrong with other workers, so that they may not come to MPI's own end."""
    _failures.append(reason)


def _end_soon() -> None:
    """After a failure: MPI's own end is a meeting of all, and is not left out. The kernel ends who is stuck there."""
    if _failures or getattr(sys, "last_value", None) is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _END_S)


def _await_dup(request: Any, deadline_s: float) -> None:
    patience = Patience(deadline_s)
    while not request.Test():
        if patience.is_over():
            raise WaitedTooLong(
                f"MPI has made no communicator within {deadline_s:g} s, though all workers are there. "
                "Look whether they open their circles in the same order."
            )
        time.sleep(_NAP_S)


def _library() -> str:
    return MPI.Get_library_version().split("\n")[0].strip("\0 ")
