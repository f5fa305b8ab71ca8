"""The center in shared memory: local workers map it and apply the rule themselves.

Each chunk has a lock, one byte of the file, and a version. A worker that is killed during a write leaves each element
old or new, the lock free and the version odd; the next holder of the lock reports the chunk's parameters as torn.
What a killed host has begun for a remote worker is completed instead (`staging`).

A worker that is stopped during a write keeps the lock, since it would continue writing when it wakes up. The chunk is
then stuck: exchanges leave it out, and readers copy it without the lock. Its contributions are not lost, as they stay
in the difference between replica and center. The first process that waits for the lock in vain marks the chunk, so
that the others need not wait, and the next holder removes the mark.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from maniple.center.chunked_model import ChunkedModel, chunks_of
from maniple.center.gate import Verdict
from maniple.center.gate_memory import GateMemory
from maniple.center.staging import existing_files, finish_pending
from maniple.clock import Deadline
from maniple.contracts import NO_STATE, Array, ExchangeInfo, Exchanger, FlatModel, OnValue, Outcome, State, StateNames
from maniple.layout import CHUNK_BYTES, Chunk, Layout
from maniple.memory.locks import ByteLocks
from maniple.memory.segment import CenterFile, Segment
from maniple.rules.rule import is_operation_known

T = TypeVar("T")
_CREATE = 1 << 40  # the byte that creators lock; chunk k is locked by byte k
ARRAY_FILE = "array-"  # prefix of the file of a named array
LOCK_TIMEOUT_S = 60.0  # an exchange holds a lock for milliseconds: after a minute its holder must be stopped
STUCK_S = 0.5  # the wait for a lock before its chunk is left out; a busy machine delays its holder for less
_RUN_BYTES = 8 << 20  # of chunks that are locked and exchanged by one call each: less than a millisecond


def chunk_bytes(name: str) -> int:
    """The size of the chunks of a center; 0 for a named array, which is one chunk so that each push is atomic."""
    return 0 if name.startswith(ARRAY_FILE) else CHUNK_BYTES


class SharedCenter:
    """One worker's (or the host's) view of a center in shared memory."""

    has_unsent = False  # nothing is compressed here

    def __init__(self, segment: Segment, path: Path, *, rank: int = -1, lock: bool = True) -> None:
        """Map a center that is ready; `open_or_create` and `open` see to that."""
        self._segment, self._rank, self._lock = segment, rank, lock
        self._memory = memory = CenterFile(path)
        self.name, self.note, self.layout = path.name, memory.note, memory.layout
        self.is_array = self.name.startswith(ARRAY_FILE)
        self._versions, self._holders, self._arrays = memory.versions, memory.holders, memory.arrays
        self._stuck = memory.stuck  # version + 1 of chunks that are stuck
        self._single = [range(k, k + 1) for k in range(len(self._arrays))]
        # The center's memory of each run of chunks.
        self._run_arrays = {ks: self.layout.run_view(memory.vectors, ks) for ks in self.layout.runs(_RUN_BYTES)}
        self.state = memory.state
        self._has_scalars = bool(self.layout.state.scalars)
        self._seen = list(self._versions)
        self._size_bytes = self.layout.size_bytes
        self._chunks: ChunkedModel | None = None  # of the model of the last exchange
        self._locks = ByteLocks(path)
        self.gate = GateMemory(path, len(self._arrays)) if GateMemory.is_agreed_on(memory) else None

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
        state: StateNames = NO_STATE,
        gate: str | None = None,
        timeout_s: float = LOCK_TIMEOUT_S,
    ) -> tuple["SharedCenter", bool]:
        """Open the center `name`, or create it from `model`; return it and whether it was created.

        The creator's `note` is stored. `state` names what the rule keeps at the center, of zeros at first. `gate` is
        what all workers agree on (`gate_memory.agreement_on`); None: leave that to the workers. Concurrent creators
        wait for the first; one that dies is replaced by the next.
        """
        layout = Layout(model.entries, is_numeric=True, chunk_bytes=chunk_bytes(name), state=state)
        path = segment.path / name
        with (
            closing(ByteLocks(path)) as locks,
            locks.hold(_CREATE, timeout_s=timeout_s, what="the creator of the center"),
        ):
            is_creator = not CenterFile.is_ready(path)
            if is_creator:
                CenterFile.create(path, layout, model, note)
            file = CenterFile(path)
            layout.require(file.layout, "the center")
            if gate is not None:
                GateMemory.agree(file, path, gate)
        return cls(segment, path, rank=rank, lock=lock), is_creator

    @classmethod
    def open(cls, segment: Segment, path: Path, *, rank: int = -1) -> "SharedCenter | None":
        """Open the center in `path`, as the host by default; None if it does not exist or is not complete."""
        return cls(segment, path, rank=rank) if path.exists() and CenterFile.is_ready(path) else None

    @property
    def live(self) -> int:
        """p, the number of live workers."""
        return self._segment.live

    def exchange(
        self, model: FlatModel, rule: Exchanger, state: Sequence[State] | None, moment: ExchangeInfo
    ) -> Outcome:
        """Apply `rule` to every chunk of `model` and of the center."""
        own_scalars = state is not None and any(value.size == 1 for value in state[0].values())
        at_center, half, gate = self.state.chunks, self.layout.half_chunks, self.gate
        verdicts: dict[int, Verdict] = {}

        def apply(k: int, chunks: ChunkedModel, c: Array) -> Array | None:
            moment.staleness = max(0, self._versions[k] - self._seen[k]) // 2
            kept = at_center[k] if state is None else state[k] if not at_center[k] else at_center[k] | state[k]
            exchange = rule.exchange
            if gate is not None:
                exchange, verdicts[k] = gate.exchange(k, chunks.pieces(k), c, kept, rule=rule, moment=moment)
            # Rounding and scalars need the chunk as a whole; else its pieces are exchanged where they are.
            if k in half or self._has_scalars or own_scalars:
                x = chunks.array(k)
                found = exchange(x, c, kept, moment)
                if k in half:
                    round_replica(self.layout, k, x, rule, kept if state is not None else None)
                return found
            refused: list[Array] = []
            for where, x in chunks.pieces(k):
                part = {name: value[where] for name, value in kept.items()} if kept else kept
                if (found := exchange(x, c[where], part, moment)) is not None:
                    refused.append(where.start + found)
            return np.concatenate(refused) if refused else None

        def apply_to_run(x: Array, c: Array, staleness: int) -> Array | None:
            moment.staleness = staleness
            return rule.exchange(x, c, {}, moment)

        # A custom `exchange` may need whole chunks; `mix` does not, since it is called with smaller blocks anyway.
        # A gate judges chunk by chunk.
        has_runs = (
            state is None
            and gate is None
            and not any(self.layout.state)
            and not half
            and is_operation_known(type(rule))
        )
        outcome = self._for_each(
            model,
            apply,
            ways=2,
            stuck_s=LOCK_TIMEOUT_S if moment.is_last else STUCK_S,
            apply_to_run=apply_to_run if has_runs else None,
        )
        for k, verdict in verdicts.items():
            outcome.judge(self.layout.names_in(k), verdict.factor, verdict.weight)
        return outcome.with_unique_names() if outcome.gated else outcome

    def pull(
        self,
        model: FlatModel,
        on_value: OnValue | None = None,
        *,
        peek: bool = False,
        state_copy: Sequence[State] | None = None,
    ) -> Outcome:
        """Set `model` to the center; `on_value` receives each chunk's value, under its lock.

        Stuck chunks are read without it, and reported as torn. With `peek`, staleness is still measured from the last
        exchange or pull before.
        """

        def apply(k: int, chunks: ChunkedModel, c: Array) -> None:
            x = chunks.array(k)
            x[:] = c
            if state_copy is not None:
                for name, value in self.state.chunks[k].items():
                    state_copy[k][name][:] = value
            if k in self.layout.half_chunks:
                self.layout.round_chunk(k, x)
            if on_value is not None:
                on_value(k, x)

        return self._for_each(model, apply, writes=False, peek=peek, stuck_s=STUCK_S)

    def push(
        self, model: FlatModel, on_value: OnValue | None = None, *, state_copy: Sequence[State] | None = None
    ) -> Outcome:
        """Set the center to `model`, except for parameters that are not finite; `on_value` as in `pull`."""

        def apply(k: int, chunks: ChunkedModel, c: Array) -> Array | None:
            if state_copy is not None:
                for name, value in self.state.chunks[k].items():
                    value[:] = state_copy[k][name]
            x, refused = chunks.array(k), None
            if not np.isfinite(x).all():
                refused = np.flatnonzero(~np.isfinite(x))
                x = finite_parts(self.layout.chunks[k], x, c)
            c[:] = x
            if on_value is not None:
                on_value(k, x)
            return refused

        return self._for_each(model, apply)

    def _for_each(
        self,
        model: FlatModel,
        apply: Callable[[int, ChunkedModel, Array], Array | None],
        *,
        writes: bool = True,
        ways: int = 1,
        peek: bool = False,
        stuck_s: float = math.inf,
        apply_to_run: Callable[[Array, Array, int], Array | None] | None = None,
    ) -> Outcome:
        """Call `apply(k, the replica's chunks, the center's chunk)` for each chunk, under its lock.

        It returns the positions of refused elements. Chunks that others hold are deferred; after `stuck_s`, a write
        leaves them out and a read needs no lock. Without `stuck_s`, WaitedTooLong is raised. With `apply_to_run`,
        chunks that follow each other are locked and written by one call where that gives the same result.
        """
        outcome = Outcome(size_bytes=ways * self._size_bytes)
        try_lock, unlock = (self._locks.take, self._locks.give) if self._lock else (_lock_nothing, _lock_nothing)
        self._chunks = chunks = chunks_of(model, self.layout, self._chunks)
        chunks.begin()
        runs = self._single if apply_to_run is None else list(self._run_arrays)
        waiting = deque(runs[i] for i in visiting_order(len(runs), self._rank, self._segment.live))
        busy, deadline = 0, None  # how many of those waiting were found locked in a row
        try:
            while waiting:
                ks = waiting.popleft()
                k, count = ks.start, len(ks)
                if not try_lock(k, count):
                    if count > 1:
                        waiting.extend(self._single[k : k + count])
                    elif stuck_s == STUCK_S and self._stuck[k] == self._versions[k] + 1:
                        self._pass_over(k, chunks, apply, outcome, writes=writes)
                    else:
                        waiting.append(ks)
                        busy += 1
                    if busy and busy >= len(waiting):
                        busy, deadline = 0, deadline or Deadline(min(stuck_s, LOCK_TIMEOUT_S))
                        if not self._pause(k, deadline, can_leave_out=stuck_s < math.inf):
                            for k in (k for ks in waiting for k in ks):
                                self._pass_over(k, chunks, apply, outcome, writes=writes)
                            break
                    continue
                try:
                    if apply_to_run is None:
                        self._visit(k, chunks, apply, outcome, writes=writes, peek=peek)
                    else:
                        self._visit_run(ks, chunks, apply, apply_to_run, outcome)
                finally:
                    unlock(k, count)
                busy, deadline = 0, None
        finally:
            chunks.end()
        outcome.staleness /= len(self._seen)
        return outcome.with_unique_names() if outcome.refused or outcome.torn or outcome.locked else outcome

    def _pause(self, k: int, deadline: Deadline, *, can_leave_out: bool) -> bool:
        """Wait before chunk k is tried again; False if it has taken too long, WaitedTooLong if it is needed."""
        if not can_leave_out:
            deadline.check(lambda: self.describe_lock(k))
        elif deadline.is_over():
            return False
        deadline.pause()
        return True

    def _visit_run(
        self,
        ks: range,
        chunks: ChunkedModel,
        apply: Callable[[int, ChunkedModel, Array], Array | None],
        apply_to_run: Callable[[Array, Array, int], Array | None],
        outcome: Outcome,
    ) -> None:
        """Write several chunks, whose locks are held, by one call of `apply_to_run`.

        They need a call of `apply` each if one of them is not in the model's flat memory, if a write of one was
        interrupted, or if they differ in staleness, on which a rule may depend; and so does a chunk whose neighbours
        are locked.
        """
        versions, seen, holders, stuck = self._versions, self._seen, self._holders, self._stuck
        x, c, writes = chunks.run(ks), self._run_arrays.get(ks), versions[ks.start] - seen[ks.start]
        if x is None or c is None or any(versions[k] & 1 or versions[k] - seen[k] != writes for k in ks):
            for k in ks:
                self._visit(k, chunks, apply, outcome, writes=True, peek=False)
            return
        for k in ks:
            holders[k] = self._rank + 1
            if stuck[k]:
                stuck[k] = 0
            versions[k] = seen[k] + writes + 1
        staleness = max(0, writes) // 2
        refused = apply_to_run(x, c, staleness)
        for k in ks:
            # Not `+= 1`: without locks another worker may write too, and the version must be even in the end.
            versions[k] = seen[k] = seen[k] + writes + 2
        outcome.staleness += len(ks) * staleness
        if refused is not None:
            start = 0
            for k in ks:
                size = self._arrays[k].size
                within = refused[(refused >= start) & (refused < start + size)] - start
                outcome.refused += self.layout.names_at(k, within)
                start += size

    def _visit(
        self,
        k: int,
        chunks: ChunkedModel,
        apply: Callable[[int, ChunkedModel, Array], Array | None],
        outcome: Outcome,
        *,
        writes: bool,
        peek: bool,
    ) -> None:
        """Call `apply` for chunk k, whose lock is held, and update its version."""
        versions, seen = self._versions, self._seen
        self._holders[k] = self._rank + 1
        if self._stuck[k]:
            self._stuck[k] = 0
        version = versions[k]
        if version & 1 and self._lock and self._finish_pending(k):
            version = versions[k]
        if version & 1:
            version += 1
            if self._lock:
                outcome.torn += self.layout.names_in(k)
        outcome.staleness += max(0, version - seen[k]) // 2
        chunks.pieces(k)  # an error about the model must come before the chunk is marked as being written
        if writes:
            versions[k] = version + 1
        if (refused := apply(k, chunks, self._arrays[k])) is not None:
            outcome.refused += self.layout.names_at(k, refused)
        if writes:
            version += 2
        versions[k] = version  # after a pull too: a torn chunk is reported once
        if not peek:
            seen[k] = version
        chunks.commit(k)

    def _pass_over(
        self,
        k: int,
        chunks: ChunkedModel,
        apply: Callable[[int, ChunkedModel, Array], Array | None],
        outcome: Outcome,
        *,
        writes: bool,
    ) -> None:
        """Leave out chunk k, which is stuck; only read it, without its lock."""
        self._stuck[k] = self._versions[k] + 1
        if writes:
            outcome.locked += self.layout.names_in(k)
            return
        apply(k, chunks, self._arrays[k])
        chunks.commit(k)
        if self._versions[k] & 1:
            outcome.torn += self.layout.names_in(k)

    def release(self) -> None:
        """Unmap the pages from this process. They stay in shared memory and are mapped again on access."""
        self._memory.release()

    def close(self) -> None:
        """Give up the locks. The mapping ends with the last array that refers to it."""
        self._locks.close()

    # Single chunks, for the host.

    @contextmanager
    def locked(self, k: int) -> Generator[None]:
        """Hold the lock of chunk k for the length of a `with` block."""
        deadline = Deadline(LOCK_TIMEOUT_S)
        while not self.try_lock(k):
            deadline.wait(self.describe_lock(k))
        try:
            yield
        finally:
            self.unlock(k)

    def try_lock(self, k: int) -> bool:
        """Lock chunk k if it is free, and complete what a killed host has begun on it."""
        if not self._locks.take(k):
            return False
        self._holders[k], self._stuck[k] = self._rank + 1, 0
        self._finish_pending(k)
        return True

    def is_stuck(self, k: int, deadline: Deadline) -> bool:
        """Whether this process or another has waited in vain for the lock of chunk k; `deadline` limits the wait."""
        if self._stuck[k] == self._versions[k] + 1:
            return True
        if deadline.is_over():
            self._stuck[k] = self._versions[k] + 1
            return True
        return False

    def unlock(self, k: int) -> None:
        """Unlock chunk k."""
        self._locks.give(k)

    def describe_lock(self, k: int) -> str:
        """The lock of chunk k and its last holder, for messages."""
        holder, names = self._holders[k], self.layout.names_in(k)
        who = f"worker {holder - 1}" if holder else "the host"
        more = f" and {len(names) - 1} more in its chunk" if len(names) > 1 else ""
        return f"the lock of parameter {names[0]!r}{more}, last held by {who}"

    def array(self, k: int) -> Array:
        """Chunk k itself, in shared memory. The caller holds its lock."""
        return self._arrays[k]

    def record(self, k: int) -> list[Array]:
        """Chunk k and the rule's state of it, in shared memory. The caller holds its lock."""
        return [self._arrays[k], *self.state.chunks[k].values()]

    def read(self, k: int, under_lock: Callable[[], None] = lambda: None) -> Array:
        """Return a copy of chunk k; `under_lock` is called while the lock is held, and perhaps more than once."""
        value = np.empty_like(self._arrays[k])

        def copy() -> None:
            value[:] = self._arrays[k]
            under_lock()

        self.read_locked(k, copy)
        return value

    def read_locked(self, k: int, copy: Callable[[], T]) -> T:
        """Return `copy()`, called while nobody changes chunk k except for a worker that is stopped in a write.

        That one may wake up meanwhile, and others write the chunk after it: then it is called again under the lock.
        Named arrays are never read without their lock.
        """
        if self.is_array:
            with self.locked(k):
                return copy()
        deadline = Deadline(STUCK_S)
        while not self.try_lock(k):
            if not self.is_stuck(k, deadline):
                deadline.pause()
                continue
            version, copied = self._versions[k], copy()
            if self._locks.is_taken(k) and self._versions[k] == version:
                return copied
            deadline = Deadline(STUCK_S)
        try:
            return copy()
        finally:
            self.unlock(k)

    def is_torn(self, k: int) -> bool:
        """Whether a local worker died while it wrote chunk k, and it has not been written since."""
        return bool(self._versions[k] & 1)

    def version(self, k: int) -> int:
        """Twice the number of writes of chunk k, an interrupted one included."""
        return self._versions[k] + (self._versions[k] & 1)

    @property
    def versions(self) -> list[int]:
        """The raw versions: 2 per write, odd during a write and after an interrupted one."""
        return list(self._versions)

    def begin_write(self, k: int) -> None:
        """Mark chunk k, whose lock is held, as being written."""
        self._versions[k] |= 1

    def end_write(self, k: int) -> None:
        """Mark the write of chunk k as complete."""
        self._versions[k] = (self._versions[k] | 1) + 1

    def restore_versions(self, versions: Sequence[int]) -> None:
        """Continue with the versions of an earlier center, whose values were restored from a snapshot."""
        if len(versions) != len(self._versions):  # of a maniple that cut other chunks
            versions = [max(versions)] * len(self._versions)
        for k, version in enumerate(versions):
            self._versions[k] = version + (version & 1)

    def _finish_pending(self, k: int) -> bool:
        """Complete what a killed host has begun on chunk k, whose lock is held; False if there is nothing."""
        return bool(self._versions[k] & 1) and finish_pending(self._segment.path, self, k)


