"""The ring, a feed's queue of batches in the run's shared memory, and the format of a batch.

<segment>/feed-<name>/table      states of slots and producers, locks that show liveness, futexes for waiting
                      slot-0     one batch, and so on up to the high-water mark; grows to the largest batch it has held
                      failed-0   the traceback of a producer

A slot is EMPTY, FILLING, FULL, TAKING and EMPTY again. The process that fills or takes a slot holds its lock, which
the kernel releases when the process dies: a FILLING slot is then EMPTY, a TAKING slot FULL again. So each batch is
taken by exactly one live worker. A producer holds another lock for as long as it lives.

Slots are chosen under one lock for the table. The holder of a slot's lock publishes the slot by writing its state and
then releasing the lock, so a process without that lock must not rely on what it reads of the slot.

A batch is a list of arrays, in a slot and over the network:

0   8   bytes of the table     (little-endian)
8   ... the table: [[dtype, shape], ...] as MessagePack
    ... each array's values, beginning at a multiple of 64
"""

import math
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from maniple.contracts import Array
from maniple.errors import BadFrame, HostAway, InvalidArgument
from maniple.memory.locks import ByteLocks, Futex
from maniple.memory.shm import map_file

MAX_SLOTS = MAX_PRODUCERS = 256
EMPTY, FILLING, FULL, TAKING = range(4)
POLL_S = 0.1  # how often a waiting process checks that the others are alive

_TABLE = np.dtype([
    ("high_water", "i8", (1,)),
    ("producers", "i8", (1,)),  # expected; 0 until the first one registers
    ("batches", "i8", (1,)),  # pushed so far: the sequence number of the newest
    ("first_launched", "i8", (1,)),  # the launcher's number of producer 0, plus 1; 0 if the launcher started none
    ("slot_freed", "i8", (1,)),  # futexes
    ("slot_filled", "i8", (1,)),
    ("reserved", "i8", (10,)),
    *((name, "i8", MAX_SLOTS) for name in ("state", "sequence", "size", "producer", "number")),
    *((name, "i8", MAX_PRODUCERS) for name in ("life", "pushed", "identity", "origin", "disconnected_ns")),
])  # fmt: skip
_TABLE_LOCK = 0
_SLOT_LOCK = 1
PRODUCER_LOCK = 1 + MAX_SLOTS
_LOCK_S = 60.0  # for a lock that is held for microseconds
_GRAIN = 1 << 16  # slots grow by this, so that batches of slightly different sizes are not mapped again
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

_ALIGN = 64
_HEAD = 8
_KINDS = "biufc"  # dtypes of plain numbers
_MAX_ARRAYS = 4096
_MAX_PARTS = 256  # two or three buffers per array, and `sendmsg` accepts 1024

T = TypeVar("T")
_decoder = msgspec.msgpack.Decoder(list[tuple[str, tuple[int, ...]]])


class RunOver(HostAway):
    """The run has ended, and its feeds with it."""

    def __init__(self) -> None:
        super().__init__("the run has ended, and no worker takes batches any more. Push while it is running.")


class RingTable:
    """The table of a ring. Its columns are memoryviews: plain integers, and faster than NumPy's scalars.

    Attributes:
        high_water, producers, batches, first_launched: of the feed, with one item each.
        state, sequence, size: of each slot; `producer` and `number` tell which batch of which producer it holds.
        life, pushed, identity, origin, disconnected_ns: of each producer (`producer_registry`).
    """

    def __init__(self, buffer: mmap.mmap | bytes) -> None:
        table = np.frombuffer(buffer, _TABLE)[0]
        columns = [memoryview(table[name]) for name in _TABLE.names or ()]
        self.high_water, self.producers, self.batches, self.first_launched, _, _, _, *columns = columns
        self.state, self.sequence, self.size, self.producer, self.number, *columns = columns
        self.life, self.pushed, self.identity, self.origin, self.disconnected_ns = columns

    @property
    def states(self) -> list[int]:
        """The states of all slots up to the high-water mark."""
        return self.state[: self.high_water[0]].tolist()


