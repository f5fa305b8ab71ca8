"""A worker process of a pool: executes the caller's requests, one after the other, until the caller is gone.

The command line of `main` is PIPE LIFE SEGMENT RANK WORLD: PIPE and LIFE are file descriptors, of the socket for
requests and of a pipe that the kernel closes when the caller dies.
"""

import contextlib
import io
import os
import pickle
import select
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import cloudpickle
import numpy as np

from maniple.collectives.api import CollectiveCalls
from maniple.collectives.shared_memory import SharedMemoryCollectives
from maniple.collectives.values import is_tensor, written
from maniple.contracts import Array
from maniple.memory.segment import Segment
from maniple.pool.data import (
    LINE,
    DataMemory,
    arrays_of,
    close_data,
    drop_object,
    find_object,
    is_numpy_compatible,
    run_collective,
    store_object,
)
from maniple.pool.function import CallTimes, FunctionCall, FunctionSpec, execute, part_of, take_rows
from maniple.pool.training import TrainingFunction

# Files in the segment: the large arrays of requests, and the number of slices that each worker has done and has.
REQUESTS_FILE, PROGRESS_FILE = "requests", "progress"
DONE, FAILED, INTERRUPTED = "done", "failed", "interrupted"
_DAY_S = 86_400.0  # no limit in practice: collectives notice a dead worker, and the caller can interrupt
_POLL_MS = 1000
_SPIN_S = 0.001  # longer than a serial program takes between two calls
_LARGE_BYTES = 1 << 14  # below this, a copy within the pickle is faster than a separate buffer
_COUNT = struct.Struct("<Q")


def replies_file(rank: int) -> str:
    """The file of the large arrays in a worker's replies."""
    return f"replies-{rank}"


def main() -> None:
    """Serve requests until the caller closes the socket."""
    pipe_file, life, segment, rank, world = sys.argv[1:]
    pipe = Connection(int(pipe_file))
    threading.Thread(target=_end_with_caller, args=(int(life), Path(segment)), daemon=True).start()
    worker = PoolWorker(Path(segment), int(rank), int(world))
    signal.signal(signal.SIGINT, worker.on_interrupt)
    pipe.send_bytes(b"")  # ready
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLIN)
    while True:
        try:
            wait_readable(poll, _SPIN_S, _POLL_MS)
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            reply = worker.answer(message)
        except KeyboardInterrupt:  # while the reply was packed
            reply = worker.interrupted()
        for stream in (sys.stdout, sys.stderr):  # prints of a call appear before its result
            with contextlib.suppress(AttributeError, OSError, ValueError):  # None, closed, or a replacement
                stream.flush()
        try:
            pipe.send_bytes(reply)
        except OSError:  # the caller is gone
            return


def _end_with_caller(life: int, segment: Path) -> None:
    """End this process when the caller is gone, and remove the pool's shared memory."""
    parent, poll = os.getppid(), select.poll()
    poll.register(life, select.POLLIN)
    while os.getppid() == parent and not poll.poll(_POLL_MS):  # the pipe becomes readable at its end only
        pass
    shutil.rmtree(segment, ignore_errors=True)
    os._exit(1)


