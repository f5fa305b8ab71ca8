"""Locks on single bytes of a file, which the kernel releases when their holder dies.

These are Linux's open-file-description locks (`man fcntl`, F_OFD_SETLK): they belong to the opened file, not to the
process, so two centers in one process exclude each other as two processes do.
"""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import struct
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Generator, Hashable
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from maniple.clock import STOPPED_HOLDER, Deadline
from maniple.environment.other_launchers import process_stat
from maniple.memory.shm import open_owned

_HOLDER = struct.Struct("<qqqqd")  # rank, then `this_process()`: pid, start and machine; when it took the lock
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: l_type, l_whence, l_start, l_len, l_pid
_BUSY = (errno.EAGAIN, errno.EACCES)

_opened: "weakref.WeakSet[ByteLocks]" = weakref.WeakSet()


class ByteLocks:
    """The locks of one file, as one holder sees them."""

    def __init__(self, path: Path) -> None:
        self.file = open_owned(path, os.O_RDWR | os.O_CREAT)
        _opened.add(self)

    def take(self, byte: int, count: int = 1) -> bool:
        """Try to lock one byte, or several that follow each other, without waiting: all or none."""
        try:
            fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, byte, count))
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise
        return True

    def is_taken(self, byte: int) -> bool:
        """Whether another holder has locked one byte."""
        return is_locked(self.file, byte)

    def give(self, byte: int, count: int = 1) -> None:
        """Unlock one byte, or several."""
        fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, byte, count))

    def retry_until(
        self, byte: int, *, timeout_s: float, what: str, explain: Callable[[], str] = lambda: STOPPED_HOLDER
    ) -> None:
        """Lock one byte, waiting up to `timeout_s` for it. `hold` is the same as a `with` block."""
        if not self.take(byte):
            deadline = Deadline(timeout_s)
            while not self.take(byte):
                deadline.wait(what, explain)

    @contextmanager
    def hold(self, byte: int, *, timeout_s: float, what: str) -> Generator[None]:
        """Lock one byte for the length of a `with` block."""
        self.retry_until(byte, timeout_s=timeout_s, what=what)
        try:
            yield
        finally:
            self.give(byte)

    def close(self) -> None:
        """Release all locks and close the file."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class LockQueue:
    """Lets the threads of one process take locks in turn: first come, first served, and without polling.

    A lock in a file can only be polled. With hundreds of threads that poll, most of the processor time is spent on
    failed attempts and some threads wait for seconds; so only the first thread in the queue for a lock polls it.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: dict[Hashable, deque[threading.Lock]] = {}

    def turn(self, lock: Hashable, deadline: Deadline, what: Callable[[], str]) -> "_Turn":
        """Be the only thread that waits for or holds `lock`, for the length of a `with` block.

        `deadline` has a slice of 1 s, longer than this thread blocks at once; `what` describes the lock for its error.
        """
        return _Turn(self, lock, deadline, what)

    def join(self, lock: Hashable) -> tuple[threading.Lock, bool]:
        """Join the queue for `lock`; return a gate that is opened later, and whether it is this thread's turn now."""
        gate = threading.Lock()
        with self._mutex:
            queue = self._waiting.setdefault(lock, deque())
            queue.append(gate)
            gate.acquire()
            return gate, len(queue) == 1

    def leave(self, lock: Hashable, gate: threading.Lock) -> None:
        """Leave the queue, after this thread's turn or before, and open the gate of the one that is first then."""
        with self._mutex:
            queue = self._waiting[lock]
            was_first = queue[0] is gate
            queue.remove(gate)
            if was_first and queue:
                queue[0].release()
            elif not queue:
                del self._waiting[lock]


class _Turn:
    """A thread's turn at a lock. A class, since a generator costs three times as much for each chunk of an exchange."""

    __slots__ = ("_deadline", "_gate", "_lock", "_queue", "_what")

    def __init__(self, queue: LockQueue, lock: Hashable, deadline: Deadline, what: Callable[[], str]) -> None:
        self._queue, self._lock, self._deadline, self._what = queue, lock, deadline, what

    def __enter__(self) -> None:
        self._gate, is_first = self._queue.join(self._lock)
        try:
            while not is_first and not self._gate.acquire(timeout=0.5):
                self._deadline.check(self._what)
        except BaseException:
            self._queue.leave(self._lock, self._gate)
            raise

    def __exit__(self, *_: object) -> None:
        self._queue.leave(self._lock, self._gate)


def is_locked(file: int, byte: int) -> bool:
    """Whether one byte of a file is locked through another opening of it."""
    answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, byte))
    return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK


@contextmanager
def held(path: Path, *, timeout_s: float, what: str) -> Generator[None]:
    """Hold the one lock of a file for the length of a `with` block."""
    with closing(ByteLocks(path)) as locks, locks.hold(0, timeout_s=timeout_s, what=what):
        yield


