"""Collectives over MPI (mpi4py), for workers that mpirun, mpiexec or srun has started.

Each group has its own communicator. Nothing blocks inside of MPI, which has no deadlines: messages are begun and
polled. Most launchers of MPI end all workers when one is killed. Where they do not, a dead worker of the same machine
is known by its process, and any other by the deadline.
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

from maniple.clock import Deadline
from maniple.collectives.deadline import start_deadline_s
from maniple.collectives.peer_to_peer import PeerLink, PeerMessage, PeerToPeer
from maniple.contracts import Array
from maniple.environment import Environment
from maniple.errors import CallMismatch, InvalidArgument, WaitedTooLong
from maniple.memory.locks import start_of, this_process
from maniple.settings.options import COLLECTIVES_DEADLINE_S

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise InvalidArgument(
        f"mpi4py and an MPI library are required here, and they cannot be used: {error}. "
        "Install the extra: pip install 'maniple[mpi]', and an MPI such as mpich."
    ) from None

_OPENING_TAG = 31013  # in the world's communicator, which the script may use too
_SPIN_S = 2e-3  # short waits spin
_NAP_S = 1e-4
_CHECK_S = 0.5  # how often a waiting worker checks on the others
_FINALIZE_S = 3.0  # for MPI_Finalize after a failure, which may wait for the dead for ever
_NOBODY = (0, 0, 0)
_failures: list[str] = []
_groups: list[str] = []


class MpiCollectives(PeerToPeer):
    """A group on MPI."""

    name = "mpi"

    @classmethod
    def open(
        cls, environment: Environment, name: str, *, deadline_s: float | str = COLLECTIVES_DEADLINE_S
    ) -> "MpiCollectives":
        """Connect to the other workers. Sums are deterministic.

        Args:
            environment: this worker's rank; MPI must agree about the number of workers.
            name: of this group, the same for all workers, who open their groups in the same order.
            deadline_s: how long a worker waits for the others in a call.
        """
        if not _groups:
            atexit.register(_limit_finalize)
        _groups.append(name)
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (environment.rank, environment.world):
            library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
            raise InvalidArgument(
                f"MPI says worker {world.rank} of {world.size}, but the launcher says worker {environment.rank} of "
                f"{environment.world}. Start all by the mpirun or mpiexec of the MPI that mpi4py uses ({library})."
            )
        processes = _exchange_processes(_MpiLink(world, {}, deadline_s), name)
        comm, request = world.Idup()
        limit_s = start_deadline_s(deadline_s)
        deadline = Deadline(limit_s)
        while not request.Test():
            if deadline.is_over():
                raise WaitedTooLong(
                    f"MPI has made no communicator within {limit_s:g} s, though all workers are there. "
                    "Look whether they open their groups in the same order."
                )
            time.sleep(_NAP_S)
        return cls(_MpiLink(comm, processes, deadline_s))


def _exchange_processes(link: PeerLink, name: str) -> dict[int, tuple[int, int, int]]:
    """Compare the name of the group with the others; gives their processes (`this_process`), by rank."""
    mine = np.array([zlib.crc32(name.encode()), *this_process()], np.int64)
    found = {rank: np.empty_like(mine) for rank in link.others}
    messages = link.post(_OPENING_TAG, receive=found.items(), send=[(rank, mine) for rank in link.others])
    link.finish(messages, f"the opening of {name!r}")
    if others := [rank for rank, one in found.items() if one[0] != mine[0]]:
        raise CallMismatch(
            f"worker {link.rank} opens the group {name!r}, worker {others[0]} another one. "
            "All workers open their groups in the same order: look for a call that only some of them reach."
        )
    return {rank: (int(one[1]), int(one[2]), int(one[3])) for rank, one in found.items()}


class _MpiLink(PeerLink):
    """Messages over one communicator.

    `close` leaves it to MPI_Finalize: freeing it is collective, and has no deadline.
    """

    def __init__(self, comm: Any, processes: dict[int, tuple[int, int, int]], deadline_s: float | str) -> None:
        super().__init__(comm.rank, comm.size, deadline_s)
        self._comm, self._processes = comm, processes

    def begin_send(self, peer: int, data: Array, tag: int) -> Any:
        return self._comm.Isend(data.view(np.uint8), peer, tag)

    def begin_receive(self, peer: int, data: Array, tag: int) -> Any:
        return self._comm.Irecv(data.view(np.uint8), peer, tag)

    def wait(self, messages: Sequence[PeerMessage]) -> tuple[set[int], set[int]]:
        begin = checked = time.monotonic()
        deadline, dead = Deadline(self.deadline.limit_s), set[int]()
        while not MPI.Request.Testall([message.work for message in messages]):
            now = time.monotonic()
            if now - checked > _CHECK_S:
                self._look_after_signals()
                self.awaited = missing = {message.peer for message in messages if not message.work.Test()}
                # A message that was sent before its sender died may still arrive: it is lost at the second check.
                if lost := dead & missing:
                    return lost, set()
                if deadline.is_over():
                    return set(), missing
                dead, checked = {rank for rank in missing if self._is_dead(rank)}, now
            if now - begin < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
        return set(), set()

    def _look_after_signals(self) -> None:
        try:
            self.on_wait()
        except SystemExit:
            _failures.append("this worker was told to leave")
            raise

    def blame(self, lost: set[int], late: set[int]) -> tuple[set[int], set[int]]:
        _failures.append("a worker is missing")
        return lost, late

    def _is_dead(self, rank: int) -> bool:
        pid, started, machine = self._processes.get(rank, _NOBODY)
        return machine == this_process()[2] and start_of(pid) != started


def _limit_finalize() -> None:
    """After a failure: MPI_Finalize is collective and cannot be skipped; SIGALRM kills a process stuck in it."""
    if _failures or getattr(sys, "last_value", None) is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _FINALIZE_S)
