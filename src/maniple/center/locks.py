"""Locks on single bytes of a file, which the kernel gives back when their holder dies.

These are Linux's open-file-description locks (`man fcntl`, F_OFD_SETLK): they belong to the opened file, not
to the process, so two centers in one process exclude each other as two processes do.
"""

import errno
import fcntl
import functools
import os
import stat
import struct
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from maniple.errors import InvalidArgument, WaitedTooLong

_UNKNOWN_HOLDER = "Its holder is alive but does not go on: look whether it is stopped or swapping."
_RECORD = struct.Struct("<qqqqd")  # the holder's rank, process, start and machine (`this_process`), and since when
_FLOCK = struct.Struct("hhqqi4x")
_BUSY = (errno.EAGAIN, errno.EACCES)

_opened: "weakref.WeakSet[ByteLocks]" = weakref.WeakSet()


class ByteLocks:
    """The locks of one file, seen by one holder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_own(path, os.O_RDWR | os.O_CREAT)
        _opened.add(self)

    def take(self, byte: int) -> bool:
        """Try to lock one byte, without waiting."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, byte))
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise
        return True

    def is_taken(self, byte: int) -> bool:
        """Somebody else holds one byte."""
        return is_locked(self._file, byte)

    def give(self, byte: int) -> None:
        """Unlock one byte."""
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, byte))

    def insist(
        self, byte: int, *, timeout_s: float, what: str, explain: Callable[[], str] = lambda: _UNKNOWN_HOLDER
    ) -> None:
        """Lock one byte, waiting for it if need be; for those who cannot afford a `with` block of `hold`."""
        if not self.take(byte):
            patience = Patience(timeout_s)
            while not self.take(byte):
                patience.wait(what, explain)

    def sign(self, rank: int) -> None:
        """Record in the file that worker `rank`, which is this process, has locked it; -1: nobody."""
        with suppress(OSError):  # no room in memory: the lock holds all the same, and its holder stays unknown
            os.pwrite(self._file, _RECORD.pack(rank, *this_process(), time.time()), 0)

    def signature(self) -> tuple[int, int, int, int, float] | None:
        """What `sign` has recorded last; None if nothing was."""
        record = os.pread(self._file, _RECORD.size, 0)
        return _RECORD.unpack(record) if len(record) == _RECORD.size else None

    @contextmanager
    def hold(self, byte: int, *, timeout_s: float, what: str) -> Generator[None]:
        """Lock one byte for the length of a `with` block."""
        self.insist(byte, timeout_s=timeout_s, what=what)
        try:
            yield
        finally:
            self.give(byte)

    def close(self) -> None:
        """Give back all locks and close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user's own; InvalidArgument if it is a link, or somebody else's.

    What is opened is checked, not what had that name before: nobody can change it in between.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:  # a link, or a socket or pipe
            raise InvalidArgument(f"{path} is no file of maniple's, but a link or a socket. Remove it.") from None
        raise
    about = os.fstat(file)
    if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid():
        return file
    os.close(file)
    raise InvalidArgument(
        f"{path} belongs to user {about.st_uid} or is no regular file, and this process is of user {os.getuid()}, so "
        "it is not used. Let its owner remove it, or set MANIPLE_SHM to another folder."
    )


def read_own(path: Path) -> bytes:
    """What stands in a regular file of this user's own."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def is_locked(file: int, byte: int) -> bool:
    """Somebody who has opened a file elsewhere holds one byte of it."""
    answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, byte))
    return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK


@contextmanager
def held(path: Path, *, timeout_s: float, what: str) -> Generator[None]:
    """Hold the one lock of a file for the length of a `with` block."""
    locks = ByteLocks(path)
    try:
        with locks.hold(0, timeout_s=timeout_s, what=what):
            yield
    finally:
        locks.close()


@contextmanager
def held_by(rank: int, path: Path, *, timeout_s: float) -> Generator[None]:
    """Hold the workers' lock for the length of a `with` block; a worker that waits too long learns who holds it."""
    locks = ByteLocks(path)

    def explain() -> str:
        if (record := locks.signature()) is None or record[0] < 0:
            return _UNKNOWN_HOLDER
        holder, pid, started, machine, since = record
        state = process_state(pid, started) if machine == this_process()[2] else "elsewhere"
        return explain_holder(holder, pid, since, "self" if (holder, pid) == (rank, os.getpid()) else state)

    try:
        locks.insist(0, timeout_s=timeout_s, what="the workers' lock", explain=explain)
        locks.sign(rank)
        try:
            yield
        finally:
            locks.sign(-1)
            locks.give(0)
    finally:
        locks.close()


