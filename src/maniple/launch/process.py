"""Processes that a launcher starts: `ChildProcess` for any command, `LaunchedWorker` for a worker on this machine."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from maniple.clock import Deadline, clock
from maniple.environment import Environment, inherited_variables, variables_for
from maniple.host import Host
from maniple.job import Job
from maniple.launch import start
from maniple.launch.output import Output

# A log is UTF-8 whatever the launcher's terminal uses, and no character can make `print` fail.
OUTPUT_VARIABLES = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
_MAX_RESTART_DELAY_S = 10.0  # for a worker that keeps dying before it joins


class ChildProcess:
    """One process at a time, over all its restarts.

    Attributes:
        descriptor: a pidfd, readable once the process has ended; -1 while there is none.
        output: of the newest process.
        is_done: it will not be started again.
        start_at: when it is to be started.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self.output: Output | None = None
        self.is_done = False
        self.start_at = clock.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, for the first time or again."""
        raise NotImplementedError

    @property
    def is_due(self) -> bool:
        return not self.is_running and not self.is_done and clock.monotonic() >= self.start_at

    @property
    def is_running(self) -> bool:
        """Whether it has been started and not collected yet."""
        return self.descriptor >= 0

    @property
    def unwritten(self) -> bytes:
        """The newest output that could not be written to the log because the disk is full."""
        return b"" if self.output is None else self.output.unwritten

    def spawn(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        cores: str = "",
        descriptors: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> int:
        """Start `command` and return its process id."""
        self.output = output = Output(log, self.output)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", start.__file__, str(os.getpid()), cores, *command],
                env=inherited_variables() | OUTPUT_VARIABLES | dict(env),
                stdin=stdin,
                stdout=output.pipe,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own process group, so that its children are killed with it
                pass_fds=descriptors,
            )
        finally:
            os.close(output.pipe)
        # Both are set in one statement: a signal handler that ends the run may interrupt between two lines. A process
        # that is not registered here yet dies with the launcher.
        self._process, self.descriptor = process, os.pidfd_open(process.pid)
        return process.pid

    def write(self, data: bytes) -> None:
        """Write to its standard input, if it was started with a pipe; ignored once it has ended."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(data)
                self._process.stdin.flush()

    def has_ended(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for its end. It must still be collected."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    @property
    def exit_code(self) -> int | None:
        """Its exit code if it has ended and was not collected yet; None if it runs, or is on another machine."""
        with suppress(OSError):
            status = os.waitid(os.P_PIDFD, self.descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        return None

    def collect(self) -> int:
        """Reap a process that has ended, kill its process group, and return its exit code."""
        assert self._process is not None
        self.signal(signal.SIGKILL)  # before it is reaped, while the process id cannot be reused
        exit_code = self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        os.close(self.descriptor)
        self._process, self.descriptor = None, -1
        if self.output is not None:
            self.output.finish()
        return exit_code

    def signal(self, number: int) -> None:
        """Send SIGKILL to the process group, any other signal to the process alone."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(self._process.pid, number)
                else:
                    os.kill(self._process.pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, after it has not followed `stop`."""
        self.signal(signal.SIGKILL)


class LaunchedWorker(ChildProcess):
    """A worker that waits for its start, runs, or is done."""

    def __init__(
        self, job: Job, host: Host, rank: int, *, cores: list[int], threads: dict[str, str], reach: Environment
    ) -> None:
        super().__init__()
        self.rank = rank
        self.restarts = 0
        self._stopped_at = 0.0  # when the launcher asked it to end
        self._killed_after_s = 0.0  # time from then until the launcher killed it
        self._has_joined = False
        self._job, self._host, self._cores, self._threads, self._reach = job, host, cores, threads, reach
        self._early_deaths = 0  # in a row, before it had joined

    @property
    def environment(self) -> Environment:
        """The environment of this worker's process."""
        local_world = self._job.workers_per_node
        return self._reach.replace(
            rank=self.rank,
            local_rank=self.rank % local_world,
            local_world=local_world,
            device=self._job.device(self.rank % local_world),
            restarts=self.restarts,
        )

    @property
    def command(self) -> list[str]:
        """The script and its arguments for this worker."""
        return [sys.executable, *self._job.command, *self._job.arguments(self.rank)]

    def start(self) -> None:
        self._host.expect(self.rank)
        self._host.events.write("started", worker=self.rank, **self.launch())

    def launch(self) -> dict[str, Any]:
        """Start the script, and return what the event about it tells."""
        cores = ",".join(map(str, self._cores)) if self._job.bind else ""
        env = self._threads | variables_for(self.environment)
        return {"pid": self.spawn(self.command, env=env, log=self._host.folder.log(self.rank), cores=cores)}

    def collect(self) -> int:
        """Reap a process that has ended, record its end, and return its exit code."""
        exit_code = self.reap()
        had_joined = self._host.record_exit(
            self.rank,
            exit_code,
            killed_by(exit_code),
            was_stopped=self._stopped_at > 0,
            killed_after_s=self._killed_after_s,
        )
        self._has_joined = self._has_joined or had_joined
        self._early_deaths = 0 if had_joined else self._early_deaths + 1
        self.is_done = exit_code == 0
        return exit_code

    def reap(self) -> int:
        """Release the ended process and return its exit code."""
        return super().collect()

    def stop(self) -> None:
        if self.is_running:
            self._stopped_at = clock.monotonic()
            super().stop()

    def kill(self) -> None:
        self._killed_after_s = self._killed_after_s or clock.monotonic() - self._stopped_at
        super().kill()

    def loss_reason(self, exit_code: int) -> str:
        """Why it is gone through no fault of its script, so that the others may continue; "" if the script failed."""
        return f"killed by {name}" if (name := killed_by(exit_code)) else ""

    def give_up(self, why: str) -> None:
        """Do not start it again, and let the others take over its share of the samples."""
        self.is_done = True
        self._host.lose(self.rank, why, node=self._job.node(self.rank))

    def restart(self) -> None:
        """Schedule another start: at once, or with exponential backoff if it keeps dying before it joins."""
        self.restarts += 1
        delay_s = min(0.1 * 2**self._early_deaths, _MAX_RESTART_DELAY_S) if self._early_deaths else 0.0
        self.start_at = clock.monotonic() + delay_s


def stop_all(children: Iterable[ChildProcess], grace_s: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
    """Stop children and collect them; those that stay are killed after the grace period, or once `is_hurried`."""
    running = [child for child in children if child.is_running]
    for child in running:
        child.stop()
    deadline = Deadline(grace_s)
    for child in running:
        while not child.has_ended(timeout_s=0.1):
            if deadline.is_over() or is_hurried():
                child.kill()
        child.collect()


def killed_by(exit_code: int) -> str:
    """The name of the signal that ended a process; "" if none did.

    Shells, ssh and a worker that follows SIGTERM exit with 128 plus the signal's number.
    """
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number in signal.Signals.__members__.values():
        return signal.Signals(number).name
    return f"signal {number}" if exit_code < 0 else ""


def exit_text(exit_code: int) -> str:
    """How a process ended, as the rest of a sentence."""
    if name := killed_by(exit_code):
        return f"was killed by {name}" + (f" (exit code {exit_code})" if exit_code > 0 else "")
    return f"ended with exit code {exit_code}"