@contextmanager
def held_by(rank: int, path: Path, *, timeout_s: float) -> Generator[None]:
    """Hold the workers' lock (`worker.lock()`) for the length of a `with` block; a timeout names the holder."""
    with closing(ByteLocks(path)) as locks:

        def write_holder(rank: int) -> None:
            with suppress(OSError):  # the memory is full: the lock holds all the same, and its holder stays unknown
                os.pwrite(locks.file, _HOLDER.pack(rank, *this_process(), time.time()), 0)

        explain = functools.partial(_explain_holder, locks, rank)
        locks.retry_until(0, timeout_s=timeout_s, what="the workers' lock", explain=explain)
        write_holder(rank)
        try:
            yield
        finally:
            write_holder(-1)
            locks.give(0)


def _explain_holder(locks: ByteLocks, rank: int) -> str:
    """Who holds the workers' lock, since when, and what to do; `rank` is this worker."""
    record = os.pread(locks.file, _HOLDER.size, 0)
    if len(record) != _HOLDER.size or _HOLDER.unpack(record)[0] < 0:
        return STOPPED_HOLDER
    holder, pid, started, machine, since = _HOLDER.unpack(record)
    at = time.strftime("%H:%M:%S", time.localtime(since))
    who = f"Worker {holder} (process {pid}) has held it since {at}, for {max(0.0, time.time() - since):.1f} s,"
    look = "Look at what it does in its `with worker.lock():`, or raise timeout_s."
    if (holder, pid) == (rank, os.getpid()):
        return f"{who} and is this very worker: the lock cannot be taken twice. Leave the first block before."
    if machine != this_process()[2]:
        return f"{who} and runs in another container. {look}"
    if start_of(pid) != started:
        return f"{who} and has ended, but a process that it had started keeps the lock's file open. End that process."
    if process_stat(pid)[0] in "Tt":
        return f"{who} and is stopped (SIGSTOP, Ctrl-Z). Continue it with `kill -CONT {pid}`, or end it."
    return f"{who} and is alive. {look}"


def this_process() -> tuple[int, int, int]:
    """This process as others on the same machine and in the same container can identify it: pid, start, machine."""
    where = Path("/proc/sys/kernel/random/boot_id").read_text() + Path("/proc/self/ns/pid").readlink().name
    return os.getpid(), start_of(os.getpid()), zlib.crc32(where.encode())


def start_of(pid: int) -> int:
    """When a process of this machine was started; 0 if it has ended."""
    fields = process_stat(pid)
    return 0 if fields[0] in "ZX" else int(fields[19])


@functools.cache
def _request(kind: int, byte: int, count: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0)


def _close_in_child() -> None:
    # A forked child (of a data loader, say) shares its parent's open files and their locks. If the parent were killed
    # while it holds one, the child would keep it, so the child closes the files at once.
    for locks in list(_opened):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)


_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine)  # SYS_futex; on other machines waiters poll
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_POLL_S = 1e-3
AWAKE_S = 1e-3  # short waits spin: waking a sleeper takes the core of the one that wakes it

_syscall = ctypes.CDLL(None, use_errno=True).syscall


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """A counter and a flag in 8 bytes of a mapped file, as one process sees them."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._counter = ctypes.c_uint32.from_buffer(memory, offset)
        self._has_sleepers = ctypes.c_uint32.from_buffer(memory, offset + 4)
        self._address = ctypes.c_void_p(ctypes.addressof(self._counter))

    @property
    def count(self) -> int:
        """The changes announced so far. Read it before looking at what is waited for."""
        return self._counter.value

    def ring(self) -> None:
        """Announce a change: wake all waiters."""
        self._counter.value += 1  # two at once may count as one: it still differs from what the waiters have read
        if self._has_sleepers.value:
            self._has_sleepers.value = 0
            if _SYSCALL is not None:
                _syscall(_SYSCALL, self._address, _WAKE, _ALL, None, None, 0)

    def wait(self, count: int, timeout_s: float, *, awake_s: float = AWAKE_S) -> None:
        """Wait until a change was announced since `count` was read, the time is over, or a signal came."""
        begin = time.perf_counter()
        while self._counter.value == count:
            if time.perf_counter() - begin > awake_s:
                self._sleep(count, timeout_s)
                return
            os.sched_yield()

    def _sleep(self, count: int, timeout_s: float) -> None:
        if _SYSCALL is None:
            time.sleep(min(timeout_s, _POLL_S))
            return
        limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        self._has_sleepers.value = 1
        if _syscall(_SYSCALL, self._address, _WAIT, ctypes.c_uint32(count), ctypes.byref(limit), None, 0) < 0:
            assert ctypes.get_errno() in {errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR}
