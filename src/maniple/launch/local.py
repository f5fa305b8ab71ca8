"""A run on this machine: workers are started together, looked after and ended, and nothing of them is left."""

import os
import selectors
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from maniple.errors import WorkerFailed
from maniple.host import Host
from maniple.launch.board import Board, count
from maniple.launch.job import Job, split_cores, thread_variables
from maniple.launch.process import Process
from maniple.launch.view import View, open_view
from maniple.place import asked_threads, shared_memory
from maniple.record.folder import fresh_name

_TICK_S = 0.2
_GRACE_S = 3.0  # from SIGTERM to SIGKILL
_LAST_LINES = 20
_REFUSED, _OTHER, _INTERRUPTED = 3, 4, 130


def run_local(job: Job) -> int:
    """Run `job` on this machine; gives the exit code."""
    job.check()
    host = Host(shared_memory(), job.runs, job.name or fresh_name(job.runs, job.script), job.asked())
    return _Run(job, host).run()


class _Run:
    """The life of a run, from the first start to the last death."""

    def __init__(self, job: Job, host: Host) -> None:
        self._job, self._host = job, host
        cores = sorted(os.sched_getaffinity(0))
        threads = thread_variables(max(1, len(cores) // job.workers), asked_threads())
        self._processes = [
            Process(job, host, rank, part, threads) for rank, part in enumerate(split_cores(cores, job.workers))
        ]
        self._board = Board(host.folder, job.workers)
        self._view = open_view(quiet=job.quiet)
        self._is_hurried = False

    def run(self) -> int:
        exit_code = _OTHER
        with self._signals(), self._view:
            self._say(f"{count(self._job.workers, 'worker')}, run folder {_short(self._host.folder.path)}")
            for path in self._host.salvaged:
                self._say(f"a run whose host was killed had left {path.name} in memory: saved and removed")
            try:
                self._watch()
                exit_code = 0
            except WorkerFailed as failure:
                exit_code = self._board.exit_code or failure.exit_code
                self._tell(self._view.error, str(failure))
            except KeyboardInterrupt:
                exit_code = _INTERRUPTED
                self._tell(self._view.error, "interrupted: ending the workers and saving the center")
            finally:
                self._from_now_on(self._hurry)
                self._end_all()
                self._show()
                exit_code = self._close(exit_code)
        return exit_code

    def _watch(self) -> None:
        """Until all workers have ended well; raises WorkerFailed if one has not and may not start again."""
        with selectors.DefaultSelector() as selector:
            while not all(process.is_done for process in self._processes):
                for process in self._processes:
                    if process.is_due:
                        process.start()
                        selector.register(process.descriptor, selectors.EVENT_READ, process)
                for key, _ in selector.select(_TICK_S):
                    selector.unregister(key.fileobj)
                    self._mind_death(key.data)
                self._show()
        if not self._host.has_joined:
            raise WorkerFailed(
                f"{self._job.script} has ended without calling maniple.join(): its {self._job.workers} copies trained "
                "apart, and there is no center. Add `worker = maniple.join()` and `worker.share(model, optimizer)`."
            )

    def _mind_death(self, process: Process) -> None:
        exit_code = process.collect()
        self._board.mark(process.rank, "done" if exit_code == 0 else "dead")
        if exit_code == 0:
            return
        if process.restarts < self._job.restarts:
            process.restart()
            which = f"restart {process.restarts} of {self._job.restarts}"
            self._say(f"worker {process.rank} {_reason(exit_code)}: {which}")
            return
        self._show()
        again = f" after {count(process.restarts, 'restart')}" if process.restarts else ""
        log = self._host.folder.log(process.rank)
        raise WorkerFailed(
            f"worker {process.rank} {_reason(exit_code)}{again}, so the run ends. Its last lines ({_short(log)}):\n"
            + "\n".join("    " + line for line in _last_lines(log))
        )

    def _end_all(self) -> None:
        """SIGTERM to all, SIGKILL to those who stay."""
        for process in self._processes:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            if process.is_running:
                while not process.has_ended(timeout_s=0.1):
                    if time.monotonic() > deadline or self._is_hurried:
                        process.signal(signal.SIGKILL)
                process.collect()
                self._board.mark(process.rank, "ended")

    def _close(self, exit_code: int) -> int:
        try:
            saved = self._host.close(exit_code)
        except OSError as error:
            self._tell(
                self._view.error,
                f"the center could not be saved: {error}. It is kept in {self._host.segment.path}: "
                "make room, and the next `maniple run` saves it to the run folder.",
            )
            return exit_code or _REFUSED
        self._say(self._board.summary())
        for path in saved:
            self._say(f"center saved: {_short(path)}")
        return exit_code

    def _show(self) -> None:
        self._tell(self._view.show, self._board, self._board.refresh())

    def _say(self, text: str) -> None:
        self._tell(self._view.say, text)

    def _tell(self, act: Callable[..., None], *args: Any) -> None:
        """Show something; when the terminal or pipe is gone, train on without it."""
        try:
            act(*args)
        except OSError:
            self._view = View()

    @contextmanager
    def _signals(self) -> Generator[None]:
        before = self._from_now_on(self._interrupt)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _from_now_on(self, handler: Callable[..., None]) -> dict[int, Any]:
        return {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def _interrupt(self, *_: Any) -> None:
        """The first Ctrl-C ends the run with patience; another one ends the patience."""
        self._from_now_on(self._hurry)
        raise KeyboardInterrupt

    def _hurry(self, *_: Any) -> None:
        self._is_hurried = True


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
