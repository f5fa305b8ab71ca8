"""The worker processes of a pool, seen by the caller: starting, requests to all of them, interruption, ending."""

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Self

from maniple.clock import Deadline
from maniple.environment.variables import visible_gpus
from maniple.errors import InvalidArgument, WorkerFailed
from maniple.job import thread_variables
from maniple.launch.cores import divide_cores
from maniple.launch.process import killed_by
from maniple.pool.data import DataMemory
from maniple.pool.worker_process import (
    DONE,
    FAILED,
    INTERRUPTED,
    REQUESTS_FILE,
    pack,
    replies_file,
    unpack,
    wait_readable,
)

_POLL_MS = 100  # how often a waiting caller updates the progress bar and checks for Ctrl-C
_SPIN_S = 0.0003  # an empty call takes less
_COLLECTIVE = {"call", "commit", "collective"}  # requests in which workers use collectives
_START_S = 120.0  # imports from a cold network file system
_STOP_S = 10.0  # for what a worker does when it is interrupted
_SIGNAL_EVERY_S = 1.0  # a worker that had not begun, or whose library swallowed the interrupt, gets another one
_END_S = 1.0  # an idle worker ends at once
_FORCE_S = 3.0  # a block that has not reacted for this long is interrupted at once by the next Ctrl-C
# The functions of the C module: those of `signal` convert handlers to enums, which takes longer than the rest here.
_signal: Any = getattr(signal, "_signal", signal)
# Keep freed memory in the process: the next call needs buffers of the same sizes.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


class WorkerProcesses:
    """Processes that execute the same request at the same time."""

    def __init__(self, segment: Path, world: int, devices: Sequence[str]) -> None:
        self._world = world
        self._requests = DataMemory(segment / REQUESTS_FILE, is_new=True)
        self._replies = [DataMemory(segment / replies_file(rank)) for rank in range(world)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._life_pipes: list[int] = []  # write ends: a worker ends when the kernel closes its own
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by file descriptor
        self._path = _path()  # sys.path of the workers
        self._group = 0  # the number of the collectives in use
        self._lock, self._is_asking = threading.RLock(), False
        self._owner = os.getpid()
        self.closed = ""  # the reason; empty while the processes are usable
        given = [devices[rank % len(devices)] if devices else None for rank in range(world)]
        cores = divide_cores(sorted(os.sched_getaffinity(0)), given, visible=visible_gpus())
        try:
            for rank in range(world):
                self._start(segment, rank, cores[rank], given[rank])
            self._await_start()
        except BaseException:
            self.close("it could not be started")
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self._processes]

    def ask(
        self,
        verb: str,
        *arguments: Any,
        rank: int | None = None,
        zero_copy: Sequence[Any] = (),
        on_wait: Callable[[], None] = lambda: None,
        is_atomic: bool = False,
    ) -> Any:
        """Send a request; returns the replies of all workers by rank, or that of one `rank`. One thread at a time.

        Args:
            zero_copy: arrays that the workers see in place instead of copying them.
            on_wait: called at least every 0.1 s.
            is_atomic: a Ctrl-C does not interrupt the workers, so that all of them execute it, or none does.
        """
        with self._lock:
            self.check()
            if self._path != (path := _path()):  # the caller has changed its sys.path
                self._path = path
                self.ask("path", path)
            ranks = range(self._world) if rank is None else [rank]
            message = pack((verb, arguments, self._group), self._requests, zero_copy)
            try:
                with DeferredInterrupt() as interrupt:
                    replies = self._exchange(ranks, message, on_wait, interrupt, _STOP_S if is_atomic else 0.0)
            except BaseException:
                if verb in _COLLECTIVE:  # a worker may have been interrupted within a collective
                    self._group += 1
                raise
        return [replies[rank] for rank in ranks] if rank is None else replies[rank]

    def check(self) -> None:
        """Raise InvalidArgument if the processes cannot be used, or belong to another process."""
        if self.closed:
            raise InvalidArgument(f"the pool is closed: {self.closed}. Make another one.")
        if os.getpid() != self._owner:
            raise InvalidArgument(
                f"the pool belongs to process {self._owner}, of which this one is a copy. Make a pool here."
            )
        if self._is_asking:
            raise InvalidArgument("the pool is in the middle of a call that a signal handler interrupts. Return first.")

    def close(self, why: str) -> None:
        """End the processes: idle ones by closing their pipes, busy ones by SIGKILL after a second."""
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = why
        with DeferredInterrupt():  # or a process would be left behind
            for pipe in self._pipes:
                pipe.close()
            for file in self._life_pipes:
                os.close(file)
            deadline = Deadline(_END_S)
            for process in self._processes:
                while process.poll() is None and not deadline.is_over():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.05)
                process.kill()  # nothing, if it has ended
                process.wait()

    def _start(self, segment: Path, rank: int, cores: list[int], device: str | None) -> None:
        ours, theirs = Pipe()
        life_end, life = os.pipe()
        code = f"import sys; sys.path[:] = {self._path!r}; from maniple.pool.worker_process import main; main()"
        env = os.environ | thread_variables(len(cores), os.environ) | _ALLOCATOR
        if device is not None and device.startswith("cuda"):
            env["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2] or str(rank)
        # Not -m: it would search the working directory instead of the place where the caller found maniple.
        command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(life_end), str(segment)]
        try:
            process = subprocess.Popen(
                [*command, str(rank), str(self._world)],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), life_end),
                process_group=0,  # the terminal's Ctrl-C goes to the caller only
            )
        finally:
            theirs.close()
            os.close(life_end)
        self._life_pipes.append(life)
        self._processes.append(process)
        self._pipes.append(ours)
        self._ranks[ours.fileno()] = rank
        self._poll.register(ours.fileno(), select.POLLIN)
        with contextlib.suppress(OSError):  # it may have ended already
            os.sched_setaffinity(process.pid, cores)

    def _await_start(self) -> None:
        deadline = Deadline(_START_S)
        for rank in range(self._world):
            while rank not in self._readable():
                if deadline.is_over():
                    raise WorkerFailed(
                        f"worker {rank} of the pool has not started within {_START_S:.0f} s. Check the load of the "
                        "machine, and how long `python -c 'import maniple.pool'` takes."
                    )
            self._receive(rank)

    def _exchange(
        self,
        ranks: Sequence[int],
        message: bytes,
        on_wait: Callable[[], None],
        interrupt: "DeferredInterrupt",
        grace_s: float,
    ) -> dict[int, Any]:
        """Send a message and collect the replies. Whatever happens, no request or reply is left for the next call."""
        replies: dict[int, Any] = {}
        pending: set[int] = set()
        self._is_asking = True
        try:
            for rank in ranks:
                self._send(rank, message)
                pending.add(rank)
            error = None
            while pending and not error and not interrupt.is_pending(grace_s):
                error = self._collect(pending, replies)
                interrupt.run(on_wait)
            self._interrupt(pending)
        except BaseException as cause:  # a signal that is not deferred: a message may be incomplete
            self.close(f"a call was cut short by {type(cause).__qualname__}")
            raise
        finally:
            self._is_asking = False
        if error and not interrupt.raised:
            raise error
        return replies

    def _collect(self, pending: set[int], replies: dict[int, Any]) -> BaseException | None:
        """Read the replies that have arrived; returns the first error among them."""
        error = None
        for rank in self._readable():
            message = self._receive(rank)
            pending.discard(rank)
            try:
                state, replies[rank] = unpack(message, self._replies[rank])
            except Exception as cause:  # a class that only the worker can import, for example
                state, replies[rank] = FAILED, (cause, str(cause), "the caller could not unpickle the reply")
            if state != DONE and error is None:
                error = _worker_error(rank, state, replies[rank])
        return error

    def _interrupt(self, pending: set[int]) -> None:
        """Interrupt the workers that have not replied, so that all are ready for the next request."""
        deadline, signals = Deadline(_STOP_S), 0
        while pending and not deadline.is_over():
            if deadline.waited_s >= signals * _SIGNAL_EVERY_S:
                signals += 1
                for rank in pending:
                    self._processes[rank].send_signal(signal.SIGINT)
            for rank in self._readable():
                self._receive(rank)
                pending.discard(rank)
        if pending:
            self.close(f"worker {min(pending)} did not stop within {_STOP_S:.0f} s when it was interrupted")

    def _readable(self) -> list[int]:
        found = wait_readable(self._poll, _SPIN_S, _POLL_MS)
        if self.closed:  # by another thread, or by a signal handler
            raise WorkerFailed(f"the pool was closed in the middle of a call: {self.closed}. Make another one.")
        return sorted(self._ranks[file] for file, _ in found)

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._pipes[rank].send_bytes(message)
        except OSError:
            raise self._lost(rank) from None

    def _receive(self, rank: int) -> bytes:
        try:
            return self._pipes[rank].recv_bytes()
        except (EOFError, OSError):
            raise self._lost(rank) from None

    def _lost(self, rank: int) -> WorkerFailed:
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        code = process.poll()
        how = "is gone"
        if code is not None:
            how = f"ended with exit code {code}" if code >= 0 else f"was ended by {killed_by(code)}"
        self.close(f"worker {rank} {how}")
        return WorkerFailed(
            f"worker {rank} of the pool {how}, and its objects are lost: the pool is closed. Find out what ended it "
            "(too little memory?), and make another pool."
        )


