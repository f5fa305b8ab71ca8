"""The center in shared memory: local workers map it and apply the rule themselves.

    offset 0     header     magic, state, bytes of the table, parameters
    4096         table      names, shapes, dtypes (JSON), by which a joiner is checked
    ...          versions   one per parameter; odd while somebody writes
                 holders    rank + 1 of the last who locked it
    ...          one flat vector per dtype

Each parameter has a lock (one byte of the file, `locks`) and its update is a transaction. A worker killed
in the middle of one leaves each element old or new, the lock free, and the version odd, which the next
holder reports as torn.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from maniple.center.locks import ByteLocks, Patience
from maniple.center.segment import Segment
from maniple.contracts import Array, Exchanger, Model, Moment, OnValue, Outcome
from maniple.errors import InvalidArgument, SharedMemoryFull
from maniple.layout import Layout

_MAGIC = 0x31454C50494E414D  # "MANIPLE1"
_READY = 1
_PAGE = 4096
_CREATE = 1 << 40  # the byte that creators lock; parameter i locks byte i
LOCK_TIMEOUT_S = 60.0


class Shared:
    """One worker's (or the host's) view of a center in shared memory."""

    def __init__(self, segment: Segment, path: Path, *, rank: int = -1, lock: bool = True) -> None:
        self.layout: Layout
        self._segment = segment
        self._path = path
        self._rank = rank
        self._lock = lock
        self._locks = ByteLocks(path)

    @classmethod
    def open_or_create(
        cls, segment: Segment, name: str, model: Model, *, rank: int, lock: bool = True
    ) -> tuple["Shared", bool]:
        """The center `name`: made from `model` by the first who asks, found by everybody else.

        The second value is True for the creator. Simultaneous creators wait for the first; a creator who
        dies half-way is replaced by the next.
        """
        layout = Layout(model.entries)
        center = cls(segment, segment.path / name, rank=rank, lock=lock)
        try:
            with center._locks.hold(_CREATE, timeout_s=LOCK_TIMEOUT_S, what="the creator of the center"):
                is_creator = not center._is_ready()
                if is_creator:
                    center._create(layout, model)
            center._attach()
            layout.require(center.layout, "the center")
        except BaseException:
            center.close()
            raise
        return center, is_creator

    @classmethod
    def open(cls, segment: Segment, path: Path) -> "Shared | None":
        """The center in `path`, as the host sees it, or None if nobody has finished making it."""
        center = cls(segment, path)
        if not center._is_ready():
            center.close()
            return None
        center._attach()
        return center

    @property
    def live(self) -> int:
        """p, the workers alive now."""
        return self._segment.live

    def exchange(self, model: Model, rule: Exchanger, memory: Sequence[Array] | None, moment: Moment) -> Outcome:
        """Apply `rule` to every parameter of `model` and of the center."""

        def apply(i: int, x: Array, c: Array) -> bool:
            moment.staleness = max(0, self._versions[i] - self._seen[i]) // 2
            past = None if memory is None else memory[i]
            is_clean = rule.exchange(x, c, past, moment)
            if self.layout.is_half(i):
                self.layout.round(i, x)
                if past is not None:
                    rule.rounded(x, past)
            return is_clean

        return self._pass(model, apply, ways=2)

    def pull(self, model: Model, on_value: OnValue | None = None, *, is_look: bool = False) -> Outcome:
        """Set `model` to the center; `on_value` sees each parameter's value meanwhile.

        A look (`is_look`) does not count as news: staleness goes on being measured from the last exchange or pull.
        """

        def apply(i: int, x: Array, c: Array) -> bool:
            x[:] = c
            self.layout.round(i, x)
            if on_value is not None:
                on_value(i, x)
            return True

        return self._pass(model, apply, writes=False, is_look=is_look)

    def release(self) -> None:
        """Let this process' view of the pages go; they stay in shared memory and come back when touched."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def push(self, model: Model, on_value: OnValue | None = None) -> Outcome:
        """Set the center to `model`, but for parameters that are not finite; `on_value` as in `pull`."""

        def apply(i: int, x: Array, c: Array) -> bool:
            if not np.isfinite(x).all():
                return False
            c[:] = x
            if on_value is not None:
                on_value(i, x)
            return True

        return self._pass(model, apply)

    def array(self, i: int) -> Array:
        """Parameter i itself, flat, in shared memory; read or written without its lock."""
        return self._arrays[i]

    def read(self, i: int) -> Array:
        """A copy of parameter i, in its shape."""
        value = np.empty_like(self._arrays[i])
        with self._locks.hold(i, timeout_s=LOCK_TIMEOUT_S, what=self._describe(i)):
            value[:] = self._arrays[i]
        return value.reshape(self.layout.entries[i].shape)

    @property
    def versions(self) -> list[int]:
        """How often each parameter was written: two per write, odd while or after a write was cut short."""
        return list(self._versions)

    def close(self) -> None:
        """Let go of locks and mapping. The mapping itself ends with the last array that points into it."""
        self._locks.close()

    def _pass(
        self,
        model: Model,
        apply: Callable[[int, Array, Array], bool],
        *,
        writes: bool = True,
        ways: int = 1,
        is_look: bool = False,
    ) -> Outcome:
        outcome = Outcome(size_bytes=ways * self.layout.size_bytes)
        versions, seen = self._versions, self._seen
        model.begin()
        stale = 0
        with closing(self._locked()) as turns:  # an error on the way gives the lock back at once
            for i in turns:
                version = versions[i]
                if version & 1:
                    version += 1
                    if self._lock:
                        outcome.torn.append(self.layout.entries[i].name)
                stale += max(0, version - seen[i]) // 2
                value = model.array(i)
                if writes:
                    versions[i] = version + 1
                if not apply(i, value, self._arrays[i]):
                    outcome.refused.append(self.layout.entries[i].name)
                if writes:
                    version += 2
                versions[i] = version  # after a pull too: what was torn has been reported, once
                if not is_look:
                    seen[i] = version
                model.commit(i)
        outcome.staleness = stale / len(seen)
        return outcome

    def _locked(self) -> Generator[int]:
        """Each parameter once, locked while it is out; those that others hold come later."""
        count = len(self._arrays)
        start = max(0, self._rank) * count // max(1, self._segment.live) % count
        waiting = deque([*range(start, count), *range(start)])  # workers start apart, so that they seldom meet
        if not self._lock:
            yield from waiting
            return
        patience, busy = None, 0
        while waiting:
            i = waiting.popleft()
            if not self._locks.take(i):
                waiting.append(i)
                busy += 1
                if busy >= len(waiting):  # all that remain are held by others
                    patience = patience or Patience(LOCK_TIMEOUT_S)
                    patience.wait(self._describe(i))
                    busy = 0
                continue
            self._holders[i] = self._rank + 1
            try:
                yield i
            finally:
                self._locks.give(i)
            patience, busy = None, 0

    def _describe(self, i: int) -> str:
        holder = self._holders[i]
        who = f"worker {holder - 1}" if holder else "the host"
        return f"the lock of parameter {self.layout.entries[i].name!r}, last held by {who}"

    def _is_ready(self) -> bool:
        with self._path.open("rb") as file:
            head = np.frombuffer(file.read(16), np.int64)
        return len(head) == 2 and head[0] == _MAGIC and head[1] == _READY

    def _create(self, layout: Layout, model: Model) -> None:
        offsets, size = _offsets(layout)
        with self._path.open("r+b") as file:
            file.truncate(0)  # what a creator who failed has left
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                file.truncate(0)
                space = os.statvfs(self._path.parent)
                raise SharedMemoryFull(
                    f"the center needs {_megabytes(size)} in {self._path.parent.parent}, which has "
                    f"{_megabytes(space.f_bavail * space.f_frsize)} free ({error.strerror}). Enlarge it "
                    "(`mount -o remount,size=8G /dev/shm`; in a container `--shm-size=8g`), remove what fills it, "
                    "or set MANIPLE_SHM to another folder that is held in memory."
                ) from error
            memory = mmap.mmap(file.fileno(), size)
        memory[_PAGE : _PAGE + len(layout.table)] = layout.table
        header = np.frombuffer(memory, np.int64, 4)
        header[2:] = len(layout.table), len(layout.entries)
        model.begin()
        for i, (entry, place) in enumerate(
            zip(layout.entries, layout.views(_vectors(layout, memory, offsets)), strict=True)
        ):
            value = model.array(i)
            if not np.isfinite(value).all():
                raise InvalidArgument(
                    f"parameter {entry.name!r} holds values that are not finite, so it cannot become the center. "
                    "Look at the model's initialisation."
                )
            place[:] = value
        header[:2] = _MAGIC, _READY

    def _attach(self) -> None:
        with self._path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        header = np.frombuffer(memory, np.int64, 4)
        count = int(header[3])
        self.layout = Layout.from_table(memory[_PAGE : _PAGE + int(header[2])])
        offsets, _ = _offsets(self.layout)
        counters = memoryview(memory)[offsets["counters"] :]
        self._memory = memory
        self._versions = counters[: 8 * count].cast("q")
        self._holders = counters[8 * count : 16 * count].cast("q")
        self._arrays = self.layout.views(_vectors(self.layout, memory, offsets))
        self._seen = list(self._versions)


def _offsets(layout: Layout) -> tuple[dict[str, int], int]:
    """Where the parts of the file begin, and its size."""
    offsets: dict[str, int] = {}
    end = _PAGE + _whole_pages(len(layout.table))
    offsets["counters"] = end
    end += _whole_pages(16 * len(layout.entries))
    for dtype, size in layout.sizes.items():
        offsets[dtype] = end
        end += _whole_pages(np.dtype(dtype).itemsize * size)
    return offsets, end


def _vectors(layout: Layout, memory: mmap.mmap, offsets: dict[str, int]) -> dict[str, Array]:
    return {dtype: np.frombuffer(memory, dtype, size, offsets[dtype]) for dtype, size in layout.sizes.items()}


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
