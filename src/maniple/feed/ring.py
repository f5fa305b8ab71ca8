"""The ring: a feed's queue of batches, in the run's shared memory.

<segment>/feed-<name>/table      states of slots and producers, locks that tell who is alive, bells for those who wait
                      slot-0     one batch, and so on up to the mark; each grows to the largest batch it has held
                      failed-0   the traceback of a producer

A slot is EMPTY, then FILLING, FULL, TAKING and EMPTY again. Who fills or takes holds the slot's lock, which the kernel
gives back when its holder dies: a slot that was FILLING is EMPTY then, one that was TAKING is FULL again. So a batch is
taken by exactly one worker that lives. Locks of producers tell in the same way who of them is alive.

Slots are chosen under one lock for the whole table; what becomes of a slot is its holder's to say, by its state and
then its lock. So one who holds no lock of a slot must not trust what it reads of it.
"""

import mmap
import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from maniple.bell import Bell
from maniple.center.locks import ByteLocks
from maniple.contracts import Array
from maniple.errors import InvalidArgument, SharedMemoryFull

MAX_SLOTS = MAX_PRODUCERS = 256
EMPTY, FILLING, FULL, TAKING = range(4)

# Places in the table, in words of 8 bytes.
MARK, COUNT, LAST, FIRST = range(4)  # the high-water mark, the producers expected, the newest batch; see `roll`
_ROOM, _FULL = 4, 5  # bells
STATE, SEQUENCE, SIZE, OWNER, NUMBER = (16 + i * MAX_SLOTS for i in range(5))  # of slots
LIFE, PUSHED, WHO, MISSED = (16 + 5 * MAX_SLOTS + i * MAX_PRODUCERS for i in range(4))  # of producers, see `roll`
_WORDS = MISSED + MAX_PRODUCERS

