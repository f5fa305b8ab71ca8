"""The stage: what one remote worker has under way at the host, in shared memory, so that no instant of death can
lose it or apply it twice.

    0       word       exchange << 24 | items applied: how far this worker's contributions are in the center
            state      1 while a contribution is being applied
            progress   2 b: block b is next;  2 b + 1: its new values lie in `block`, and are being copied
                       (of single elements: 0 while they are being copied from `value`, then 1)
            intent     what is being applied, and the word after it
    4096    block      one block of new center values
    ...     value      what the worker has sent

A contribution is received into `value`, then applied under the parameter's lock, block by block: the new values
are computed into `block`, the progress is noted, and they are copied over the center, a step that can be
repeated. Whoever next holds the lock (the host's successor, or a local worker) finds the version odd and
finishes what was begun.
"""

import contextlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from maniple.contracts import Array
from maniple.errors import SharedMemoryFull
from maniple.rules import blocks
from maniple.rules.kernels import kernels

_PAGE = 4096
_BLOCK_BYTES = 1 << 15  # it and its like stay in the cache
_VALUE = _PAGE + _BLOCK_BYTES
_WORD, _STATE, _PROGRESS, _INTENT_BYTES = range(4)
_INTENT = 64
_ITEM_BITS = 24
MAX_ITEMS = (1 << _ITEM_BITS) - 1
_PREFIX = "stage-"


class Intent(msgspec.Struct, array_like=True):
    """What is being applied."""

    center: str
    i: int
    act: str
    a: float | int
    b: float | int
    word: int  # this worker's word once it is done
    count: int  # elements
    is_sparse: bool = False


class Target(Protocol):
    """The parameter's side of a contribution: a center of which this process holds the lock."""

    @property
    def name(self) -> str: ...
    def array(self, i: int) -> Array: ...
    def begin_write(self, i: int) -> None: ...
    def end_write(self, i: int) -> None: ...


def word_of(sequence: int, items: int) -> int:
    """How far: `items` of exchange `sequence` are applied."""
    return sequence << _ITEM_BITS | items


