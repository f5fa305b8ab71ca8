"""Guests: workers that another launcher has started, as their host sees them."""

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from maniple.center.locks import Patience
from maniple.center.segment import LEFT, NEVER
from maniple.errors import WorkerFailed
from maniple.host import Host
from maniple.record import read_events

_PATIENCE_S = 60.0  # for workers that have not come yet, or may be started again


@dataclass(frozen=True)
class Guests:
    """The workers of one launch.

    Attributes:
        launcher: torchrun, srun, mpirun or ray.
        workers: how many it has started.
        tie: a descriptor of the launcher's process.
        program: what they run, and its arguments.
    """

    launcher: str
    workers: int
    tie: int
    program: tuple[str, ...] = ()


class Vigil:
    """Watches over guests: when their host may end, and whether all is well then.

    Nobody looks at this process: what it prints goes to the run folder.
    """

    def __init__(self, guests: Guests, host: Host) -> None:
        self._guests, self._host, self._segment, self._folder = guests, host, host.segment, host.folder
        self._poll = select.poll()
        self._poll.register(guests.tie, select.POLLIN)
        self._alone = Patience(_PATIENCE_S)
        os.set_inheritable(guests.tie, False)
        self._segment.guests = guests.workers  # an elastic launcher may start more or fewer the next time
        for rank in range(guests.workers):  # also those of a run that goes on: they are new
            host.expect(rank)
        with host.folder.log("host").open("ab") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)

    @property
    def is_over(self) -> bool:
        """All have come to their end, or nobody will come any more."""
        if self._segment.live:
            self._alone = Patience(_PATIENCE_S)
            return self._is_launcher_gone
        if all(state == LEFT for state in self._states) or self._is_launcher_gone:
            return True
        # Who has died comes back only where the launcher starts all of them again.
        are_gone = self._guests.launcher != "torchrun" and NEVER not in self._states
        return self._alone.is_over() or are_gone

    def check(self, min_workers: int, *, strict: bool) -> None:
        """Raise WorkerFailed if some have not come to their end.

        Where the launcher lets the others continue without one that was killed, that is no failure, as long as
        `min_workers` have come to their end.
        """
        missing = [rank for rank, state in enumerate(self._states) if state != LEFT]
        are_enough = len(self._states) - len(missing) >= min_workers
        if missing and are_enough and not strict and not self._is_launcher_gone and not self.exit_code():
            for rank in missing:
                self._host.lose(rank, "did not come to its end")
        elif missing:
            who = ", ".join(map(str, missing))
            raise WorkerFailed(
                f"of {self._segment.guests} workers of {self._guests.launcher}, {len(missing)} have not come to their "
                f"end: {who}. Look at what they have printed; MANIPLE_RESUME=RUN goes on."
            )

    def await_leaving(self, timeout_s: float, is_hurried: Callable[[], bool]) -> None:
        """Those who were told to end together with their host make their last exchange before it ends."""
        deadline = time.monotonic() + timeout_s
        while self._segment.live and time.monotonic() < deadline and not is_hurried():
            time.sleep(0.05)

    def exit_code(self) -> int:
        """What the error of a worker that has failed asks for; 0 if none has, that was not started again."""
        codes = [self._failure(rank) for rank, state in enumerate(self._states) if state != LEFT]
        return next(filter(None, codes), 0)

    def _failure(self, rank: int) -> int:
        path = self._folder.events(rank)
        rows = [row for row in read_events(path) if row["event"] in {"join", "failed"}] if path.exists() else []
        return rows[-1].get("exit_code", 0) if rows else 0

    @property
    def _is_launcher_gone(self) -> bool:
        return bool(self._poll.poll(0))

    @property
    def _states(self) -> list[int]:
        return [self._segment.state(rank) for rank in range(self._segment.guests)]
