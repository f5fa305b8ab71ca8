"""Prefetch: the next batches are loaded in another process while this one trains.

Batches travel through anonymous shared memory (memfd), so that no file can be left behind. One pipe reports which slot
is full, another which is free again.
"""

import ctypes
import importlib
import io
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from maniple.contracts import Array
from maniple.errors import InvalidArgument, ProducerFailed
from maniple.feed.local_feed import WaitTimes
from maniple.feed.ring import FeedBatch, read

T = TypeVar("T")

_MAX_AHEAD = 256  # a slot's number is one byte in the pipe
_GRACE_S = 1.0  # from SIGTERM to SIGKILL, for the iterable to end its own processes
_GRAIN = 1 << 16  # slots grow by this
_PR_SET_PDEATHSIG = 1

_REPORT = struct.Struct("<bqq")  # from the loader: kind, slot, bytes
_BATCH, _RAISED, _DONE = range(3)


class Prefetch(Generic[T]):
    """Iterates over `iterable` in another process, up to `ahead` batches in advance, and yields its items.

    Items are pickled, so any structure of arrays, tensors and other values is kept. Every `iter()` is a new pass in a
    new process: a fork of this one, so any iterable will do, but changes that it makes to itself are lost. An exception
    of the iterable is raised here. The process ends with the pass, or when this process ends.

    In that process, torch uses one thread and cannot use a GPU: load and augment on the CPU, and move batches to the
    device in the training loop.

    Args:
        iterable: gives the batches; a generator is good for one pass.
        ahead: how many batches are kept ready.
    """

    def __init__(self, iterable: Iterable[T], ahead: int = 2) -> None:
        if not 1 <= ahead <= _MAX_AHEAD:
            raise InvalidArgument(f"ahead={ahead!r} is out of range (1 to {_MAX_AHEAD} batches). Write ahead=2.")
        self._iterable, self._ahead = iterable, ahead

    def __iter__(self) -> Iterator[T]:
        return _Pass(self._iterable, self._ahead)

    def __len__(self) -> int:
        """The length of the iterable; TypeError if it has none."""
        if not isinstance(self._iterable, Sized):
            raise TypeError(f"a {type(self._iterable).__name__} has no length.")
        return len(self._iterable)


