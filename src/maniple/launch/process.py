"""One worker's process on this machine, over all its restarts."""

import signal
import sys
import time

from maniple.host import Host
from maniple.launch.child import Child
from maniple.launch.death import killed_by
from maniple.launch.job import Job
from maniple.place import Place, environment

_LONGEST_PAUSE_S = 10.0


class Process(Child):
    """A worker that is waiting for its start, running, or done."""

    def __init__(
        self, job: Job, host: Host, rank: int, *, cores: list[int], threads: dict[str, str], reach: Place
    ) -> None:
        super().__init__()
        self.rank = rank
        self.restarts = 0
        self.is_done = False  # it has ended well, or is given up
        self._told = 0.0  # when the launcher told it to end
        self._killed_after_s = 0.0  # for how long it had been told to end when the launcher killed it
        self._has_joined = False
        self._job, self._host, self._cores, self._threads, self._reach = job, host, cores, threads, reach
        self._due = time.monotonic()
        self._early_deaths = 0

    @property
    def is_due(self) -> bool:
        """It should be started now."""
        return not self.is_running and not self.is_done and time.monotonic() >= self._due

    @property
    def place(self) -> Place:
        """Who this worker is."""
        local_world = self._job.workers_per_node
        return self._reach.told(
            rank=self.rank,
            local_rank=self.rank % local_world,
            local_world=local_world,
            device=self._job.device(self.rank % local_world),
            restarts=self.restarts,
        )

    @property
    def command(self) -> list[str]:
        """The script, as this worker runs it."""
        return [sys.executable, *self._job.command, *self._job.arguments(self.rank)]

    def start(self) -> None:
        """Start the script."""
        cores = ",".join(map(str, self._cores)) if self._job.bind else ""
        self._host.expect(self.rank)
        env = self._threads | environment(self.place)
        pid = self.spawn(self.command, env=env, log=self._host.folder.log(self.rank), cores=cores)
        self._host.events.write("started", worker=self.rank, pid=pid)

    def collect(self) -> int:
        """Reap a process that has ended, end what it has started, and give its exit code."""
        exit_code = self.reap()
        had_joined = self._host.bury(
            self.rank, exit_code, killed_by(exit_code), is_told=self._told > 0, killed_after_s=self._killed_after_s
        )
        self._has_joined = self._has_joined or had_joined
        self._early_deaths = 0 if had_joined else self._early_deaths + 1
        self.is_done = exit_code == 0
        return exit_code

    def reap(self) -> int:
        """Let go of what has ended; gives the exit code."""
        return super().collect()

    def stop(self) -> None:
        """Tell it to end."""
        if self.is_running:
            self._told = time.monotonic()
            self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, as it has not done so itself after `stop`."""
        self._killed_after_s = self._killed_after_s or time.monotonic() - self._told
        self.signal(signal.SIGKILL)

    def loss(self, exit_code: int) -> str:
        """Why it is gone through no fault of its script, so that the others may continue; "" if it failed itself."""
        return f"killed by {name}" if (name := killed_by(exit_code)) else ""

    def give_up(self, why: str) -> None:
        """Start it no more, and let the others share what it would have trained on."""
        self.is_done = True
        self._host.lose(self.rank, why, node=self._job.node(self.rank))

    def restart(self) -> None:
        """Plan another start: at once, or after a growing pause if it keeps dying before it joins."""
        self.restarts += 1
        pause_s = min(0.1 * 2**self._early_deaths, _LONGEST_PAUSE_S) if self._early_deaths else 0.0
        self._due = time.monotonic() + pause_s