class Stage:
    """The stage of one worker."""

    def __init__(self, path: Path, allow: Callable[[int], None] | None = None) -> None:
        self._path, self._allow = path, allow  # `allow` raises if it may not take so many bytes more
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._grow(max(_PAGE, os.fstat(self._file).st_size))

    @classmethod
    def of(cls, segment: Path, worker: str, allow: Callable[[int], None] | None = None) -> "Stage":
        """The stage of worker `worker`, made if it is not there."""
        return cls(cls.path_of(segment, worker), allow)

    @staticmethod
    def path_of(segment: Path, worker: str) -> Path:
        """Where the stage of worker `worker` is."""
        return segment / f"{_PREFIX}{worker}"

    @property
    def word(self) -> int:
        """How far this worker's contributions are in the center."""
        return self._head[_WORD]

    @property
    def position(self) -> tuple[int, int]:
        """The exchange, and the items of it that are applied."""
        return self.word >> _ITEM_BITS, self.word & MAX_ITEMS

    def reserve(self, size_bytes: int) -> Array:
        """Room for a value of that size; it keeps the largest so far."""
        self._grow(_VALUE + size_bytes)
        return np.frombuffer(self._memory, np.uint8, size_bytes, _VALUE)

    def commit(self, target: Target, intent: Intent, value: Array, *, answer: int) -> bool:
        """Apply `value`, whose memory was reserved here, under the lock of its parameter, and note it.

        Afterwards `value` holds what the answer asks for: the replica's new value, or its move. False if some
        values were refused because they are not finite.
        """
        self._note(intent)
        target.begin_write(intent.i)
        is_clean = self._apply(target.array(intent.i), value, intent, answer)
        self._end(target, intent)
        return is_clean

    def commit_at(self, target: Target, intent: Intent, positions: Array, values: Array) -> bool:
        """Weigh `values` into the elements at `positions`, in any order; contributions to the same element add up.

        False if some were left out because they are not finite.
        """
        center = target.array(intent.i)
        unique, inverse = np.unique(positions, return_inverse=True)
        total = np.zeros(unique.size, values.dtype)  # one value for each element of `unique`, which is sorted
        if unique.size < positions.size:
            np.add.at(total, inverse, values)
        else:
            total[inverse] = values
        new = center[unique]
        is_clean = blocks.weigh(total, new, intent.a, intent.b)
        room = self.reserve(unique.size * (8 + center.itemsize))
        room[: 8 * unique.size].view(np.int64)[:] = unique
        room[8 * unique.size :].view(center.dtype)[:] = new
        intent.count = unique.size
        self._note(intent)
        target.begin_write(intent.i)
        center[unique] = new
        self._head[_PROGRESS] = 1
        self._end(target, intent)
        return is_clean

    def skip(self, word: int) -> None:
        """Note that a contribution was refused, and so is done with."""
        self._head[_WORD] = word

    def finish(self, target: Target, i: int) -> bool:
        """Finish what a host that was killed had begun on parameter i of `target`; False if there is no such thing.

        The caller holds the parameter's lock.
        """
        intent = self.pending()
        if intent is None or (intent.center, intent.i) != (target.name, i):
            return False
        center = target.array(i)
        if intent.is_sparse and self._head[_PROGRESS]:
            pass  # it was written already
        elif intent.is_sparse:
            room = self.reserve(intent.count * (8 + center.itemsize))
            center[room[: 8 * intent.count].view(np.int64)] = room[8 * intent.count :].view(center.dtype)
        else:
            value = self.reserve(center.nbytes).view(center.dtype)
            self._apply(center, value, intent, blocks.NOTHING)
        self._end(target, intent)
        return True

    def pending(self) -> Intent | None:
        """What was begun and not finished."""
        if self._head[_STATE] == 0:
            return None
        size = self._head[_INTENT_BYTES]
        try:
            return msgspec.msgpack.decode(self._memory[_INTENT : _INTENT + size], type=Intent)
        except msgspec.DecodeError:
            return None  # its owner is alive, and just writes another

    def shrink(self) -> None:
        """Give the room for values back; the word stays."""
        if self._head[_STATE] == 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, _PAGE)
            self._size = 0
            self._grow(_PAGE)

    def remove(self) -> None:
        """The worker has left and will ask no more."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of the file; its mapping ends with the last array that points into it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _note(self, intent: Intent) -> None:
        text = msgspec.msgpack.encode(intent)
        self._memory[_INTENT : _INTENT + len(text)] = text
        self._head[_INTENT_BYTES] = len(text)
        self._head[_PROGRESS] = 0
        self._head[_STATE] = 1

    def _end(self, target: Target, intent: Intent) -> None:
        self._head[_WORD] = intent.word
        target.end_write(intent.i)
        self._head[_STATE] = 0

    def _apply(self, center: Array, value: Array, intent: Intent, answer: int) -> bool:
        block = np.frombuffer(self._memory, center.dtype, _BLOCK_BYTES // center.itemsize, _PAGE)
        how = kernels().staged if center.dtype.kind == "f" else blocks.staged
        act = {"elastic": blocks.ELASTIC, "blend": blocks.BLEND}.get(intent.act, blocks.REPLACE)
        return how(value, center, block, self._progress, act=act, a=intent.a, b=intent.b, answer=answer)

    def _grow(self, size: int) -> None:
        if size <= self._size:
            return
        size = -(-size // _PAGE) * _PAGE
        there = os.fstat(self._file).st_size
        if there < size and self._allow is not None:
            self._allow(size - there)
        try:
            if there < size:
                os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            raise SharedMemoryFull(
                f"no room in {self._path.parent} for a contribution of {size / 1e6:,.1f} MB ({error.strerror}). "
                "Enlarge it (`mount -o remount,size=8G /dev/shm`), or remove what fills it."
            ) from error
        self._memory = mmap.mmap(self._file, size)
        self._head: Any = memoryview(self._memory)[:_PAGE].cast("q")
        self._progress: Any = np.frombuffer(self._memory, np.int64, 1, 8 * _PROGRESS)
        self._size = size


def finish_pending(segment: Path, target: Target, i: int) -> bool:
    """Finish what any worker had begun on parameter i when its host was killed; the caller holds its lock."""
    done = False
    for path in segment.glob(f"{_PREFIX}*"):
        with contextlib.closing(Stage(path)) as stage:
            done |= stage.finish(target, i)
    return done


def words(segment: Path) -> dict[str, int]:
    """How far each worker's contributions are in the center."""
    known: dict[str, int] = {}
    for path in segment.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            known[path.name.removeprefix(_PREFIX)] = int.from_bytes(file.read(8), "little")
    return known


def finish_all(segment: Path, open_center: Callable[[str], Any]) -> int:
    """Finish all that was begun when the host before this one was killed; gives how much that was."""
    count = 0
    for path in segment.glob(f"{_PREFIX}*"):
        with contextlib.closing(Stage(path)) as stage:
            intent = stage.pending()
            center = open_center(intent.center) if intent is not None else None
            if intent is None or center is None:
                continue
            with contextlib.closing(center), center.held(intent.i):  # whose lock finishes what has an odd version
                stage.finish(center, intent.i)
            count += 1
    return count