class _Pass(Generic[T]):
    """One pass over the data, and its process."""

    def __init__(self, iterable: Iterable[T], ahead: int) -> None:
        self._slots = _Slots(ahead)
        self._reports, reports = os.pipe()
        free, self._free = os.pipe()
        os.set_blocking(self._reports, False)
        pid = self._fork(iterable, reports, free)
        os.close(reports)
        os.close(free)
        self._process = os.pidfd_open(pid)
        files = [self._reports, self._free, self._process, *self._slots.files]
        self._end = weakref.finalize(self, _end, os.getpid(), pid, self._process, files)
        self._poll = select.poll()
        self._poll.register(self._reports, select.POLLIN)
        self._poll.register(self._process, select.POLLIN)
        self._waits = WaitTimes("prefetch")

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._end.alive:
            raise StopIteration
        begin = time.perf_counter()
        kind, slot, size = self._receive()
        if kind == _DONE:
            self._close()
            raise StopIteration
        arrays = read(np.array(self._slots.buffer(slot, size)))  # a copy: the loader fills the slot again
        if kind == _RAISED:
            self._close()
            _raise(arrays)
        with suppress(OSError):  # the loader has ended since
            os.write(self._free, bytes([slot]))
        batch = pickle.loads(arrays[0].data, buffers=arrays[1:])
        self._waits.add(time.perf_counter() - begin)
        return batch

    def _fork(self, iterable: Iterable[T], reports: int, free: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(self._reports)
                os.close(self._free)
                _load(iterable, _Loader(reports, free, self._slots), parent)
            finally:  # the child must never return into the training loop
                os._exit(1)
        return pid

    def _receive(self) -> tuple[int, int, int]:
        """The loader's next report. It is awaited for as long as the loader lives."""
        self._poll.poll()
        try:
            report = os.read(self._reports, _REPORT.size)
        except BlockingIOError:
            report = b""
        if report:
            return _REPORT.unpack(report)
        how = _exit_text(self._process)
        self._close()
        raise ProducerFailed(
            f"the process that loads the batches {how}, in the middle of the data. Look at what it printed; if the "
            "machine's memory is short, keep fewer batches ahead."
        )

    def _close(self) -> None:
        self._waits.flush()
        self._end()


class _Slots:
    """The memory of the batches: anonymous files that both processes map, and the loader makes larger."""

    def __init__(self, count: int) -> None:
        self.files = [os.memfd_create("maniple-batch") for _ in range(count)]
        self._maps: dict[int, Array] = {}

    def buffer(self, slot: int, size: int) -> Array:
        """The first `size` bytes of a slot."""
        known = self._maps.get(slot)
        if known is None or known.nbytes < size:
            os.posix_fallocate(self.files[slot], 0, -(-size // _GRAIN) * _GRAIN)  # nothing, if the loader has done it
            known = self._maps[slot] = np.frombuffer(mmap.mmap(self.files[slot], 0), np.uint8)
        return known[:size]


def _raise(arrays: list[Array]) -> NoReturn:
    """Raise the exception of the iterable, with the other process's traceback as its cause."""
    pickled, text = arrays[0].tobytes(), arrays[1].tobytes().decode()
    cause = ProducerFailed(f"in the process that loads the batches:\n{text}")
    try:
        error = pickle.loads(pickled) if pickled else None
    except Exception:  # its class cannot be restored from its arguments
        error = None
    if not isinstance(error, BaseException):
        raise cause
    raise error from cause


def _exit_text(process: int) -> str:
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
    """End the loader's process: by SIGTERM, and by SIGKILL after a second."""
    if os.getpid() != parent:  # a fork of the trainer, which has no such child
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


class _Cancelled(BaseException):
    """The parent has closed the pass."""


def _load(iterable: Iterable[Any], loader: "_Loader", parent: int) -> NoReturn:
    """In the child: send all items of `iterable`, or the exception it raises, and end the process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to both; the parent decides
    signal.signal(signal.SIGTERM, _cancel)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # the cores belong to the training
    try:
        for item in iterable:
            loader.send(_BATCH, _pickled(item))
        loader.report(_DONE)
    except _Cancelled:
        pass
    except BaseException as error:
        with suppress(_Cancelled):
            loader.send(_RAISED, _pickled_error(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _cancel(*_: object) -> NoReturn:
    raise _Cancelled  # not an exit: the iterable may have processes to end


class _Loader:
    """The child's end of the pipes."""

    def __init__(self, reports: int, free: int, slots: _Slots) -> None:
        self._reports, self._freed, self._slots = reports, free, slots
        self._free = deque(range(len(slots.files)))

    def send(self, kind: int, arrays: Sequence[Any]) -> None:
        """Wait for a free slot, fill it and report it."""
        batch = FeedBatch.of(arrays)
        if not self._free:
            freed = os.read(self._freed, 256)
            if not freed:
                raise _Cancelled
            self._free.extend(freed)
        slot = self._free.popleft()
        batch.write(self._slots.buffer(slot, batch.size_bytes))
        self.report(kind, slot, batch.size_bytes)

    def report(self, kind: int, slot: int = 0, size: int = 0) -> None:
        """Write a report."""
        try:
            os.write(self._reports, _REPORT.pack(kind, slot, size))
        except OSError:
            raise _Cancelled from None


class _TensorPickler(pickle.Pickler):
    """Pickles a torch tensor as an array, so that its values stay out of the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or type(obj) is not torch.Tensor or obj.requires_grad or obj.device.type != "cpu":
            return NotImplemented
        try:
            return _tensor, (obj.numpy(),)
        except (TypeError, RuntimeError):  # bfloat16, sparse and others: torch's own pickling
            return NotImplemented


def _tensor(array: Array) -> Any:
    torch: Any = importlib.import_module("torch")  # perhaps only the iterable has imported it, in its process
    return torch.from_numpy(array)


def _pickled(item: Any) -> list[Any]:
    """The pickle of `item`, and the memory of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _TensorPickler(file, protocol=5, buffer_callback=buffers.append).dump(item)
    return [np.frombuffer(file.getvalue(), np.uint8), *(np.frombuffer(one.raw(), np.uint8) for one in buffers)]


def _pickled_error(error: BaseException) -> list[Any]:
    """An exception, empty if it cannot be pickled, and its traceback."""
    text = np.frombuffer("".join(traceback.format_exception(error)).encode(errors="replace"), np.uint8)
    try:
        return [np.frombuffer(pickle.dumps(error), np.uint8), text]
    except Exception:
        return [np.empty(0, np.uint8), text]
