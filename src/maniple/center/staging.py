"""Staging: contributions of remote workers, applied by the host so that a kill at any instant loses or repeats nothing.

Each connected worker has a staging file in the segment, which works like a write-ahead log:

    0       head     row in the table of applied numbers, state, progress, bytes of the intent, bytes of the block
    64      intent   what is being applied (MessagePack)
    4096    block    the part of the center that is being replaced
    36864   value    the value as it arrived (the block has up to 32,768 bytes)

The host writes value and intent, then sets the state, then applies the value block by block and counts the blocks in
`progress`. If it is killed, the next process that locks the chunk, or the next host, completes the intent from
there. The worker's applied number is written before the state is cleared, so that it is known what was applied.

The applied numbers of all workers are in one file of the segment (`AppliedTable`):

    0       head    rows in use, workers that were forgotten
    4096    rows    64 bytes each: applied number, time of the last disconnect, the worker's name

The applied number of a worker is `sequence << 24 | items`: the number of its newest exchange, and how many items of it
are in the center. A row exists from the worker's first connection on and outlives its connections, since the worker may
reconnect and ask which of its contributions were applied. The host remembers 16,384 workers; then a newcomer takes the
row of the one that has been disconnected for the longest time. If that one asks after all, it is refused: nothing is
guessed. Only the server adds rows. The process that completes a contribution writes its applied number.
"""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from maniple.contracts import Array
from maniple.errors import SharedMemoryFull
from maniple.memory.shm import map_file, reserve
from maniple.rules.diloco import outer_step
from maniple.rules.kernels import kernels
from maniple.rules.kernels import numpy_kernels as blocks

if TYPE_CHECKING:
    from maniple.center.shared import SharedCenter

ROWS = 16_384  # 1 MB: four times as many as can be connected at once
ITEM_BITS = 24
MAX_ITEMS = (1 << ITEM_BITS) - 1
_TABLE_FILE = "applied"
_TABLE_HEAD = np.dtype([("used", "<i8"), ("forgotten", "<i8")])
_TABLE_ROW = np.dtype([("applied", "<i8"), ("disconnected", "<i8"), ("name", "S32"), ("rest", "V16")])  # divides a page

_PREFIX = "stage-"
_PAGE = 4096
_ROW, _STATE, _PROGRESS, _INTENT_BYTES, _BLOCK_BYTES = range(5)  # int64 words of the head
_INTENT = 64
_VALUE = _PAGE + blocks.STAGED_BYTES  # NumPy's blocks are the largest


def applied_number(sequence: int, items: int) -> int:
    """The number that says: `items` of exchange `sequence` are applied."""
    return sequence << ITEM_BITS | items


def by_worker(rows: Array) -> dict[str, int]:
    """The applied number of each worker in a copy of the rows."""
    return {_name(row): int(row["applied"]) for row in rows[rows["name"] != b""]}


def _name(row: Any) -> str:
    return bytes(row["name"]).decode(errors="replace")