class Ring:
    """One process's view of a feed's queue. A single thread uses it, and holds at most one slot."""

    def __init__(self, segment: Path, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"{name!r} cannot name a feed. Use up to 64 letters, digits, '-' and '_'.")
        self.name, self.segment = name, segment
        self.folder = segment / f"feed-{name}"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self.locks = ByteLocks(self.folder / "table")
            mapped = map_file(self.folder / "table", _TABLE.itemsize)
        except FileNotFoundError:
            raise InvalidArgument(
                f"the run's shared memory {segment} is gone: its host has ended. Start the run again."
            ) from None
        self.table = RingTable(mapped)
        offsets = {name: field[1] for name, field in (_TABLE.fields or {}).items()}
        self.slot_filled = Futex(mapped, offsets["slot_filled"])
        self.slot_freed = Futex(mapped, offsets["slot_freed"])
        self._slots: dict[int, Array] = {}
        self._held = -1

    @property
    def exclusive(self) -> AbstractContextManager[None]:
        """The lock of the table, for a `with` block around any change of it."""
        return self.locks.hold(_TABLE_LOCK, timeout_s=_LOCK_S, what=f"the table of feed {self.name!r}")

    @property
    def is_gone(self) -> bool:
        """Whether the run has ended and its memory is freed."""
        return not self.folder.exists()

    def reserve(self) -> int | None:
        """Take an empty slot for filling; None if there is none."""
        table = self.table
        with self.exclusive:
            states = table.states
            if EMPTY not in states:
                self._recover(states)
                if EMPTY not in states:
                    return None
            slot = states.index(EMPTY)
            table.batches[0] += 1
            table.sequence[slot] = table.batches[0]
            return slot if self._hold(slot, FILLING) else None

    def publish(self, slot: int, size: int, *, producer: int, number: int) -> None:
        """Mark the slot FULL: it holds batch `number` of `producer`, of `size` bytes."""
        table = self.table
        table.size[slot], table.producer[slot], table.number[slot] = size, producer, number
        self.release(slot, FULL)

    def take(self) -> int | None:
        """Take the slot of the oldest batch; None if there is none."""
        table = self.table
        with self.exclusive:
            states = table.states
            if FULL not in states:
                self._recover(states)
            slots = [slot for slot, state in enumerate(states) if state == FULL]
            if not slots:
                return None
            slot = min(slots, key=table.sequence.__getitem__)
            if not self._hold(slot, TAKING):
                return None
            # The slot may be filled again from here on, so the producer's progress is kept elsewhere.
            producer = table.producer[slot]
            table.pushed[producer] = max(table.pushed[producer], table.number[slot])
        return slot

    def release(self, slot: int, state: int = EMPTY) -> None:
        """Give the slot another state: EMPTY if its batch was taken."""
        self.table.state[slot] = state
        self.locks.give(_SLOT_LOCK + slot)
        self._held = -1
        if state == FULL:
            self.slot_filled.ring()
            return
        states = self.table.states
        # Wake a waiting producer when half of the slots are free: waking it for every batch costs context switches.
        if 2 * states.count(EMPTY) >= len(states) or FULL not in states:
            self.slot_freed.ring()
        if not any(states):  # workers that wait for the end of the feed
            self.slot_filled.ring()

    def await_change(self, futex: Futex, attempt: Callable[[], T | None], on_wait: Callable[[], None]) -> T:
        """Repeat `attempt` whenever the futex rings, until it gives a result; `on_wait` may raise to give up."""
        while True:
            count = futex.count
            if (result := attempt()) is not None:
                return result
            on_wait()
            futex.wait(count, POLL_S)

    def give_back(self) -> None:
        """Undo an unfinished fill or take: the slot gets the state it had before. Does nothing if none is held."""
        if self._held >= 0:
            self.release(self._held, FULL if self.table.state[self._held] == TAKING else EMPTY)

    def is_empty(self) -> bool:
        """Whether no batch is queued or in progress, after slots of dead processes are recovered. Needs `exclusive`."""
        states = self.table.states
        self._recover(states)
        return not any(states)

    def newest(self, producer: int) -> int:
        """The number of the newest batch of `producer` in a slot; 0 if there is none. Needs `exclusive`."""
        table = self.table
        full = [slot for slot, state in enumerate(table.states) if state in {FULL, TAKING}]
        return max((table.number[slot] for slot in full if table.producer[slot] == producer), default=0)

    def buffer(self, slot: int, size: int) -> Array:
        """The first `size` bytes of a slot, which grows if necessary."""
        known = self._slots.get(slot)
        if known is None or known.nbytes < size:
            whole = -(-max(1, size) // _GRAIN) * _GRAIN
            need = "a batch (smaller batches or a lower high_water need less)"
            memory = map_file(self.folder / f"slot-{slot}", whole, what=need)
            known = self._slots[slot] = np.frombuffer(memory, np.uint8)
        return known[:size]

    def reserved_bytes(self, slot: int) -> int:
        """The size of a slot's file."""
        with suppress(FileNotFoundError):
            return (self.folder / f"slot-{slot}").stat().st_size
        return 0

    def close(self) -> None:
        """Give back the slot that is held, and close the files."""
        self.give_back()
        self.locks.close()
        self._slots.clear()

    def _hold(self, slot: int, state: int) -> bool:
        """Lock a slot; False if its last holder has published it, but not released the lock yet."""
        if not self.locks.take(_SLOT_LOCK + slot):
            return False
        self.table.state[slot] = state
        self._held = slot
        return True

    def _recover(self, states: list[int]) -> None:
        """Free the slots whose holders have died, and update `states`. Needs `exclusive`."""
        for slot, state in enumerate(states):
            if state in {FILLING, TAKING} and slot != self._held and self.locks.take(_SLOT_LOCK + slot):
                state = self.table.state[slot]  # the holder may have released it just now
                if state in {FILLING, TAKING}:
                    state = self.table.state[slot] = FULL if state == TAKING else EMPTY
                states[slot] = state
                self.locks.give(_SLOT_LOCK + slot)


def read_table(folder: Path) -> RingTable | None:
    """A copy of a feed's table, for a process that does not use the feed; None if no producer has opened it."""
    with suppress(FileNotFoundError):
        content = (folder / "table").read_bytes()
        if len(content) == _TABLE.itemsize and (table := RingTable(content)).producers[0]:
            return table
    return None


@dataclass(frozen=True)
class FeedBatch:
    """Arrays to be sent, and the offset of each in the batch."""

    arrays: list[Array]
    head: bytes
    offsets: list[int]
    size_bytes: int

    @classmethod
    def of(cls, values: Sequence[Any]) -> "FeedBatch":
        """A batch of arrays, or of values that NumPy can convert."""
        arrays = [_array(i, value) for i, value in enumerate(values)]
        if len(arrays) > _MAX_ARRAYS:
            raise InvalidArgument(f"a batch has {len(arrays)} arrays, but the limit is {_MAX_ARRAYS}. Stack them.")
        table = msgspec.msgpack.encode([(array.dtype.str, array.shape) for array in arrays])
        head = len(table).to_bytes(_HEAD, "little") + table
        offsets, size = _offsets(len(head), [array.nbytes for array in arrays])
        return cls(arrays, head, offsets, size)

    def write(self, buffer: Array) -> None:
        """Copy the batch into `buffer`."""
        buffer[: len(self.head)] = np.frombuffer(self.head, np.uint8)
        for array, offset in zip(self.arrays, self.offsets, strict=True):
            if array.size:
                part = buffer[offset : offset + array.nbytes]
                np.copyto(part.view(array.dtype).reshape(array.shape), array)

    def parts(self) -> Iterator[Any]:
        """The bytes of the batch in pieces; contiguous arrays are not copied."""
        if len(self.arrays) > _MAX_PARTS:
            whole = np.empty(self.size_bytes, np.uint8)
            self.write(whole)
            yield whole
            return
        yield self.head
        at = len(self.head)
        for array, offset in zip(self.arrays, self.offsets, strict=True):
            yield bytes(offset - at)
            if array.size:
                yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at = offset + array.nbytes


def read(buffer: Array) -> list[Array]:
    """The arrays of the batch in `buffer`, as views of it; BadFrame unless it holds exactly one batch."""
    try:
        end = _HEAD + int.from_bytes(buffer[:_HEAD].tobytes(), "little")
        table = _decoder.decode(buffer[_HEAD:end].tobytes())
        sizes = [_size(dtype, shape) for dtype, shape in table]
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError, ValueError) as error:
        raise BadFrame(f"the message is not a batch: {error}") from None
    offsets, size_bytes = _offsets(end, sizes)
    if size_bytes != buffer.nbytes:
        raise BadFrame(f"a batch of {size_bytes} bytes came in a message of {buffer.nbytes}.")
    parts = (buffer[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True))
    return [part.view(dtype).reshape(shape) for part, (dtype, shape) in zip(parts, table, strict=True)]


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    kind = np.dtype(dtype)
    is_shape = len(shape) <= 32 and min(shape, default=0) >= 0 and math.prod(max(1, n) for n in shape) < 1 << 56
    if kind.kind not in _KINDS or kind.str != dtype or not is_shape:
        raise ValueError(f"{dtype!r} {shape} is not an array of numbers")
    return math.prod(shape) * kind.itemsize


def _offsets(head_bytes: int, sizes: list[int]) -> tuple[list[int], int]:
    """The offset of each array, and the end of the last."""
    offsets: list[int] = []
    end = head_bytes
    for size in sizes:
        offsets.append(-(-end // _ALIGN) * _ALIGN)
        end = offsets[-1] + size
    return offsets, end


def _array(i: int, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch tensors on a GPU, with a gradient, or of bfloat16
        raise InvalidArgument(
            f"array {i} of the batch, a {type(value).__name__}, cannot be pushed: {error} "
            "Push NumPy arrays, or what NumPy can read: tensor.detach().cpu().float()."
        ) from error
    if array.dtype.kind not in _KINDS:
        raise InvalidArgument(
            f"array {i} of the batch has dtype {array.dtype}, but only numbers and booleans can be pushed. "
            "Encode strings and objects as numbers first."
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
