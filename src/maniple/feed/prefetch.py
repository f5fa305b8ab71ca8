"""Prefetch: the next batches are loaded in another process while this one trains.

Batches travel through shared memory without a name, so that nothing can be left behind. One pipe tells which slot is
full, another which is free again.
"""

import mmap
import os
import pickle
import select
import signal
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from typing import Generic, NoReturn, TypeVar

import numpy as np

from maniple.contracts import Array
from maniple.errors import InvalidArgument, ProducerFailed
from maniple.feed.batch import read
from maniple.feed.loader import DONE, NOTE, RAISED, load
from maniple.feed.waits import Waits

T = TypeVar("T")

_MOST_AHEAD = 256
_GRACE_S = 1.0  # from SIGTERM to SIGKILL


class Prefetch(Generic[T]):
    """Runs over `iterable` in another process, up to `ahead` batches in advance, and yields what it yields.

    Lists, tuples and dicts of arrays, tensors and anything else that can be pickled keep their structure. Every
    `iter()` is a new pass, in a new process: a copy of this one (fork), so any iterable will do, but what it changes in
    itself is lost with it. An exception of the iterable is raised here. The process ends with the pass, and with this
    process.

    Torch uses one thread there, and it cannot use a GPU: load and augment on the CPU, and move batches to the device
    in the training loop.

    Args:
        iterable: gives the batches; a generator is good for one pass.
        ahead: how many batches are kept ready.
    """

    def __init__(self, iterable: Iterable[T], ahead: int = 2) -> None:
        if not 1 <= ahead <= _MOST_AHEAD:
            raise InvalidArgument(f"ahead={ahead!r} batches cannot be kept ready (1 to {_MOST_AHEAD}). Write ahead=2.")
        self._iterable, self._ahead = iterable, ahead

    def __iter__(self) -> Iterator[T]:
        return _Pass(self._iterable, self._ahead)

    def __len__(self) -> int:
        """As many as the iterable says; TypeError if it does not."""
        if not isinstance(self._iterable, Sized):
            raise TypeError(f"a {type(self._iterable).__name__} does not tell its length.")
        return len(self._iterable)


class _Pass(Generic[T]):
    """One pass over the data, and its process."""

    def __init__(self, iterable: Iterable[T], ahead: int) -> None:
        self._slots = [os.memfd_create("maniple-batch") for _ in range(ahead)]
        self._maps: dict[int, Array] = {}
        self._notes, notes = os.pipe()
        free, self._free = os.pipe()
        os.set_blocking(self._notes, False)
        pid = self._fork(iterable, notes, free)
        os.close(notes)
        os.close(free)
        self._process = os.pidfd_open(pid)
        files = [self._notes, self._free, self._process, *self._slots]
        self._end = weakref.finalize(self, _end, os.getpid(), pid, self._process, files)
        self._poll = select.poll()
        self._poll.register(self._notes, select.POLLIN)
        self._poll.register(self._process, select.POLLIN)
        self._waits = Waits("prefetch")

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._end.alive:
            raise StopIteration
        begin = time.perf_counter()
        kind, slot, size = self._hear()
        if kind == DONE:
            self._close()
            raise StopIteration
        arrays = read(self._copy(slot, size))
        if kind == RAISED:
            self._close()
            _raise(arrays)
        with suppress(OSError):  # it has ended since
            os.write(self._free, bytes([slot]))
        batch = pickle.loads(arrays[0].data, buffers=arrays[1:])
        self._waits.add(time.perf_counter() - begin)
        return batch

    def _fork(self, iterable: Iterable[T], notes: int, free: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(self._notes)
                os.close(self._free)
                load(iterable, notes, free, self._slots, parent)
            finally:  # whatever happens, this copy of the trainer must not go on as one
                os._exit(1)
        return pid

    def _hear(self) -> tuple[int, int, int]:
        """What the loader says next. It is waited for as long as it lives."""
        self._poll.poll()
        try:
            note = os.read(self._notes, NOTE.size)
        except BlockingIOError:
            note = b""
        if note:
            return NOTE.unpack(note)
        how = _how(self._process)
        self._close()
        raise ProducerFailed(
            f"the process that loads the batches {how}, in the middle of the data. Look at what it printed; if the "
            "machine's memory is short, keep fewer batches ahead."
        )

    def _copy(self, slot: int, size: int) -> Array:
        known = self._maps.get(slot)
        if known is None or known.nbytes < size:
            known = self._maps[slot] = np.frombuffer(mmap.mmap(self._slots[slot], 0), np.uint8)
        own = np.empty(size, np.uint8)
        np.copyto(own, known[:size])
        return own

    def _close(self) -> None:
        self._waits.tell()
        self._end()


def _raise(arrays: list[Array]) -> NoReturn:
    """Raise what the iterable has raised, with the traceback of the other process as its cause."""
    raised, text = arrays[0].tobytes(), arrays[1].tobytes().decode()
    cause = ProducerFailed(f"in the process that loads the batches:\n{text}")
    try:
        error = pickle.loads(raised) if raised else None
    except Exception:  # it cannot be made again here
        error = None
    if not isinstance(error, BaseException):
        raise cause
    raise error from cause


def _how(process: int) -> str:
    """How the loader has ended."""
    with suppress(ChildProcessError):
        found = os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOWAIT)
        if found is not None and found.si_code != os.CLD_EXITED:
            with suppress(ValueError):  # most real-time signals have no name
                return f"was killed by {signal.Signals(found.si_status).name}"
            return f"was killed by signal {found.si_status}"
        if found is not None:
            return f"ended with exit code {found.si_status}"
    return "ended"


def _end(parent: int, pid: int, process: int, files: list[int]) -> None:
    """End the loader's process, with patience for what it has started itself."""
    if os.getpid() != parent:  # a copy of the trainer, which has no such child
        return
    poll = select.poll()
    poll.register(process, select.POLLIN)
    with suppress(ProcessLookupError, ChildProcessError):
        if not poll.poll(0):
            signal.pidfd_send_signal(process, signal.SIGTERM)
            if not poll.poll(_GRACE_S * 1000):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        os.waitpid(pid, 0)
    for file in files:
        os.close(file)
