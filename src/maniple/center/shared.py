"""The center in shared memory: local workers map it and apply the rule themselves.

Each parameter has a lock (one byte of the file, `locks`) and its update is a transaction. A worker killed
in the middle of one leaves each element old or new, the lock free, and the version odd, which the next
holder reports as torn. What a killed host had begun for a remote worker is finished instead (`stage`).
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from maniple.center.locks import ByteLocks, Patience, turns
from maniple.center.memory import Memory
from maniple.center.segment import Segment
from maniple.center.stage import finish_pending
from maniple.contracts import Array, Exchanger, Model, Moment, OnValue, Outcome
from maniple.layout import Layout

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
        cls,
        segment: Segment,
        name: str,
        model: Model,
        *,
        rank: int,
        lock: bool = True,
        note: str = "",
        timeout_s: float = LOCK_TIMEOUT_S,
    ) -> tuple["Shared", bool]:
        """The center `name`: made from `model` by the first who asks, found by everybody else.

        The second value is True for the creator, whose `note` is kept. Simultaneous creators wait for the first; a
        creator who dies half-way is replaced by the next.
        """
        layout = Layout(model.entries, is_numeric=True)
        center = cls(segment, segment.path / name, rank=rank, lock=lock)
        try:
            with center._locks.hold(_CREATE, timeout_s=timeout_s, what="the creator of the center"):
                is_creator = not Memory.is_ready(center._path)
                if is_creator:
                    Memory.create(center._path, layout, model, note)
            center._attach()
            layout.require(center.layout, "the center")
        except BaseException:
            center.close()
            raise
        return center, is_creator

    @classmethod
    def open(cls, segment: Segment, path: Path, *, rank: int = -1) -> "Shared | None":
        """The center in `path`, by default as the host sees it, or None if nobody has finished making it."""
        center = cls(segment, path, rank=rank)
        try:
            if not Memory.is_ready(path):
                center.close()
                return None
            center._attach()
        except BaseException:
            center.close()
            raise
        return center

    @property
    def name(self) -> str:
        """The file's name in the segment."""
        return self._path.name

    @property
    def note(self) -> str:
        """What the creator noted."""
        return self._memory.note

    @property
    def live(self) -> int:
        """p, the workers alive now."""
        return self._segment.live

    @contextmanager
    def held(self, i: int) -> Generator[None]:
        """Hold the lock of parameter i for the length of a `with` block."""
        patience = Patience(LOCK_TIMEOUT_S)
        while not self.take(i):
            patience.wait(self.describe(i))
        try:
            yield
        finally:
            self.give(i)

    def take(self, i: int) -> bool:
        """Try to lock parameter i, without waiting."""
        if not self._take(i):
            return False
        self._mend(i)
        return True

    def give(self, i: int) -> None:
        """Unlock parameter i."""
        self._locks.give(i)

    def is_torn(self, i: int) -> bool:
        """A local worker died in the middle of parameter i, and nobody has written it since."""
        return bool(self._versions[i] & 1)

    def version(self, i: int) -> int:
        """Twice the number of times that parameter i was written; rounded up while or after a write was cut short."""
        return self._versions[i] + (self._versions[i] & 1)

    def begin_write(self, i: int) -> None:
        """Note that parameter i, whose lock is held, is being written."""
        self._versions[i] |= 1

    def end_write(self, i: int) -> None:
        """Note that it is whole again."""
        self._versions[i] = (self._versions[i] | 1) + 1

    def settle(self, versions: Sequence[int]) -> None:
        """Take over the versions of an earlier center whose values were restored here."""
        for i, version in enumerate(versions):
            self._versions[i] = version + (version & 1)

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
        self._memory.release()

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

    def read(self, i: int, meanwhile: Callable[[], None] | None = None) -> Array:
        """A copy of parameter i, in its shape; `meanwhile` is called while nobody else can write it."""
        value = np.empty_like(self._arrays[i])
        with self.held(i):
            value[:] = self._arrays[i]
            if meanwhile is not None:
                meanwhile()
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
                if version & 1 and self._lock and self._mend(i):
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
        start = max(0, self._rank) * count // max(1, self._segment.live) % count  # apart, so that they seldom meet
        if not self._lock:
            return (i for i in [*range(start, count), *range(start)])
        return turns(
            count,
            start,
            take=self._take,
            give=self._locks.give,
            describe=self.describe,
            timeout_s=LOCK_TIMEOUT_S,
        )

    def _take(self, i: int) -> bool:
        if not self._locks.take(i):
            return False
        self._holders[i] = self._rank + 1
        return True

    def _mend(self, i: int) -> bool:
        """Finish what a killed host has left half-done in parameter i, whose lock is held; False if nothing."""
        return bool(self._versions[i] & 1) and finish_pending(self._segment.path, self, i)

    def describe(self, i: int) -> str:
        """The lock of parameter i, in words."""
        holder = self._holders[i]
        who = f"worker {holder - 1}" if holder else "the host"
        return f"the lock of parameter {self.layout.entries[i].name!r}, last held by {who}"

    def _attach(self) -> None:
        self._memory = memory = Memory(self._path)
        self.layout = memory.layout
        self._versions, self._holders, self._arrays = memory.versions, memory.holders, memory.arrays
        self._seen = list(self._versions)