def explain_holder(rank: int, pid: int, since: float, state: str) -> str:
    """Who holds the workers' lock, since when, and what to do. `state`: as `process_state` says, self or elsewhere."""
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    who = f"Worker {rank} (process {pid}) has held it since {clock}, for {max(0.0, time.time() - since):.1f} s,"
    if state == "self":
        return f"{who} and is this very worker: the lock cannot be taken twice. Leave the first block before."
    if state == "stopped":
        return f"{who} and is stopped (SIGSTOP, Ctrl-Z). Continue it with `kill -CONT {pid}`, or end it."
    if state == "gone":
        return f"{who} and has ended, but a process that it had started keeps the lock's file open. End that process."
    where = "and runs in another container" if state == "elsewhere" else "and is alive"
    return f"{who} {where}. Look at what it does in its `with worker.lock():`, or raise timeout_s."


def this_process() -> tuple[int, int, int]:
    """This process, as others of the same machine and container can find it: number, start, and where."""
    where = Path("/proc/sys/kernel/random/boot_id").read_text() + Path("/proc/self/ns/pid").readlink().name
    return os.getpid(), start_of(os.getpid()), zlib.crc32(where.encode())


def start_of(pid: int) -> int:
    """When a process of this machine was started; 0 if it has ended."""
    words = _stat(pid)
    return 0 if words[0] in "ZX" else int(words[19])


def process_state(pid: int, started: int) -> str:
    """What became of a process that was started then: alive, stopped or gone."""
    words = _stat(pid)
    if words[0] in "ZX" or int(words[19]) != started:
        return "gone"
    return "stopped" if words[0] in "Tt" else "alive"


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process: its state, and 18 words later its start."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", *["0"] * 30]


class Patience:
    """A wait for another process, with a deadline. The time for which this process was stopped does not count.

    The clock goes on while a process is stopped (SIGSTOP, a suspended job), so the wait is measured from one look to
    the next: more than `slice_s` between two looks counts as `slice_s`. After such a gap the wait is not over before
    another look: what was waited for may have come meanwhile.

    Args:
        timeout_s: the deadline; inf if the time is only measured.
        slice_s: longer than the process may be blocked, or sleep, from one look to the next.
    """

    def __init__(self, timeout_s: float, *, slice_s: float = 1.0) -> None:
        self._timeout_s, self._slice_s = timeout_s, slice_s
        self._looked = time.monotonic()
        self._sleep_s = 20e-6
        self.waited_s = 0.0  # so far, up to the last look

    def is_over(self) -> bool:
        """The deadline has passed. Asked after each look at what is waited for, which was in vain."""
        now = time.monotonic()
        gap_s, self._looked = now - self._looked, now
        self.waited_s += min(gap_s, self._slice_s)
        return self.waited_s > self._timeout_s and gap_s <= self._slice_s

    def wait(self, what: str, explain: Callable[[], str] = lambda: _UNKNOWN_HOLDER) -> None:
        """Sleep a little, 20 microseconds at first and up to 2 milliseconds later; WaitedTooLong past the deadline.

        `explain` says why it takes so long, and what to do.
        """
        if self.is_over():
            raise WaitedTooLong(f"waited {self.waited_s:.1f} s for {what} (limit {self._timeout_s:g} s). {explain()}")
        time.sleep(self._sleep_s)
        self._sleep_s = min(self._sleep_s * 1.5, 2e-3)


def turns(
    count: int,
    start: int,
    *,
    take: Callable[[int], bool],
    give: Callable[[int], None],
    describe: Callable[[int], str],
    timeout_s: float,
) -> Generator[int]:
    """Each of `count` parameters once, from `start` on, locked while it is out; those that others hold come later."""
    waiting = deque([*range(start, count), *range(start)])
    patience, busy = None, 0
    while waiting:
        i = waiting.popleft()
        if not take(i):
            waiting.append(i)
            busy += 1
            if busy >= len(waiting):  # all that remain are held by others
                patience = patience or Patience(timeout_s)
                patience.wait(describe(i))
                busy = 0
            continue
        try:
            yield i
        finally:
            give(i)
        patience, busy = None, 0


@functools.cache
def _request(kind: int, byte: int) -> bytes:
    # struct flock: l_type, l_whence, l_start, l_len, l_pid
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


def _close_in_child() -> None:
    # A forked child (a data loader's, say) shares its parent's open files, and with them the locks: if the
    # parent were killed while it holds one, the child would keep it. So the child lets go at once.
    for locks in list(_opened):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)