def _path() -> list[str]:
    return [entry or str(Path.cwd()) for entry in sys.path]


def _worker_error(rank: int, state: str, value: Any) -> BaseException:
    if state == INTERRUPTED:
        return WorkerFailed(f"worker {rank} of the pool was interrupted by a signal that the caller did not send.")
    error, short, text = value
    if error is None:
        error = WorkerFailed(f"worker {rank} of the pool failed: {short}")
    error.add_note(f"raised in worker {rank} of the pool:\n{text}")
    return error


class DeferredInterrupt:
    """A block in which the exception that the SIGINT handler raises is kept, and raised at the end.

    The block polls `is_pending`.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._since = 0.0
        self._old: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and _has_known_handler():  # only it gets signals
            self._old = _signal.getsignal(signal.SIGINT)
            _signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            _signal.signal(signal.SIGINT, self._old)
        if self.raised is not None:
            raise self.raised

    def run(self, act: Callable[..., Any], *args: Any) -> None:
        """Call `act` and keep what it raises."""
        try:
            act(*args)
        except BaseException as error:
            if self.is_pending(_FORCE_S):
                raise
            if self.raised is None:
                self.raised, self._since = error, time.monotonic()

    def is_pending(self, grace_s: float) -> bool:
        """Whether an exception was kept at least `grace_s` ago."""
        return self.raised is not None and time.monotonic() - self._since >= grace_s

    def _on_signal(self, *args: Any) -> None:
        if callable(self._old):
            self.run(self._old, *args)
        elif self._old == signal.SIG_DFL:  # ends the process
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)


@functools.cache
def _has_known_handler() -> bool:
    """Whether Python installed the handler and can restore it; an embedding program may have its own."""
    return signal.getsignal(signal.SIGINT) is not None