def _lock_nothing(_first: int, _count: int) -> bool:
    """Take the place of taking and giving locks, for workers that share without them."""
    return True


def visiting_order(count: int, rank: int, live: int) -> list[int]:
    """All chunks, starting at one that depends on the rank: workers seldom wait for each other's locks."""
    start = max(0, rank) * count // max(1, live) % count
    return [*range(start, count), *range(start)]


def round_replica(layout: Layout, k: int, x: Array, rule: Exchanger, state: State | None) -> None:
    """Round a replica's new value `x` of chunk k where the replica holds half precision; `state` is the worker's."""
    if k in layout.half_chunks:
        layout.round_chunk(k, x)
        if state is not None:
            rule.rounded(x, state)


def finite_parts(chunk: Chunk, x: Array, c: Array) -> Array:
    """A copy of `x`, with the center's value for each parameter that is not finite."""
    x = x.copy()
    for part in chunk.parts:
        if not np.isfinite(x[part.in_chunk]).all():
            x[part.in_chunk] = c[part.in_chunk]
    return x


def finish_all(segment: Segment) -> int:
    """Complete everything that the previous host had begun when it was killed; return how many intents."""
    count = 0
    for _, staging in existing_files(segment.path):
        with closing(staging):
            intent = staging.pending()
            center = SharedCenter.open(segment, segment.path / intent.center) if intent is not None else None
            if intent is None or center is None:
                continue
            with closing(center), center.locked(intent.chunk):  # completes it if the version is odd
                staging.finish(center, intent.chunk)
            count += 1
    return count
