"""A seat among equals: the workers of one MPI job hold the center together, in windows, and there is no host.

All join at the beginning and stay to the end. A worker that fails tells the others to stop, and stays a while, since
the center lies in its memory too; then it ends, and the launcher ends the job.
"""

import math
import time
import warnings
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from maniple.adapters import Adapter
from maniple.center.job import BATCHES, FAILED, GONE, LEFT, PRESENT, SAMPLES, SAVED, STATE, Job
from maniple.center.mpi import Mpi
from maniple.center.spread import Spread
from maniple.center.window import MPI
from maniple.changes import Changes
from maniple.circle.mpi import meet, note_failure
from maniple.contracts import Center
from maniple.decisions import Decisions
from maniple.errors import InvalidArgument, say
from maniple.place import Place
from maniple.record import Events, Folder
from maniple.rules import Rule, warm_up
from maniple.sampler import Lender, Terms
from maniple.sampler.cursors import Cursors
from maniple.worker.keeper import Keeper
from maniple.worker.seat import Count

_GRACE_S = 60.0  # for so long a worker that has failed waits for the others to stop
_WHOLE, _BROKEN = 1, 2  # how it was all over


class Among:
    """A worker of an MPI job (`seat.Seat`)."""

    segment = None
    is_over = False
    changes = Changes()  # there is no host that could tell of any

    def __init__(self, place: Place, count: Count) -> None:
        self._count, self._decisions = count, Decisions(place.limits)
        comm, _ = meet(place, "join", deadline_s=place.circle_deadline_s)
        self._job = Job(comm, deadline_s=place.circle_deadline_s)
        self._keeper: Keeper | None = None
        try:
            path = self._job.by_first(lambda: self._begin_run(place))
        except Exception:  # it is everybody's
            self._job.close(is_whole=True)
            raise
        local = {"local_rank": self._job.local_rank, "local_world": self._job.local_size}
        self.place = place.told(run=path, **local)
        self.events = _events(Folder(path), place.rank)
        self._look_at, self._look_at_batch = 0.0, math.inf

    def _begin_run(self, place: Place) -> Any:
        self._keeper = Keeper(self._job, place)
        path = self._keeper.folder.path
        say(
            f"{place.launcher} has started {place.world} workers, who hold the center in MPI windows; run folder {path}"
        )
        return path

    @property
    def stop(self) -> str:
        """Why this worker should stop: a limit on what all have made, or another has failed."""
        now, known = time.time(), self._decisions.known
        if not known.reason and (now >= self._look_at or self._count()[0] >= self._look_at_batch):
            self._tell_count()
            rows = self._job.rows()
            for rank, row in enumerate(rows):
                self._decisions.count((rank, 0), int(row[BATCHES]), int(row[SAMPLES]))
                if row[STATE] >= FAILED:
                    self._decisions.stop(f"worker {rank} has failed")
            self._decisions.mind_limits(now)
            self._look_at = now + self._decisions.within_s(now)
            if most := self._decisions.limits.max_batches:  # half of what is left, if all are equally fast
                left = most - self._decisions.batches
                self._look_at_batch = self._count()[0] + max(1, left // (2 * self._job.size))
        return known.reason

    def open(self, name: str, model: Adapter, *, rule: Rule, lock: bool, wire: str) -> tuple[Center, bool]:
        """The center `name`, and whether this worker has made it."""
        if wire != "float32" and rule.meets == "center":
            raise InvalidArgument(
                f"wire={wire!r} cannot be had in MPI windows, which hold values as they are (float32). Leave it out, "
                "or let worker 0 be the host: unset MANIPLE_CENTER."
            )
        spread = Spread.make(self._job, name, model, repr(rule))
        if self._keeper is not None:
            self._keeper.add(spread)
        warm_up(list(spread.layout.sizes))  # here it is this worker that computes
        return Mpi(spread, rank=self.place.rank, lock=lock), self.place.rank == 0

    def lock(self, timeout_s: float) -> AbstractContextManager[None]:
        """Hold the lock that the workers of this machine share."""
        return self._job.held(timeout_s)

    def lender(self, number: int, terms: Terms) -> Lender:
        """The leases of this worker's sampler `number`."""
        return Cursors(self._job, number, terms)

    def ask(self, request: str, info: dict[str, Any], *, timeout_s: float) -> NoReturn:
        """There is nobody to ask."""
        del info, timeout_s
        raise InvalidArgument(
            f"nobody answers {request!r}: with MANIPLE_CENTER=mpi there is no controller. Look at worker.should_stop "
            "instead, or unset MANIPLE_CENTER, so that worker 0 is the host."
        )

    def absence(self) -> None:
        """There is no host that could be away."""

    def leave(self, *, is_early: bool = False, **row: Any) -> None:
        """Say goodbye, and stay until nobody needs this worker's part of the center any more."""
        del is_early  # what it had taken and not trained on goes to nobody
        has_failed = bool(row.get("failed"))
        self.events.write("leave", **row)
        self.events.close()
        self._tell_count()
        self._job.tell(STATE, FAILED if has_failed else LEFT)
        deadline = time.monotonic() + (_GRACE_S if has_failed else math.inf)
        is_whole = self._wait_as_first(deadline) if self._keeper is not None else self._wait(deadline)
        if not is_whole:
            note_failure("not all workers have come to their end")
        self._job.close(is_whole=is_whole)

    def _wait_as_first(self, deadline: float) -> bool:
        """Wait for all to leave, and save the center; True if all have come to this end."""
        assert self._keeper is not None
        is_whole = False
        try:
            for rows in self._job.looks():
                if PRESENT not in rows[:, STATE] or time.monotonic() > deadline:
                    is_whole = not {PRESENT, GONE} & set(rows[:, STATE].tolist())
                    break
        finally:
            try:
                self._keeper.close()
            finally:
                self._job.tell(SAVED, _WHOLE if is_whole else _BROKEN)
        return is_whole

    def _wait(self, deadline: float) -> bool:
        """Wait until worker 0 has saved the center; True if all have come to this end."""
        for rows in self._job.looks([0]):  # who minds the others, and saves the center even so
            if rows[0, SAVED]:
                return bool(rows[0, SAVED] == _WHOLE)
            if time.monotonic() > deadline:
                self._job.tell(STATE, GONE)
                return False
        raise AssertionError("looks do not end")

    def _tell_count(self) -> None:
        batches, samples, _ = self._count()
        self._job.tell(BATCHES, batches, samples)


def _events(folder: Folder, rank: int) -> Events:
    """The rows of this worker, in worker 0's folder or, on a machine that does not see it, in one like it."""
    try:
        return Events(folder.events(rank), worker=rank)
    except OSError as error:
        warnings.warn(f"worker {rank} writes no events: {error}. Training goes on.", stacklevel=2)
        return Events(None)


def ask_mpi(place: Place) -> Place:
    """The place of a worker whose launcher has left no variables that are known: MPI knows its rank."""
    world = MPI.COMM_WORLD
    return place.told(rank=world.rank, world=world.size, launcher="mpirun") if world.size > 1 else place
