"""The center in shared memory: local workers map it and apply the rule themselves.

Each parameter has a lock, one byte of the file, and a version. A worker that is killed during a write leaves each
element old or new, the lock free and the version odd; the next holder of the lock reports the parameter as torn.
What a killed host has begun for a remote worker is completed instead (`staging`).
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from maniple.center.staging import existing_files, finish_pending
from maniple.clock import Deadline
from maniple.contracts import Array, ExchangeInfo, Exchanger, FlatModel, OnValue, Outcome
from maniple.errors import LayoutMismatch
from maniple.layout import Layout
from maniple.memory.locks import ByteLocks
from maniple.memory.segment import CenterFile, Segment

_CREATE = 1 << 40  # the byte that creators lock; parameter i is locked by byte i
LOCK_TIMEOUT_S = 60.0  # an exchange holds a lock for milliseconds: after a minute its holder must be stopped


class SharedCenter:
    """One worker's (or the host's) view of a center in shared memory."""

    def __init__(self, segment: Segment, path: Path, *, rank: int = -1, lock: bool = True) -> None:
        """Map a center that is ready; `open_or_create` and `open` see to that."""
        self._segment, self._rank, self._lock = segment, rank, lock
        self._memory = memory = CenterFile(path)
        self.name, self.note, self.layout = path.name, memory.note, memory.layout
        self._versions, self._holders, self._arrays = memory.versions, memory.holders, memory.arrays
        self._seen = list(self._versions)
        self._size_bytes = self.layout.size_bytes
        self._is_half = [self.layout.is_half(i) for i in range(len(self._arrays))]
        self._locks = ByteLocks(path)

    @classmethod
    def open_or_create(
        cls,
        segment: Segment,
        name: str,
        model: FlatModel,
        *,
        rank: int,
        lock: bool = True,
        note: str = "",
        timeout_s: float = LOCK_TIMEOUT_S,
    ) -> tuple["SharedCenter", bool]:
        """Open the center `name`, or create it from `model`; return it and whether it was created.

        The creator's `note` is stored. Concurrent creators wait for the first; one that dies is replaced by the next.
        """
        layout, path = Layout(model.entries, is_numeric=True), segment.path / name
        with (
            closing(ByteLocks(path)) as locks,
            locks.hold(_CREATE, timeout_s=timeout_s, what="the creator of the center"),
        ):
            is_creator = not CenterFile.is_ready(path)
            if is_creator:
                CenterFile.create(path, layout, model, note)
        center = cls(segment, path, rank=rank, lock=lock)
        try:
            layout.require(center.layout, "the center")
        except LayoutMismatch:
            center.close()
            raise
        return center, is_creator

    @classmethod
    def open(cls, segment: Segment, path: Path, *, rank: int = -1) -> "SharedCenter | None":
        """Open the center in `path`, as the host by default; None if it does not exist or is not complete."""
        return cls(segment, path, rank=rank) if path.exists() and CenterFile.is_ready(path) else None

    @property
    def live(self) -> int:
        """p, the number of live workers."""
        return self._segment.live

    def exchange(
        self, model: FlatModel, rule: Exchanger, memory: Sequence[Array] | None, moment: ExchangeInfo
    ) -> Outcome:
        """Apply `rule` to every parameter of `model` and of the center."""

        def apply(i: int, x: Array, c: Array) -> bool:
            moment.staleness = max(0, self._versions[i] - self._seen[i]) // 2
            past = None if memory is None else memory[i]
            is_clean = rule.exchange(x, c, past, moment)
            if self._is_half[i]:
                round_replica(self.layout, i, x, rule, past)
            return is_clean

        return self._for_each(model, apply, ways=2)

    def pull(self, model: FlatModel, on_value: OnValue | None = None, *, peek: bool = False) -> Outcome:
        """Set `model` to the center; `on_value` receives each parameter's value, under its lock.

        With `peek`, staleness is still measured from the last exchange or pull before.
        """

        def apply(i: int, x: Array, c: Array) -> bool:
            x[:] = c
            self.layout.round(i, x)
            if on_value is not None:
                on_value(i, x)
            return True

        return self._for_each(model, apply, writes=False, peek=peek)

    def push(self, model: FlatModel, on_value: OnValue | None = None) -> Outcome:
        """Set the center to `model`, except for parameters that are not finite; `on_value` as in `pull`."""

        def apply(i: int, x: Array, c: Array) -> bool:
            if not np.isfinite(x).all():
                return False
            c[:] = x
            if on_value is not None:
                on_value(i, x)
            return True

        return self._for_each(model, apply)

    def _for_each(
        self,
        model: FlatModel,
        apply: Callable[[int, Array, Array], bool],
        *,
        writes: bool = True,
        ways: int = 1,
        peek: bool = False,
    ) -> Outcome:
        """Call `apply(i, replica's value, center's value)` for each parameter, under its lock.

        Parameters that others hold are deferred.
        """
        outcome = Outcome(size_bytes=ways * self._size_bytes)
        versions, seen, holders = self._versions, self._seen, self._holders
        is_locking, try_lock, unlock = self._lock, self._locks.take, self._locks.give
        model.begin()
        count, stale = len(seen), 0
        waiting = deque(visiting_order(count, self._rank, self._segment.live))
        busy, deadline = 0, None  # how many of those waiting were found locked in a row
        while waiting:
            i = waiting.popleft()
            if is_locking and not try_lock(i):
                waiting.append(i)
                busy += 1
                if busy >= len(waiting):
                    deadline = deadline or Deadline(LOCK_TIMEOUT_S)
                    deadline.wait(self.describe_lock(i))
                    busy = 0
                continue
            try:
                holders[i] = self._rank + 1
                version = versions[i]
                if version & 1 and is_locking and self._finish_pending(i):
                    version = versions[i]
                if version & 1:
                    version += 1
                    if is_locking:
                        outcome.torn.append(self.layout.entries[i].name)
                stale += max(0, version - seen[i]) // 2
                value = model.array(i)
                if writes:
                    versions[i] = version + 1
                if not apply(i, value, self._arrays[i]):
                    outcome.refused.append(self.layout.entries[i].name)
                if writes:
                    version += 2
                versions[i] = version  # after a pull too: a torn parameter is reported once
                if not peek:
                    seen[i] = version
                model.commit(i)
            finally:
                if is_locking:
                    unlock(i)
            busy, deadline = 0, None
        outcome.staleness = stale / count
        return outcome

    def release(self) -> None:
        """Unmap the pages from this process. They stay in shared memory and are mapped again on access."""
        self._memory.release()

    def close(self) -> None:
        """Give up the locks. The mapping ends with the last array that refers to it."""
        self._locks.close()

    # Single parameters, for the host.

    @contextmanager
    def locked(self, i: int) -> Generator[None]:
        """Hold the lock of parameter i for the length of a `with` block."""
        deadline = Deadline(LOCK_TIMEOUT_S)
        while not self.try_lock(i):
            deadline.wait(self.describe_lock(i))
        try:
            yield
        finally:
            self.unlock(i)

    def try_lock(self, i: int) -> bool:
        """Lock parameter i if it is free, and complete what a killed host has begun on it."""
        if not self._locks.take(i):
            return False
        self._holders[i] = self._rank + 1
        self._finish_pending(i)
        return True

    def unlock(self, i: int) -> None:
        """Unlock parameter i."""
        self._locks.give(i)

    def describe_lock(self, i: int) -> str:
        """The lock of parameter i and its last holder, for messages."""
        holder = self._holders[i]
        who = f"worker {holder - 1}" if holder else "the host"
        return f"the lock of parameter {self.layout.entries[i].name!r}, last held by {who}"

    def array(self, i: int) -> Array:
        """Parameter i itself, flat, in shared memory. The caller holds its lock."""
        return self._arrays[i]

    def read(self, i: int, under_lock: Callable[[], None] | None = None) -> Array:
        """Return a copy of parameter i in its shape; `under_lock` is called while the lock is held."""
        value = np.empty_like(self._arrays[i])
        with self.locked(i):
            value[:] = self._arrays[i]
            if under_lock is not None:
                under_lock()
        return value.reshape(self.layout.entries[i].shape)

    def is_torn(self, i: int) -> bool:
        """Whether a local worker died while it wrote parameter i, and it has not been written since."""
        return bool(self._versions[i] & 1)

    def version(self, i: int) -> int:
        """Twice the number of writes of parameter i, an interrupted one included."""
        return self._versions[i] + (self._versions[i] & 1)

    @property
    def versions(self) -> list[int]:
        """The raw versions: 2 per write, odd during a write and after an interrupted one."""
        return list(self._versions)

    def begin_write(self, i: int) -> None:
        """Mark parameter i, whose lock is held, as being written."""
        self._versions[i] |= 1

    def end_write(self, i: int) -> None:
        """Mark the write of parameter i as complete."""
        self._versions[i] = (self._versions[i] | 1) + 1

    def restore_versions(self, versions: Sequence[int]) -> None:
        """Continue with the versions of an earlier center, whose values were restored from a snapshot."""
        for i, version in enumerate(versions):
            self._versions[i] = version + (version & 1)

    def _finish_pending(self, i: int) -> bool:
        """Complete what a killed host has begun on parameter i, whose lock is held; False if there is nothing."""
        return bool(self._versions[i] & 1) and finish_pending(self._segment.path, self, i)


def visiting_order(count: int, rank: int, live: int) -> list[int]:
    """All parameters, starting at one that depends on the rank: workers seldom wait for each other's locks."""
    start = max(0, rank) * count // max(1, live) % count
    return [*range(start, count), *range(start)]


def round_replica(layout: Layout, i: int, x: Array, rule: Exchanger, memory: Array | None) -> None:
    """Round a replica's new value `x` of parameter i to half precision, if that is what the replica holds."""
    if layout.is_half(i):
        layout.round(i, x)
        if memory is not None:
            rule.rounded(x, memory)


def finish_all(segment: Segment) -> int:
    """Complete everything that the previous host had begun when it was killed; return how many intents."""
    count = 0
    for _, staging in existing_files(segment.path):
        with closing(staging):
            intent = staging.pending()
            center = SharedCenter.open(segment, segment.path / intent.center) if intent is not None else None
            if intent is None or center is None:
                continue
            with closing(center), center.locked(intent.i):  # completes it if the version is odd
                staging.finish(center, intent.i)
            count += 1
    return count