class PoolWorker:
    """Executes requests: each `_do_VERB` is one."""

    _do_drop = staticmethod(drop_object)
    _do_get = staticmethod(find_object)
    _do_free = staticmethod(close_data)

    def __init__(self, segment: Path, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._segment = Segment(segment)
        self._requests = DataMemory(segment / REQUESTS_FILE)
        self._replies = DataMemory(segment / replies_file(rank), is_new=True)
        self._progress = DataMemory(segment / PROGRESS_FILE).view("int64", (world, 2))
        self._functions: dict[int, tuple[FunctionSpec, TrainingFunction | None]] = {}
        self._group = 0  # the number of the collectives to use: another one after a call that was cut short
        self._collectives: tuple[int, SharedMemoryCollectives] | None = None
        self._waited_before_s = 0.0  # in collectives that were replaced
        self._times = CallTimes()
        self._commit: Callable[[], None] | None = None  # the state change of a call, once all workers have succeeded
        self._is_interruptible = False

    def answer(self, message: bytes | memoryview) -> bytes:
        """Execute a request and pack the reply."""
        try:
            self._is_interruptible = True
            verb, arguments, self._group = unpack(message, self._requests)
            value = getattr(self, f"_do_{verb}")(*arguments)
            begin = time.perf_counter()
            reply = pack((DONE, value), self._replies)
            self._times.copy_s += time.perf_counter() - begin
        except KeyboardInterrupt:
            self._is_interruptible = False
            reply = self.interrupted()
        except BaseException as error:
            self._is_interruptible = False
            reply = self._failure(error)
        finally:
            self._is_interruptible = False
        return reply

    def interrupted(self) -> bytes:
        """The reply to a request that the caller has interrupted."""
        return pack((INTERRUPTED, None), self._replies)

    def on_interrupt(self, *_: Any) -> None:
        """Handle SIGINT: it is ignored between requests and while state changes are committed."""
        if self._is_interruptible:
            raise KeyboardInterrupt

    def _failure(self, error: BaseException) -> bytes:
        text = "".join(traceback.format_exception(error))
        short = traceback.format_exception_only(error)[-1].strip()  # works for errors whose __str__ fails
        try:
            pickle.loads(cloudpickle.dumps(error))  # some can be pickled, but not unpickled
            return pack((FAILED, (error, short, text)), self._replies)
        except Exception:
            return pack((FAILED, (None, short, text)), self._replies)

    def _do_path(self, path: list[str]) -> None:
        sys.path[:] = path

    def _do_define(self, number: int, spec: FunctionSpec, unused: list[int]) -> None:
        """Keep a function, and forget those that the program has released."""
        for one in unused:
            self._functions.pop(one, None)
        self._functions[number] = spec, None if spec.training is None else spec.training()

    def _do_call(self, number: int, call: tuple[Any, ...], updated: dict[str, int]) -> tuple[Any, float]:
        def show_progress(k: int, n: int) -> None:
            self._progress[self.rank] = k, n

        show_progress(0, 0)
        (spec, training), waited_s = self._functions[number], self._waited_s
        result = execute(
            spec,
            FunctionCall(*call),
            rank=self.rank,
            world=self.world,
            times=self._times,
            on_slice=show_progress,
            training=training,
            collectives=self._all_workers,
        )
        self._times.wait_s += self._waited_s - waited_s
        self._times.compute_s -= self._waited_s - waited_s

        def commit() -> None:
            begin = time.perf_counter()
            if training is not None:
                training.commit(spec.phase)
            for name, value in result.updates.items():
                store_object(updated[name], value)
            self._times.compute_s += time.perf_counter() - begin

        self._commit = commit
        return result.output, result.weight

    def _do_commit(self) -> None:
        """Apply the state change of the last call. It is not interrupted: all workers do it, or none."""
        self._is_interruptible = False
        commit, self._commit = self._commit, None
        if commit is not None:
            commit()

    def _do_store(self, number: int, value: Any, is_factory: bool) -> None:
        store_object(number, value() if is_factory else value)

    def _do_scatter(self, number: int, value: Any) -> None:
        rows = take_rows(value, part_of(range(len(value)), self.world, self.rank))
        store_object(number, rows.copy() if isinstance(rows, np.ndarray) else rows.clone())

    def _do_shapes(self, number: int, name: str) -> list[tuple[int, ...]]:
        return [tuple(array.shape) for array in arrays_of(find_object(number, name), name)]

    def _do_collective(self, verb: str, objects: list[tuple[int, str]], options: dict[str, Any]) -> None:
        begin, calls, waited_s = time.perf_counter(), CollectiveCalls(self._all_workers()), self._waited_s
        for number, name in objects:
            run_collective(calls, verb, number, name, options)
        waited_s = self._waited_s - waited_s
        self._times.wait_s += waited_s
        self._times.copy_s += time.perf_counter() - begin - waited_s

    def _do_profile(self, is_reset: bool) -> dict[str, float]:
        row = self._times.row()
        if is_reset:
            self._times = CallTimes()
        return row

    @property
    def _waited_s(self) -> float:
        current_s = 0.0 if self._collectives is None else self._collectives[1].membership.waited_s
        return self._waited_before_s + current_s

    def _all_workers(self) -> SharedMemoryCollectives:
        if self._collectives is None or self._collectives[0] != self._group:
            if self._collectives is not None:
                self._waited_before_s = self._waited_s
                self._collectives[1].close()
            name = f"collectives-{self._group}"
            group = SharedMemoryCollectives(self._segment, name, rank=self.rank, world=self.world, deadline_s=_DAY_S)
            self._collectives = self._group, group
        return self._collectives[1]


def wait_readable(poll: select.poll, spin_s: float, timeout_ms: float) -> list[tuple[int, int]]:
    """The readable descriptors of `poll`. It spins for `spin_s` first: an idle core takes longer to wake up."""
    deadline = time.perf_counter() + spin_s
    while not (found := poll.poll(0)) and time.perf_counter() < deadline:
        os.sched_yield()
    return found or poll.poll(timeout_ms)


def pack(value: Any, memory: DataMemory, zero_copy: Sequence[Any] = ()) -> bytes:
    """Serialize `value`, with its large arrays in `memory`.

    The receiver sees arrays in `zero_copy` in place, until the next message; it copies the others.
    """
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE_BYTES:
            return True
        large.append(raw)
        return False

    stream = io.BytesIO()
    pickler = _PoolPickler(stream, protocol=5, buffer_callback=is_small)
    pickler.zero_copy = {id(array) for array in zero_copy}
    pickler.dump(value)
    memory.reserve(sum(_padded(raw.nbytes) for raw in large))
    offset = 0
    for raw in large:
        memory.view("uint8", (raw.nbytes,), offset)[:] = np.frombuffer(raw, np.uint8)
        offset += _padded(raw.nbytes)
    sizes = [raw.nbytes << 1 | (id(raw.obj) in pickler.zero_copy) for raw in large]
    return struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes) + stream.getbuffer()


