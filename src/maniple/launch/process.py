"""One worker's process on this machine, over all its restarts."""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

from maniple.host import Host
from maniple.launch import start
from maniple.launch.job import Job
from maniple.place import Place, environment

_LONGEST_PAUSE_S = 10.0


class Process:
    """A worker that is waiting for its start, running, or done."""

    def __init__(self, job: Job, host: Host, rank: int, cores: list[int], threads: dict[str, str]) -> None:
        self.rank = rank
        self.restarts = 0
        self.is_done = False  # it has ended well
        self.descriptor = -1  # readable once the process has ended; -1 while there is none
        self._job, self._host, self._cores, self._threads = job, host, cores, threads
        self._process: subprocess.Popen[bytes] | None = None
        self._due = time.monotonic()
        self._early_deaths = 0

    @property
    def is_due(self) -> bool:
        """It should be started now."""
        return self._process is None and not self.is_done and time.monotonic() >= self._due

    @property
    def is_running(self) -> bool:
        """It has been started and not collected yet."""
        return self._process is not None

    def start(self) -> None:
        """Start the script."""
        place = Place(
            rank=self.rank,
            world=self._job.workers,
            local_rank=self.rank,
            local_world=self._job.workers,
            run=self._host.folder.path,
            segment=self._host.segment.path,
            rule=self._job.rule,
            pace=self._job.pace,
            device=self._job.device(self.rank),
            seed=self._job.seed,
            restarts=self.restarts,
        )
        cores = ",".join(map(str, self._cores)) if self._job.bind else ""
        command = [sys.executable, str(self._job.script), *self._job.arguments(self.rank)]
        self._host.expect(self.rank)
        with self._host.folder.log(self.rank).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", start.__file__, str(os.getpid()), cores, *command],
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | self._threads | environment(place),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: it and its children are ended together
            )
        self.descriptor = os.pidfd_open(self._process.pid)
        self._host.events.write("started", worker=self.rank, pid=self._process.pid)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait at most so long for its end, and leave it to be collected."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def collect(self) -> int:
        """Reap a process that has ended, end what it has started, and give its exit code."""
        assert self._process is not None
        self.signal(signal.SIGKILL)  # its group; before the reaping, while the number still is its own
        exit_code = self._process.wait()
        os.close(self.descriptor)
        self._process, self.descriptor = None, -1
        had_joined = self._host.bury(self.rank, exit_code)
        self._early_deaths = 0 if had_joined else self._early_deaths + 1
        self.is_done = exit_code == 0
        return exit_code

    def restart(self) -> None:
        """Plan another start: at once, or after a growing pause if it keeps dying before it joins."""
        self.restarts += 1
        pause_s = min(0.1 * 2**self._early_deaths, _LONGEST_PAUSE_S) if self._early_deaths else 0.0
        self._due = time.monotonic() + pause_s

    def signal(self, number: int) -> None:
        """Send SIGKILL to the whole group, anything else to the worker alone."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(self._process.pid, number)
                else:
                    os.kill(self._process.pid, number)
