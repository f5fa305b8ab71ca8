"""The stage: what one remote worker has under way at the host, in shared memory, so that no instant of death can
lose it or apply it twice. It is there while the worker is connected; its word, how far the worker's contributions are
in the center (exchange << 24 | items applied), stays in the table `words`.

    0       row        of this worker's word in that table
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
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from maniple.center.words import Words, cell_of
from maniple.contracts import Array
from maniple.errors import SharedMemoryFull
from maniple.rules import blocks
from maniple.rules.kernels import kernels

_PAGE = 4096
_BLOCK_BYTES = 1 << 15  # it and its like stay in the cache
_VALUE = _PAGE + _BLOCK_BYTES
_ROW, _STATE, _PROGRESS, _INTENT_BYTES = range(4)
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

    def __init__(
        self,
        path: Path,
        words: Words,
        *,
        row: int | None = None,
        is_known: bool = True,
        allow: Callable[[int], None] | None = None,
    ) -> None:
        """With a `row`, it is made if it is not there; else FileNotFoundError. `allow` raises if it may not take so
        many bytes more."""
        self._path, self._allow = path, allow
        self.is_known = is_known  # the worker was here before
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if row is None else os.O_CREAT), 0o600)
        self._size = 0
        self._grow(max(_PAGE, os.fstat(self._file).st_size))
        if row is not None:
            self._head[_ROW] = row
        self._words, self._cell = words.cells, cell_of(self._head[_ROW])

    @property
    def word(self) -> int:
        """How far this worker's contributions are in the center."""
        return self._words[self._cell]

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
        self._words[self._cell] = word

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

    def remove(self) -> None:
        """Give the memory back; the word stays."""
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
        self._words[self._cell] = intent.word
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


class Stages:
    """The stages of all workers that are connected to a server. Calls for one worker come one after the other."""

    def __init__(self, segment: Path) -> None:
        self._segment = segment
        self._lock = threading.Lock()
        self._table: Words | None = None

    @property
    def forgotten(self) -> int:
        """Workers of which nothing is known any more."""
        return self._words.forgotten

    def begin(self) -> None:
        """Remove what the workers of a killed server have left, but for what could not be finished."""
        for worker, stage in _stages(self._segment):
            if stage.pending() is None:
                stage.remove()
            else:
                self._words.claim(worker)
                stage.close()

    def open(self, worker: str, allow: Callable[[int], None] | None = None) -> Stage:
        """The stage of a worker that has connected."""
        row, is_known = self._words.claim(worker)
        return Stage(self._segment / f"{_PREFIX}{worker}", self._words, row=row, is_known=is_known, allow=allow)

    def retire(self, worker: str, stage: Stage) -> None:
        """The connection of a worker has ended: its word is kept, for when it comes back."""
        if stage.pending() is None:  # else it is for the next who has the parameter's lock
            stage.remove()
            self._words.release(worker)

    def forget(self, worker: str) -> None:
        """A worker has left, and asks no more."""
        (self._segment / f"{_PREFIX}{worker}").unlink(missing_ok=True)
        if self._table is not None or Words.is_there(self._segment):  # else nobody has come over the network
            self._words.forget(worker)

    @property
    def _words(self) -> Words:
        with self._lock:
            if self._table is None:  # only now: most runs have no workers elsewhere
                self._table = Words(self._segment)
            return self._table


def _stages(segment: Path) -> Generator[tuple[str, Stage]]:
    """The stages that are there, and their workers."""
    table = None
    for path in segment.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # its worker has just gone
            table = table or Words(segment)
            yield path.name.removeprefix(_PREFIX), Stage(path, table)


def finish_pending(segment: Path, target: Target, i: int) -> bool:
    """Finish what any worker had begun on parameter i when its host was killed; the caller holds its lock."""
    done = False
    for _, stage in _stages(segment):
        with contextlib.closing(stage):
            done |= stage.finish(target, i)
    return done


def finish_all(segment: Path, open_center: Callable[[str], Any]) -> int:
    """Finish all that was begun when the host before this one was killed; gives how much that was."""
    count = 0
    for _, stage in _stages(segment):
        with contextlib.closing(stage):
            intent = stage.pending()
            center = open_center(intent.center) if intent is not None else None
            if intent is None or center is None:
                continue
            with contextlib.closing(center), center.held(intent.i):  # whose lock finishes what has an odd version
                stage.finish(center, intent.i)
            count += 1
    return count
