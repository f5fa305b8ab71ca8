"""The crew: the worker processes of a pool, seen by the caller."""

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument, WorkerFailed
from maniple.launch.job import split_cores, thread_variables
from maniple.pool.box import pack, unpack
from maniple.pool.memory import Memory
from maniple.pool.served import DONE, INTERRUPTED, STAGE, results

_LOOK_MS = 100
_START_S = 120.0
_STOP_S = 10.0  # for what a worker does when it is interrupted
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}  # memory for the next call


class Crew:
    """Processes that do the same thing at the same time."""

    def __init__(self, segment: Path, world: int, devices: Sequence[str]) -> None:
        self._world = world
        self._stage = Memory(segment / STAGE, is_new=True)
        self._results = [Memory(segment / results(rank)) for rank in range(world)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        self._lives: list[int] = []
        self._poll = select.poll()
        self.closed = ""  # why it cannot be asked any more
        cores = split_cores(sorted(os.sched_getaffinity(0)), world)
        try:
            for rank in range(world):
                self._start(segment, rank, cores[rank], devices[rank % len(devices)] if devices else None)
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
    ) -> Any:
        """The answers of all workers to one request, by rank; or that of worker `to`.

        Arrays that are `passing` by are not copied by the workers.
        """
        self.check()
        ranks = range(self._world) if to is None else [to]
        message = pack((verb, options), self._stage, passing)
        try:
            for rank in ranks:
                self._send(rank, message)
            answers = self._collect(set(ranks), on_wait)
        except KeyboardInterrupt:
            self._drain(set(ranks))
            raise
        return [answers[rank] for rank in ranks] if to is None else answers[to]

    def check(self) -> None:
        """Raise InvalidArgument if nobody is there any more."""
        if self.closed:
            raise InvalidArgument(f"the pool is closed: {self.closed}. Make another one.")

    def close(self, why: str) -> None:
        """End the processes."""
        if self.closed:
            return
        self.closed = why
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
        env = os.environ | thread_variables(len(cores), set(os.environ)) | _KEPT
        if device is not None and device.startswith("cuda"):
            env["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2] or str(rank)
        command = [sys.executable, "-m", "maniple.pool", str(theirs.fileno()), str(life_end), str(segment)]
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
        self._links.append(Connection(ours.detach()))
        self._poll.register(self._links[rank].fileno(), select.POLLIN)
        with contextlib.suppress(OSError):  # it may have ended already
            os.sched_setaffinity(process.pid, cores)

    def _greet(self) -> None:
        path = pickle.dumps(sys.path)
        deadline = time.monotonic() + _START_S
        for rank in range(self._world):
            self._links[rank].send_bytes(path)
        for rank, link in enumerate(self._links):
            try:
                while not link.poll(0.1):
                    if time.monotonic() > deadline:
                        raise WorkerFailed(f"worker {rank} of the pool has not begun within {_START_S:.0f} s.")
                link.recv_bytes()
            except (EOFError, ConnectionError):
                raise self._lost(rank) from None

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._links[rank].send_bytes(message)
        except (BrokenPipeError, ConnectionError):
            raise self._lost(rank) from None

    def _collect(self, pending: set[int], on_wait: Callable[[], None]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        while pending:
            for rank in self._ready(_LOOK_MS):
                state, value = self._receive(rank)
                pending.discard(rank)
                if state != DONE:
                    self._drain(pending)
                    raise _raised(rank, state, value)
                answers[rank] = value
            on_wait()
        return answers

    def _ready(self, timeout_ms: float) -> list[int]:
        found = {file for file, _ in self._poll.poll(timeout_ms)}
        return [rank for rank, link in enumerate(self._links) if link.fileno() in found]

    def _receive(self, rank: int) -> Any:
        try:
            return unpack(self._links[rank].recv_bytes(), self._results[rank])
        except (EOFError, ConnectionError):
            raise self._lost(rank) from None

    def _drain(self, pending: set[int]) -> None:
        """Interrupt what is under way, so that all are ready for the next request."""
        pending = set(pending)
        for rank in pending:
            self._processes[rank].send_signal(signal.SIGINT)
        deadline = time.monotonic() + _STOP_S
        while pending and time.monotonic() < deadline:
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
