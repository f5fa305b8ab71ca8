"""The crew: the worker processes of a pool, seen by the caller."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maniple.center.locks import Patience
from maniple.errors import InvalidArgument, WorkerFailed
from maniple.launch.cores import divide_cores
from maniple.launch.job import thread_variables
from maniple.place.machine import visible_gpus
from maniple.pool.box import pack, unpack
from maniple.pool.held import Held
from maniple.pool.link import Link, ready
from maniple.pool.memory import Memory
from maniple.pool.served import DONE, FAILED, INTERRUPTED, STAGE, results

_LOOK_MS = 100
_AWAKE_S = 0.0003
_START_S = 120.0
_STOP_S = 10.0  # for what a worker does when it is interrupted
_AGAIN_S = 1.0  # a worker that had not begun, or whose library has swallowed the interrupt, is told again
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}  # memory for the next call


class Crew:
    """Processes that do the same thing at the same time."""

    def __init__(self, segment: Path, world: int, devices: Sequence[str]) -> None:
        self._world = world
        self._stage = Memory(segment / STAGE, is_new=True)
        self._results = [Memory(segment / results(rank)) for rank in range(world)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Link] = []
        self._lives: list[int] = []
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by file descriptors
        self._path: list[str] = []  # where workers look for modules
        self._lock, self._is_asking = threading.RLock(), False
        self._owner = os.getpid()
        self.closed = ""  # why it cannot be asked any more
        given = [devices[rank % len(devices)] if devices else None for rank in range(world)]
        cores = divide_cores(sorted(os.sched_getaffinity(0)), given, visible=visible_gpus())
        try:
            for rank in range(world):
                self._start(segment, rank, cores[rank], given[rank])
            self._greet()
        except BaseException:
            self.close("it could not be started")
            raise

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.pid for process in self._processes]

    def ask(
        self,
        verb: str,
        options: dict[str, Any],
        *,
        to: int | None = None,
        passing: Sequence[Any] = (),
        on_wait: Callable[[], None] = lambda: None,
        is_firm: bool = False,
    ) -> Any:
        """The answers of all workers to one request, by rank; or that of worker `to`. One thread at a time.

        Arrays that are `passing` by are not copied by the workers. What is `is_firm` is done by all if Ctrl-C comes.
        """
        with self._lock:
            self.check()
            self._tell_path()
            ranks = range(self._world) if to is None else [to]
            message = pack((verb, options), self._stage, passing)
            with Held() as held:
                answers = self._exchange(ranks, message, on_wait, held, _STOP_S if is_firm else 0.0)
        return [answers[rank] for rank in ranks] if to is None else answers[to]

    def check(self) -> None:
        """Raise InvalidArgument if nobody is there any more, or who is there is not one's own."""
        if self.closed:
            raise InvalidArgument(f"the pool is closed: {self.closed}. Make another one.")
        if os.getpid() != self._owner:
            raise InvalidArgument(
                f"the pool belongs to process {self._owner}, of which this one is a copy. Make a pool here."
            )
        if self._is_asking:
            raise InvalidArgument("the pool is in the middle of a call, which a signal has cut short. Return first.")

    def close(self, why: str) -> None:
        """End the processes."""
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = why
        with Held():  # nobody is left behind
            self._end()

    def _end(self) -> None:
        for link in self._links:
            link.close()
        for life in self._lives:
            os.close(life)
        deadline = time.monotonic() + 1.0  # an idle worker ends at once
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
            process.wait()

    def _start(self, segment: Path, rank: int, cores: list[int], device: str | None) -> None:
        ours, theirs = socket.socketpair()
        life_end, life = os.pipe()
        begin = f"import sys; sys.path[:] = {_path()!r}; from maniple.pool.served import main; main()"
        env = os.environ | thread_variables(len(cores), os.environ) | _KEPT
        if device is not None and device.startswith("cuda"):
            env["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2] or str(rank)
        # not -m: that would look for modules in the working folder, and not where the caller has found maniple
        command = [sys.executable, "-P", "-c", begin, str(theirs.fileno()), str(life_end), str(segment)]
        try:
            process = subprocess.Popen(
                [*command, str(rank), str(self._world)],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), life_end),
                process_group=0,  # the terminal's Ctrl-C is for the caller
            )
        finally:
            theirs.close()
            os.close(life_end)
        self._lives.append(life)
        self._processes.append(process)
        self._links.append(Link(ours))
        self._ranks[ours.fileno()] = rank
        self._poll.register(ours.fileno(), select.POLLIN)
        with contextlib.suppress(OSError):  # it may have ended already
            os.sched_setaffinity(process.pid, cores)

    def _greet(self) -> None:
        self._path = _path()
        patience = Patience(_START_S)
        for rank in range(self._world):
            while rank not in self._ready(_LOOK_MS):
                if patience.is_over():
                    raise WorkerFailed(f"worker {rank} of the pool has not begun within {_START_S:.0f} s.")
            self._receive(rank)

    def _tell_path(self) -> None:
        """Modules may be found in other places than when the workers began."""
        path = _path()
        if path != self._path:
            self._path = path
            self.ask("path", {"path": path})

    def _exchange(
        self, ranks: Sequence[int], message: bytes, on_wait: Callable[[], None], held: Held, patience_s: float
    ) -> dict[int, Any]:
        """Ask, and wait for the answers; whatever happens, nobody is left with a question or an answer for later."""
        answers: dict[int, Any] = {}
        pending: set[int] = set()
        self._is_asking = True
        try:
            for rank in ranks:
                self._send(rank, message)
                pending.add(rank)
            error = None
            while pending and not error and not held.is_over(patience_s):
                error = self._collect(pending, answers)
                held.run(on_wait)
            self._drain(pending)
        except BaseException as cause:  # of a signal that is not held, say: a message may be in pieces
            self.close(f"a call was cut short by {type(cause).__qualname__}")
            raise
        finally:
            self._is_asking = False
        if error and not held.raised:
            raise error
        return answers

    def _collect(self, pending: set[int], answers: dict[int, Any]) -> BaseException | None:
        """Take the answers that are there; gives the first error among them."""
        error = None
        for rank in self._ready(_LOOK_MS):
            message = self._receive(rank)
            pending.discard(rank)
            state, answers[rank] = self._opened(rank, message)
            if state != DONE and error is None:
                error = _raised(rank, state, answers[rank])
        return error

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._links[rank].send(message)
        except OSError:
            raise self._lost(rank) from None

    def _ready(self, timeout_ms: float) -> list[int]:
        found = ready(self._poll, _AWAKE_S, timeout_ms)
        if self.closed:  # by another thread, or by a handler of a signal
            raise WorkerFailed(f"the pool was closed in the middle of a call: {self.closed}. Make another one.")
        return sorted(self._ranks[file] for file, _ in found)

    def _receive(self, rank: int) -> memoryview:
        try:
            return self._links[rank].receive()
        except (EOFError, OSError):
            raise self._lost(rank) from None

    def _opened(self, rank: int, message: memoryview) -> tuple[str, Any]:
        try:
            return unpack(message, self._results[rank])
        except Exception as error:  # a class that only the worker knows, say
            return FAILED, (error, str(error), "the answer could not be opened by the caller")

    def _drain(self, pending: set[int]) -> None:
        """Interrupt what is under way, so that all are ready for the next request."""
        patience, times = Patience(_STOP_S), 0
        while pending and not patience.is_over():
            if patience.waited_s >= times * _AGAIN_S:
                times += 1
                for rank in pending:
                    self._processes[rank].send_signal(signal.SIGINT)
            for rank in self._ready(_LOOK_MS):
                self._receive(rank)
                pending.discard(rank)
        if pending:
            self.close(f"worker {min(pending)} did not stop within {_STOP_S:.0f} s when it was interrupted")

    def _lost(self, rank: int) -> WorkerFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(1)
        code = self._processes[rank].poll()
        how = (
            "is gone"
            if code is None
            else f"ended with exit code {code}"
            if code >= 0
            else f"was ended by {_signal(-code)}"
        )
        self.close(f"worker {rank} {how}")
        return WorkerFailed(
            f"worker {rank} of the pool {how}, and what it had is lost: the pool is closed. Look for what ended it "
            "(too little memory?), and make another pool."
        )


def _path() -> list[str]:
    return [entry or str(Path.cwd()) for entry in sys.path]


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _raised(rank: int, state: str, value: Any) -> BaseException:
    if state == INTERRUPTED:
        return WorkerFailed(f"worker {rank} of the pool was interrupted by a signal from elsewhere. Try again.")
    error, short, text = value
    if error is None:
        error = WorkerFailed(f"worker {rank} of the pool failed: {short}")
    error.add_note(f"raised in worker {rank} of the pool:\n{text}")
    return error