_TABLE_LOCK = 0
_SLOT_LOCK = 1
PRODUCER_LOCK = 1 + MAX_SLOTS
_PATIENCE_S = 60.0
_GRAIN = 1 << 16  # slots grow by this
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Ring:
    """One side's view of a feed's queue. One thread uses it, and holds at most one slot."""

    def __init__(self, segment: Path, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"{name!r} cannot name a feed. Use up to 64 letters, digits, '-' and '_'.")
        self.name, self.segment = name, segment
        self.folder = segment / f"feed-{name}"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self.locks = ByteLocks(self.folder / "table")
            table = _mapped(self.folder / "table", _WORDS * 8)
        except FileNotFoundError:
            raise InvalidArgument(f"the run's shared memory {segment} is gone: its host has ended.") from None
        self.words = memoryview(table).cast("q")
        self.full, self.room = Bell(table, _FULL * 8), Bell(table, _ROOM * 8)  # a batch has come; a slot is free
        self.alone = _Alone(self.locks, name)  # the only one who changes the table, in a `with` block
        self._slots: dict[int, Array] = {}
        self._held = -1

    @property
    def is_gone(self) -> bool:
        """The run has ended and its memory is freed."""
        return not self.folder.exists()

    def reserve(self) -> int | None:
        """An empty slot, FILLING from now on and this side's own; None if there is none."""
        with self.alone:
            states = self._states()
            if EMPTY not in states:
                self._recover(states)
                if EMPTY not in states:
                    return None
            slot = states.index(EMPTY)
            self.words[LAST] += 1
            self.words[SEQUENCE + slot] = self.words[LAST]
            return slot if self._hold(slot, FILLING) else None

    def publish(self, slot: int, size: int, *, producer: int, number: int) -> None:
        """The slot is FULL: it holds batch `number` of `producer`."""
        words = self.words
        words[SIZE + slot], words[OWNER + slot], words[NUMBER + slot] = size, producer, number
        self._let(slot, FULL)

    def take(self) -> int | None:
        """The slot of the oldest batch, TAKING from now on and this side's own; None if there is none."""
        words = self.words
        with self.alone:
            states = self._states()
            if FULL not in states:
                self._recover(states)
            slots = [slot for slot, state in enumerate(states) if state == FULL]
            if not slots:
                return None
            slot = min(slots, key=lambda slot: words[SEQUENCE + slot])
            if not self._hold(slot, TAKING):
                return None
            # From here on the slot may be used again, so what it held is remembered elsewhere.
            pushed = PUSHED + words[OWNER + slot]
            words[pushed] = max(words[pushed], words[NUMBER + slot])
        return slot

    def release(self, slot: int) -> None:
        """The batch is taken: the slot is EMPTY."""
        self._let(slot, EMPTY)

    def give_back(self) -> None:
        """Undo what was begun: the slot that this side holds is as it was before."""
        if self._held >= 0:
            self._let(self._held, FULL if self.words[STATE + self._held] == TAKING else EMPTY)

    def is_empty(self) -> bool:
        """Nothing waits and nothing is under way; what the dead have held is free again. Called `alone`."""
        states = self._states()
        self._recover(states)
        return not any(states)

    def newest(self, producer: int) -> int:
        """The number of the newest batch of `producer` that is in a slot. Called `alone`."""
        words = self.words
        full = [slot for slot, state in enumerate(self._states()) if state in {FULL, TAKING}]
        return max((words[NUMBER + slot] for slot in full if words[OWNER + slot] == producer), default=0)

    def size(self, slot: int) -> int:
        """The bytes of the batch in a slot."""
        return self.words[SIZE + slot]

    def buffer(self, slot: int, size: int) -> Array:
        """The first `size` bytes of a slot, which grows if need be."""
        known = self._slots.get(slot)
        if known is None or known.nbytes < size:
            whole = -(-max(1, size) // _GRAIN) * _GRAIN
            known = self._slots[slot] = np.frombuffer(_mapped(self.folder / f"slot-{slot}", whole), np.uint8)
        return known[:size]

    def room_bytes(self, slot: int) -> int:
        """The bytes that a slot has room for already."""
        with suppress(FileNotFoundError):
            return (self.folder / f"slot-{slot}").stat().st_size
        return 0

    def close(self) -> None:
        """Give back what this side holds."""
        self.give_back()
        self.locks.close()
        self._slots.clear()

    def _states(self) -> list[int]:
        return self.words[STATE : STATE + self.words[MARK]].tolist()

    def _hold(self, slot: int, state: int) -> bool:
        """Make a slot this side's own; False if its last holder has not let it go yet, which it is about to."""
        if not self.locks.take(_SLOT_LOCK + slot):
            return False
        self.words[STATE + slot] = state
        self._held = slot
        return True

    def _let(self, slot: int, state: int) -> None:
        self.words[STATE + slot] = state
        self.locks.give(_SLOT_LOCK + slot)
        self._held = -1
        if state == FULL:
            self.full.ring()
            return
        states = self._states()
        # A producer that waits is woken when half of the slots are free: so it need not be for every batch.
        if 2 * states.count(EMPTY) >= len(states) or FULL not in states:
            self.room.ring()
        if not any(states):  # those who wait for the end must know that nothing is left
            self.full.ring()

    def _recover(self, states: list[int]) -> None:
        """Free the slots whose holders have died. Called `alone`."""
        for slot, state in enumerate(states):
            if state in {FILLING, TAKING} and slot != self._held and self.locks.take(_SLOT_LOCK + slot):
                state = self.words[STATE + slot]  # its holder may just have let it go
                if state in {FILLING, TAKING}:
                    state = self.words[STATE + slot] = FULL if state == TAKING else EMPTY
                states[slot] = state
                self.locks.give(_SLOT_LOCK + slot)


class _Alone:
    """The lock of a whole table, for a `with` block."""

    def __init__(self, locks: ByteLocks, name: str) -> None:
        self._locks, self._what = locks, f"the table of feed {name!r}"

    def __enter__(self) -> None:
        self._locks.insist(_TABLE_LOCK, timeout_s=_PATIENCE_S, what=self._what)

    def __exit__(self, *_: object) -> None:
        self._locks.give(_TABLE_LOCK)


def peek(folder: Path) -> memoryview | None:
    """The words of a feed's table as they are now, for one who takes no part; None if no producer has opened it."""
    with suppress(FileNotFoundError):
        table = (folder / "table").read_bytes()
        if len(table) == _WORDS * 8 and (words := memoryview(table).cast("q"))[COUNT]:
            return words
    return None


def _mapped(path: Path, size: int) -> mmap.mmap:
    """A file of at least `size` bytes, reserved before it is written: a full memory is an error and no bus error."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, os.fstat(file).st_size)
    except OSError as error:
        raise SharedMemoryFull(
            f"{path.parent.parent} refuses {size:,} bytes for a batch: {error.strerror}. Push smaller batches, lower "
            "high_water, free some space there, or set MANIPLE_SHM to another folder that is held in memory."
        ) from error
    finally:
        os.close(file)