class AppliedTable:
    """The applied numbers of a segment. The file is created with the first row: most runs have no remote workers."""

    def __init__(self, segment: Path) -> None:
        self._path = segment / _TABLE_FILE
        self._lock = threading.RLock()
        self._head, self._rows = np.zeros(1, _TABLE_HEAD), np.zeros(0, _TABLE_ROW)
        self._connected: set[str] = set()

    @property
    def forgotten(self) -> int:
        """How many workers have lost their rows to others."""
        self._open(create=False)
        return int(self._head["forgotten"][0])

    def numbers(self) -> Any:
        """The applied numbers of all rows, in shared memory; a memoryview is faster than an array for single ones."""
        self._open(create=True)
        column: Any = self._rows["applied"]
        return memoryview(column)

    def rows(self) -> Array:
        """A copy of all rows that were ever used."""
        self._open(create=False)
        return self._used().copy()

    def claim(self, worker: str) -> tuple[int, bool]:
        """Return the row of a worker that has connected, and whether it had one before.

        Others cannot take the row while the worker is connected.
        """
        with self._lock:
            self._open(create=True)
            known = self._find(worker)
            row = self._take_row() if known is None else known
            self._connected.add(worker)
            if known is None:
                self._rows["applied"][row] = 0
                self._rows["name"][row] = worker.encode()  # last: a row without a name is free
                self._head["used"] = max(len(self._used()), row + 1)
            return row, known is not None

    def release(self, worker: str) -> None:
        """Note that a worker has disconnected. It may come back."""
        with self._lock:
            self._connected.discard(worker)
            if (row := self._find(worker)) is not None:
                self._rows["disconnected"][row] = time.time_ns()

    def forget(self, worker: str) -> None:
        """Free the row of a worker that has left and will not ask any more."""
        with self._lock:
            self._open(create=False)
            self._connected.discard(worker)
            if (row := self._find(worker)) is not None:
                self._clear(row)

    def _open(self, *, create: bool) -> None:
        with self._lock:
            if not self._rows.size and (create or self._path.exists()):
                memory = map_file(self._path, _PAGE + ROWS * _TABLE_ROW.itemsize, what="the table of remote workers")
                self._head = np.frombuffer(memory, _TABLE_HEAD, 1)
                self._rows = np.frombuffer(memory, _TABLE_ROW, ROWS, _PAGE)

    def _used(self) -> Array:
        return self._rows[: int(self._head["used"][0])]

    def _find(self, worker: str) -> int | None:
        found = np.flatnonzero(self._used()["name"] == worker.encode())
        return int(found[0]) if found.size else None

    def _take_row(self) -> int:
        used = self._used()
        free = np.flatnonzero(used["name"] == b"")
        if free.size:
            return int(free[0])
        if len(used) < ROWS:
            return len(used)
        by_time = np.argsort(used["disconnected"], kind="stable")  # the longest time first
        row = next((int(k) for k in by_time if _name(used[k]) not in self._connected), None)
        if row is None:
            raise SharedMemoryFull(f"{ROWS:,} workers are connected to this host, and it cannot serve more.")
        self._head["forgotten"] += 1
        self._clear(row)
        return row

    def _clear(self, row: int) -> None:
        self._rows["name"][row] = b""
        self._rows["applied"][row] = 0


class Intent(msgspec.Struct, array_like=True):
    """What is being applied to one chunk."""

    center: str
    chunk: int
    operation: str
    a: float | int
    b: float | int
    applied: int  # the worker's applied number once it is complete
    count: int  # elements
    is_sparse: bool = False  # single elements, given by their positions
    with_state: bool = False  # the value is a record: the chunk and the rule's state of it