def unpack(data: bytes | memoryview, memory: DataMemory) -> Any:
    """The value of a message. Its zero-copy arrays are valid until the sender packs the next one."""
    (count,) = _COUNT.unpack_from(data)
    buffers: list[Any] = []
    offset = 0
    for word in struct.unpack_from(f"<{count}Q", data, _COUNT.size):
        size, is_zero_copy = word >> 1, word & 1
        view = memory.view("uint8", (size,), offset)
        buffers.append(view if is_zero_copy else view.copy())
        offset += _padded(size)
    return pickle.loads(memoryview(data)[_COUNT.size * (1 + count) :], buffers=buffers)


def pickle_by_value(function: Any) -> None:
    """Have a function pickled by value if workers could not import its module."""
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    if module is None or module.__name__ in {"__main__", "__mp_main__"}:
        return
    top = module.__name__.partition(".")[0]
    # Such modules exist under pytest with --import-mode=importlib.
    if not any(finder.find_spec(top, None) for finder in sys.meta_path):
        cloudpickle.register_pickle_by_value(module)


class _PoolPickler(cloudpickle.Pickler):
    zero_copy: set[int]  # ids of objects: another object over the same memory is copied

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj) and type(obj).__name__ == "Tensor" and is_numpy_compatible(obj):
            array = obj.detach().cpu().numpy()
            if id(obj) in self.zero_copy:
                self.zero_copy.add(id(array))
            return written, ("tensor", array)
        if type(obj) is np.ndarray and obj.size and obj.flags.c_contiguous and obj.dtype.kind in "biufc":
            return _array, (pickle.PickleBuffer(cast(Any, obj)), obj.dtype.str, obj.shape)
        if type(obj) is types.FunctionType and obj.__module__.startswith("maniple."):
            return NotImplemented  # imported by the worker
        return super().reducer_override(obj)


def _array(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Array:
    """An array from plain values, which pickle faster than NumPy's own reduction."""
    return np.frombuffer(buffer, dtype).reshape(shape)


def _padded(size: int) -> int:
    return size + -size % LINE
