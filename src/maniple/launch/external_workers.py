"""Workers of another launcher (mpirun, torchrun, srun, Ray): when their host may end, and whether they succeeded."""

import os
import select
from collections.abc import Callable

from maniple.clock import Deadline, clock
from maniple.errors import WorkerFailed
from maniple.host import Host
from maniple.job import ExternalWorkers
from maniple.memory.segment import LEFT, NEVER
from maniple.record import read_events

_RETURN_TIMEOUT_S = 60.0  # for workers that have not joined yet, or may be restarted by their launcher


class ExternalWorkersMonitor:
    """Follows external workers from the host's process, whose output goes to the run folder."""

    def __init__(self, workers: ExternalWorkers, host: Host) -> None:
        self._workers, self._host, self._segment, self._folder = workers, host, host.segment, host.folder
        self._poll = select.poll()
        self._poll.register(workers.tie, select.POLLIN)
        self._without_live = Deadline(_RETURN_TIMEOUT_S)
        os.set_inheritable(workers.tie, False)
        self._segment.external_workers = workers.workers  # an elastic launcher may start more or fewer the next time
        for rank in range(workers.workers):  # all are new processes, also in a resumed run
            host.expect(rank)
        with host.folder.log("host").open("ab") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)

    @property
    def is_over(self) -> bool:
        """Whether all workers have left, or no more will join."""
        if self._segment.live:
            self._without_live = Deadline(_RETURN_TIMEOUT_S)
            return self._is_launcher_gone
        if all(state == LEFT for state in self._states) or self._is_launcher_gone:
            return True
        # Of these launchers only torchrun restarts workers that have died.
        are_gone = self._workers.launcher != "torchrun" and NEVER not in self._states
        return self._without_live.is_over() or are_gone

    def check(self, min_workers: int, *, strict: bool) -> None:
        """Raise WorkerFailed if workers are missing.

        Where the launcher lets the others continue without a killed worker, that is no failure as long as at least
        `min_workers` have left in order.
        """
        missing = [rank for rank, state in enumerate(self._states) if state != LEFT]
        are_enough = len(self._states) - len(missing) >= min_workers
        if missing and are_enough and not strict and not self._is_launcher_gone and not self.exit_code():
            for rank in missing:
                self._host.lose(rank, "did not finish")
        elif missing:
            raise WorkerFailed(
                f"of {self._segment.external_workers} workers of {self._workers.launcher}, {len(missing)} did not "
                f"finish: {', '.join(map(str, missing))}. Look at what they have printed; "
                "MANIPLE_RESUME=RUN continues the run."
            )

    def wait_until_left(self, timeout_s: float, is_hurried: Callable[[], bool]) -> None:
        """Give workers that were stopped together with their host time for their last exchange."""
        deadline = Deadline(timeout_s)
        while self._segment.live and not deadline.is_over() and not is_hurried():
            clock.sleep(0.05)

    def exit_code(self) -> int:
        """The exit code for the error of a worker that failed and was not restarted; 0 if there is none."""
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
        return [self._segment.state(rank) for rank in range(self._segment.external_workers)]