class StagingFile:
    """The staging file of one worker."""

    def __init__(
        self,
        path: Path,
        table: AppliedTable,
        *,
        row: int | None = None,
        is_known: bool = True,
        allow: Callable[[int], None] | None = None,
    ) -> None:
        """Open the file, and create it if the worker's `row` in the table is given.

        `allow(n)` raises if the file may not grow by n bytes.
        """
        self._path, self._allow = path, allow
        self.is_known = is_known  # the worker was connected before
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if row is None else os.O_CREAT), 0o600)
        self._size = 0
        self._grow(max(_PAGE, os.fstat(self._file).st_size))
        if row is not None:
            self._head[_ROW] = row
        self._row = self._head[_ROW]
        self._numbers = table.numbers()

    @property
    def applied(self) -> int:
        """The applied number of this worker."""
        return self._numbers[self._row]

    @property
    def position(self) -> tuple[int, int]:
        """The sequence number of this worker's newest exchange, and how many of its items are applied."""
        return self.applied >> ITEM_BITS, self.applied & MAX_ITEMS

    def reserve(self, size_bytes: int) -> Array:
        """Return room for a value. The file keeps the size of the largest one."""
        self._grow(_VALUE + size_bytes)
        return np.frombuffer(self._memory, np.uint8, size_bytes, _VALUE)

    def commit(self, center: "SharedCenter", intent: Intent, value: Array, *, answer: int) -> bool:
        """Apply `value`, which lies in reserved memory, to a chunk whose lock is held.

        Afterwards `value` holds the reply: the replica's new value or its move. Returns False if non-finite elements
        were refused.
        """
        self._begin(center, intent)
        is_clean = self._apply(center.array(intent.chunk), value, intent, answer)
        self._end(center, intent)
        return is_clean

    def commit_record(self, center: "SharedCenter", intent: Intent, value: Array) -> None:
        """Replace a chunk, whose lock is held, and the rule's state of it by `value`, which lies in reserved memory."""
        self._begin(center, intent)
        self._replace_record(center, intent, value)
        self._end(center, intent)

    def commit_outer_step(self, center: "SharedCenter", intent: Intent, *, buffer: int) -> bool:
        """Make the outer step of asynchronous DiLoCo with the change that lies in reserved memory.

        Its result, chunk and state, is computed beside the center and then replaces both as a record. Afterwards the
        reserved memory holds the new center. Returns False if non-finite elements were refused.
        """
        record = self.reserve(center.layout.record_bytes(intent.chunk))  # it begins with the change
        new, state = center.layout.split_record(intent.chunk, record)
        c, *current = center.record(intent.chunk)
        for copy, part in zip(state.values(), current, strict=True):
            copy[:] = part
        refused = outer_step(new, c.copy(), state, lr=intent.a, momentum=intent.b, buffer=buffer)
        intent.with_state = True
        self.commit_record(center, intent, record)
        return refused is None

    def commit_at(self, center: "SharedCenter", intent: Intent, positions: Array, values: Array) -> bool:
        """Blend `values` into the elements at `positions`; several values for one element add up.

        Returns False if non-finite elements were refused.
        """
        array = center.array(intent.chunk)
        unique, inverse = np.unique(positions, return_inverse=True)
        total = np.zeros(unique.size, values.dtype)
        if unique.size < positions.size:
            np.add.at(total, inverse, values)
        else:
            total[inverse] = values
        new = array[unique]
        is_clean = blocks.weigh(total, new, intent.a, intent.b)
        intent.count = unique.size
        reserved = self._reserve_elements(intent, array.dtype)
        reserved[0][:], reserved[1][:] = unique, new
        self._begin(center, intent)
        array[unique] = new
        self._head[_PROGRESS] = 1
        self._end(center, intent)
        return is_clean

    def skip(self, applied: int) -> None:
        """Count a refused contribution as applied."""
        self._numbers[self._row] = applied

    def finish(self, center: "SharedCenter", k: int) -> bool:
        """Complete what a killed host has begun on chunk k, whose lock is held; False if there is nothing."""
        intent = self.pending()
        if intent is None or (intent.center, intent.chunk) != (center.name, k):
            return False
        array = center.array(k)
        if intent.with_state:
            self._replace_record(center, intent, self.reserve(center.layout.record_bytes(k)))
        elif not intent.is_sparse:
            self._apply(array, self.reserve(array.nbytes).view(array.dtype), intent, blocks.NOTHING)
        elif not self._head[_PROGRESS]:
            positions, new = self._reserve_elements(intent, array.dtype)
            array[positions] = new
        self._end(center, intent)
        return True

    def pending(self) -> Intent | None:
        """The intent that was begun and not completed."""
        if self._head[_STATE] == 0:
            return None
        size = self._head[_INTENT_BYTES]
        try:
            return msgspec.msgpack.decode(self._memory[_INTENT : _INTENT + size], type=Intent)
        except msgspec.DecodeError:
            return None  # its host is alive and writes the next one just now

    def remove(self) -> None:
        """Remove the file. The applied number stays in the table."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the file. The mapping ends with the last array that refers to it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self, center: "SharedCenter", intent: Intent) -> None:
        data = msgspec.msgpack.encode(intent)
        self._memory[_INTENT : _INTENT + len(data)] = data
        self._head[_INTENT_BYTES] = len(data)
        self._head[_PROGRESS] = 0
        self._head[_BLOCK_BYTES] = kernels().STAGED_BYTES
        self._head[_STATE] = 1
        center.begin_write(intent.chunk)

    def _apply(self, array: Array, value: Array, intent: Intent, answer: int) -> bool:
        # `progress` counts blocks of this size: another process, perhaps with other kernels, may have begun.
        block = np.frombuffer(self._memory, array.dtype, self._head[_BLOCK_BYTES] // array.itemsize, _PAGE)
        staged = kernels().staged if array.dtype.kind == "f" else blocks.staged
        operation = {"elastic": blocks.ELASTIC, "blend": blocks.BLEND}.get(intent.operation, blocks.REPLACE)
        return staged(value, array, block, self._progress, operation=operation, a=intent.a, b=intent.b, answer=answer)

    def _replace_record(self, center: "SharedCenter", intent: Intent, value: Array) -> None:
        """Write the record as a whole. Doing it again does no harm, so it has no progress."""
        new, state = center.layout.split_record(intent.chunk, value)
        for target, part in zip(center.record(intent.chunk), (new, *state.values()), strict=True):
            target[:] = part

    def _end(self, center: "SharedCenter", intent: Intent) -> None:
        self._numbers[self._row] = intent.applied
        center.end_write(intent.chunk)
        self._head[_STATE] = 0

    def _reserve_elements(self, intent: Intent, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """Room for positions and new values of a sparse intent."""
        room = self.reserve(intent.count * (8 + dtype.itemsize))
        return room[: 8 * intent.count].view(np.int64), room[8 * intent.count :].view(dtype)

    def _grow(self, size: int) -> None:
        if size <= self._size:
            return
        size = -(-size // _PAGE) * _PAGE
        current = os.fstat(self._file).st_size
        if current < size:
            if self._allow is not None:
                self._allow(size - current)
            reserve(self._file, size, self._path.parent, "a contribution")
        self._memory = mmap.mmap(self._file, size)
        self._head: Any = memoryview(self._memory)[:_PAGE].cast("q")
        self._progress: Any = np.frombuffer(self._memory, np.int64, 1, 8 * _PROGRESS)  # as kernels need it
        self._size = size


class StagingFiles:
    """The staging files of all workers that are connected to a server. Calls for one worker must not overlap."""

    def __init__(self, segment: Path) -> None:
        self._segment = segment
        self._table = AppliedTable(segment)

    @property
    def forgotten(self) -> int:
        """How many workers have lost their rows in the table of applied numbers."""
        return self._table.forgotten

    def remove_leftovers(self) -> None:
        """Remove the files of a killed server, except for what could not be completed."""
        for worker, staging in existing_files(self._segment):
            if staging.pending() is None:
                staging.remove()
            else:
                self._table.claim(worker)
                staging.close()

    def open(self, worker: str, allow: Callable[[int], None] | None = None) -> StagingFile:
        """Open the file of a worker that has connected."""
        row, is_known = self._table.claim(worker)
        return StagingFile(self._path(worker), self._table, row=row, is_known=is_known, allow=allow)

    def retire(self, worker: str, staging: StagingFile) -> None:
        """Remove the file of a worker that has disconnected. Its applied number is kept in case it comes back."""
        if staging.pending() is None:  # else the next holder of the chunk's lock needs it
            staging.remove()
            self._table.release(worker)

    def forget(self, worker: str) -> None:
        """Remove all that is known of a worker that has left."""
        self._path(worker).unlink(missing_ok=True)
        self._table.forget(worker)

    def _path(self, worker: str) -> Path:
        return self._segment / f"{_PREFIX}{worker}"


def finish_pending(segment: Path, center: "SharedCenter", k: int) -> bool:
    """Complete what a killed host has begun for any worker on chunk k, whose lock is held."""
    is_done = False
    for _, staging in existing_files(segment):
        with contextlib.closing(staging):
            is_done |= staging.finish(center, k)
    return is_done


def existing_files(segment: Path) -> Generator[tuple[str, StagingFile]]:
    """The workers that have staging files, and the files."""
    table = AppliedTable(segment)
    for path in segment.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # its worker has just disconnected
            yield path.name.removeprefix(_PREFIX), StagingFile(path, table)
