"""Workers on this machine: started together, looked after, restarted, ended; nothing of them is left behind."""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from maniple.errors import WorkerFailed
from maniple.host import Host
from maniple.launch import start
from maniple.launch.board import Board
from maniple.launch.job import Job, split_cores, thread_variables
from maniple.launch.view import open_view
from maniple.place import Place, asked_threads, environment, shared_memory
from maniple.record.folder import fresh_name

_TICK_S = 0.2
_GRACE_S = 3.0  # from SIGTERM to SIGKILL
_LAST_LINES = 20
_INTERRUPTED = 130


def run_local(job: Job) -> int:
    """Run `job` on this machine; gives the exit code."""
    job.check()
    host = Host(shared_memory(), job.runs, job.name or fresh_name(job.script), job.asked())
    return _Run(job, host).run()


class _Process:
    """One worker's process, over all its restarts."""

    def __init__(self, job: Job, host: Host, rank: int, cores: list[int], threads: dict[str, str]) -> None:
        self.rank = rank
        self.restarts = 0
        self.due = time.monotonic()  # when to start it, while it has no process
        self.process: subprocess.Popen[bytes] | None = None
        self.descriptor = -1
        self.is_done = False
        self._early_deaths = 0
        self._job, self._host, self._cores, self._threads = job, host, cores, threads

    def start(self) -> None:
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
        with self._host.folder.log(self.rank).open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", start.__file__, str(os.getpid()), cores, *command],
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | self._threads | environment(place),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: it and its children are ended together
            )
        self.descriptor = os.pidfd_open(self.process.pid)

    def collect(self) -> int:
        """Reap the process, end what it started, and note its death."""
        assert self.process is not None
        exit_code = self.process.wait()
        self.signal(signal.SIGKILL)
        os.close(self.descriptor)
        self.process = None
        self._host.bury(self.rank, exit_code)
        return exit_code

    def restart(self) -> None:
        """Plan another start: at once, or after a growing pause if it dies before it joins."""
        self.restarts += 1
        self._early_deaths = 0 if self._host.has_joined(self.rank) else self._early_deaths + 1
        self.due = time.monotonic() + (min(0.2 * 2**self._early_deaths, 10) if self._early_deaths else 0)

    def signal(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(self.process.pid, number)
                else:
                    self.process.send_signal(number)


class _Run:
    """The life of a run, from the first start to the last death."""

    def __init__(self, job: Job, host: Host) -> None:
        self._job, self._host = job, host
        cores = sorted(os.sched_getaffinity(0))
        threads = thread_variables(max(1, len(cores) // job.workers), asked_threads())
        self._processes = [
            _Process(job, host, rank, part, threads) for rank, part in enumerate(split_cores(cores, job.workers))
        ]
        self._board = Board(host.folder, job.workers)
        self._view = open_view(quiet=job.quiet)
        self._is_impatient = False

    def run(self) -> int:
        exit_code = 4
        with _interruptible(self), self._view:
            self._view.say(
                f"run {self._host.folder.path.name}: {self._job.workers} workers, folder {_short(self._host.folder.path)}"
            )
            for path in self._host.salvaged:
                self._view.say(f"a run whose host was killed had left {path.name} in memory: saved and removed")
            try:
                self._watch()
                exit_code = 0
            except WorkerFailed as failure:
                exit_code = self._board.exit_code or failure.exit_code
                self._view.error(str(failure))
            except KeyboardInterrupt:
                exit_code = _INTERRUPTED
                self._view.error("interrupted: ending the workers and saving the center")
            finally:
                self._end_all()
                self._show()
                saved = self._host.close(exit_code)
        self._view.say(self._board.summary())
        for path in saved:
            self._view.say(f"center saved: {_short(path)}")
        return exit_code

    def _watch(self) -> None:
        """Until all workers have ended well; raises WorkerFailed if one has not and may not start again."""
        with selectors.DefaultSelector() as selector:
            while not all(process.is_done for process in self._processes):
                for process in self._processes:
                    if process.process is None and not process.is_done and process.due <= time.monotonic():
                        process.start()
                        selector.register(process.descriptor, selectors.EVENT_READ, process)
                for key, _ in selector.select(_TICK_S):
                    selector.unregister(key.fileobj)
                    self._mind_death(key.data)
                self._show()
        if not any(self._host.has_joined(process.rank) for process in self._processes):
            raise WorkerFailed(
                f"{self._job.script} has ended without calling maniple.join(): its {self._job.workers} copies trained "
                "apart, and there is no center. Add `worker = maniple.join()` and `worker.share(model, optimizer)`."
            )

    def _mind_death(self, process: _Process) -> None:
        exit_code = process.collect()
        self._board.mark(process.rank, "done" if exit_code == 0 else "dead")
        if exit_code == 0:
            process.is_done = True
        elif process.restarts < self._job.restarts:
            process.restart()
            self._view.say(
                f"worker {process.rank} {_reason(exit_code)}: restart {process.restarts} of {self._job.restarts}"
            )
        else:
            self._show()
            again = f" after {process.restarts} restarts" if process.restarts else ""
            log = self._host.folder.log(process.rank)
            raise WorkerFailed(
                f"worker {process.rank} {_reason(exit_code)}{again}, so the run ends. Its last lines ({_short(log)}):\n"
                + "\n".join("    " + line for line in _last_lines(log))
            )

    def _show(self) -> None:
        self._view.show(self._board, self._board.refresh())

    def _end_all(self) -> None:
        """SIGTERM to all, SIGKILL to those who stay."""
        for process in self._processes:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            while process.process is not None and process.process.poll() is None:
                if time.monotonic() > deadline or self._is_impatient:
                    process.signal(signal.SIGKILL)
                time.sleep(0.02)
            if process.process is not None:
                process.collect()
                self._board.mark(process.rank, "ended")

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The first Ctrl-C ends the run, the second one at once."""
        del number, frame
        signal.signal(signal.SIGINT, self._hurry)
        signal.signal(signal.SIGTERM, self._hurry)
        raise KeyboardInterrupt

    def _hurry(self, *_: Any) -> None:
        self._is_impatient = True


@contextmanager
def _interruptible(run: _Run) -> Generator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, run.interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _last_lines(log: Path) -> list[str]:
    with suppress(OSError):
        return log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return []


def _short(path: Path) -> str:
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
