"""The registry of a feed's producers: which have registered, which are alive, which have ended and how.

A producer holds a lock for as long as it lives. One that loses its lock without having reported its end

- and was started by the launcher: has ended as the launcher records in the file `producers` of the segment;
- came over the network: may be disconnected for a while;
- otherwise was killed.
"""

import os
import shutil
import time
from pathlib import Path

from maniple.clock import Deadline
from maniple.errors import Conflict, InvalidArgument, ProducerFailed, WaitedTooLong
from maniple.feed.ring import EMPTY, MAX_PRODUCERS, MAX_SLOTS, PRODUCER_LOCK, Ring, RingTable, read_table

NEVER, LIVE, ENDED, FAILED = range(4)
RECONNECT_S = 10.0  # for a producer elsewhere to come back: longer than its own retries take
REGISTER_S = 60.0  # for a first producer to register: as long as slow imports may take
_LOCAL, _REMOTE, _LAUNCHED = range(3)  # the column `origin`; _LAUNCHED + n is the launcher's producer n


def register(
    ring: Ring, identity: int, index: int, count: int, high_water: int, *, number: int = -1, is_remote: bool = False
) -> tuple[int, int, int] | None:
    """Register a producer; returns its index, the number of producers, and how many of its batches have arrived.

    None while its former connection still holds the lock.

    Args:
        identity: a random number by which it is recognized when it reconnects.
        index, count: its place among the producers of the feed; index -1 is the next free one.
        high_water: how many batches may be queued.
        number: its place among all producers that the launcher has started; -1 if another program started it.
        is_remote: it comes over the network.
    """
    if not 1 <= high_water <= MAX_SLOTS:
        raise InvalidArgument(f"high_water={high_water} is out of range (1 to {MAX_SLOTS}). Leave it out for 8.")
    if not (1 <= count <= MAX_PRODUCERS and -1 <= index < count):
        raise InvalidArgument(
            f"producer {index} of {count} is out of range: there are 1 to {MAX_PRODUCERS}, counted from 0. Set "
            "MANIPLE_PRODUCER and MANIPLE_PRODUCERS accordingly."
        )
    table = ring.table
    with ring.exclusive:
        wanted, index = index, _choose_index(ring, identity, index, count, is_launched=number >= 0)
        _check_acceptable(ring, identity, index, high_water)
        if not ring.locks.take(PRODUCER_LOCK + index):
            return None
        if number >= 0:
            table.first_launched[0] = number - wanted + 1
        table.high_water[0] = high_water
        table.producers[0] = max(table.producers[0], count, index + 1)
        table.identity[index] = identity
        table.origin[index] = _LAUNCHED + number if number >= 0 else _REMOTE if is_remote else _LOCAL
        table.disconnected_ns[index] = 0
        table.life[index] = max(table.life[index], LIVE)
        return index, table.producers[0], max(table.pushed[index], ring.newest(index))


def end(ring: Ring, index: int, failure: str | None = None) -> None:
    """Record that producer `index` has ended: normally, or with the traceback in `failure`."""
    with ring.exclusive:
        if ring.table.life[index] == LIVE:
            if failure is not None:
                (ring.folder / f"failed-{index}").write_text(failure, errors="replace")
            ring.table.life[index] = ENDED if failure is None else FAILED
        ring.locks.give(PRODUCER_LOCK + index)
    ring.slot_filled.ring()


class ProducerMonitor:
    """A worker's check of the producers of one feed."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._absence: Deadline | None = None  # while no producer is alive
        self._disconnected: dict[int, tuple[int, Deadline]] = {}  # by index: when it was noticed
        self._blocked: dict[str, int] | None = None  # feeds in which the launcher's producers wait, and their batches

    def has_ended(self) -> bool:
        """Whether all producers have ended and no batch is left. Raises ProducerFailed if one has failed."""
        ring = self._ring
        with ring.exclusive:
            is_empty = ring.is_empty()  # in any case: it recovers the slots of dead processes
            states = [self._state(index) for index in range(ring.table.producers[0])]
            missing = [index for index, state in enumerate(states) if state == NEVER]
            if LIVE in states or not is_empty:
                self._absence = None
                return False
            if states and not missing:
                return True
        self._check_absence(missing)
        return False

    def _state(self, index: int) -> int:
        ring, table = self._ring, self._ring.table
        state = table.life[index]
        if state == LIVE and ring.locks.take(PRODUCER_LOCK + index):  # it has lost its lock
            ring.locks.give(PRODUCER_LOCK + index)
            state = table.life[index] = self._state_without_lock(index)
        elif state == NEVER and table.first_launched[0]:
            state = self._recorded_exit(index)
        if state == FAILED:
            raise ProducerFailed(self._failure(index))
        return state

    def _state_without_lock(self, index: int) -> int:
        table = self._ring.table
        if table.origin[index] >= _LAUNCHED:
            return self._recorded_exit(index)
        if table.origin[index] == _LOCAL:
            return FAILED
        since_ns = table.disconnected_ns[index] = table.disconnected_ns[index] or time.monotonic_ns()
        if self._disconnected.get(index, (0, None))[0] != since_ns:
            self._disconnected[index] = since_ns, Deadline(RECONNECT_S - (time.monotonic_ns() - since_ns) / 1e9)
        return FAILED if self._disconnected[index][1].is_over() else LIVE

    def _recorded_exit(self, index: int) -> int:
        """The state that the launcher has recorded; LIVE until it has reaped the process."""
        exits, number = read_exits(self._ring.segment), self._number(index)
        return (exits[number] if number < len(exits) else NEVER) or LIVE

    def _number(self, index: int) -> int:
        table = self._ring.table
        if table.origin[index] >= _LAUNCHED:
            return table.origin[index] - _LAUNCHED
        return table.first_launched[0] - 1 + index

    def _failure(self, index: int) -> str:
        ring = self._ring
        which, path = f"producer {index} of feed {ring.name!r}", ring.folder / f"failed-{index}"
        if path.exists():
            text = path.read_text(errors="replace")
            return f"{which} has failed, so that batches are missing. It says:\n{text}"
        where = "It was killed, or its connection has been cut for too long."
        if ring.table.origin[index] >= _LAUNCHED or ring.table.life[index] == NEVER:
            where = f"What it printed is in logs/producer-{self._number(index)}.log of the run folder."
        return f"{which} ended before its data did, so that batches are missing. {where}"

    def _check_absence(self, missing: list[int]) -> None:
        """Wait for producers that may still register, for a limited time."""
        ring, exits = self._ring, read_exits(self._ring.segment)
        if exits and not ring.table.producers[0] and self._may_open(exits):
            self._absence = None
            return
        if self._absence is None:
            self._absence = Deadline(REGISTER_S)
        if self._absence.is_over():
            who = f"producers {missing} of" if missing else "a producer for"
            others = ", ".join(_other_tables(ring))
            raise WaitedTooLong(
                f"waited {REGISTER_S:g} s for {who} feed {ring.name!r}, and none came. "
                + (f"Is the name right? Producers push to: {others}. If it is, start" if others else "Start")
                + " one with `maniple run --feed produce.py`, or anywhere with MANIPLE_ADDRESS and MANIPLE_TOKEN_FILE "
                "set."
            )

    def _may_open(self, exits: bytes) -> bool:
        """Whether one of the launcher's producers may still open this feed: it is alive and makes progress."""
        if 0 not in exits:
            others = ", ".join(_other_tables(self._ring)) or "none"
            raise ProducerFailed(
                f"feed {self._ring.name!r} was never opened, and all {len(exits)} producers have ended. Is it the name "
                f"that they push to? Theirs: {others}."
            )
        before, self._blocked = self._blocked, _blocked_feeds(self._ring, exits)
        return self._blocked is None or self._blocked != before


def reset_producers(segment: Path, count: int) -> None:
    """Begin the launcher's record of `count` producers.

    Producers of a launcher that was killed have died with it. New producers replace their feeds; without new ones, the
    old ones count as failed.
    """
    if not count:
        if exits := read_exits(segment):
            (segment / "producers").write_bytes(exits.replace(b"\0", bytes([FAILED])))
        return
    for path in segment.glob("feed-*"):
        table = read_table(path)
        if table is not None and table.first_launched[0]:  # otherwise its producers may be alive
            shutil.rmtree(path, ignore_errors=True)
    (segment / "producers").write_bytes(bytes(count))


def record_exit(segment: Path, number: int, *, is_well: bool) -> None:
    """Record how the process of the launcher's producer `number` has ended."""
    with (segment / "producers").open("r+b") as file:
        os.pwrite(file.fileno(), bytes([ENDED if is_well else FAILED]), number)


def read_exits(segment: Path) -> bytes:
    """The launcher's record, a state per producer; empty if it has started none."""
    try:
        return (segment / "producers").read_bytes()
    except FileNotFoundError:
        return b""


def _choose_index(ring: Ring, identity: int, index: int, count: int, *, is_launched: bool) -> int:
    """The index that a producer had, asks for or gets."""
    table = ring.table
    lives, identities = table.life.tolist(), table.identity.tolist()
    if identity in identities:
        return identities.index(identity)
    # A producer that was started by hand may have taken the place of one of the launcher's.
    is_taken = is_launched and lives[index] != NEVER and table.origin[index] < _LAUNCHED
    if index >= 0 and not is_taken:
        return index
    # Leave the places of the launcher's producers that have not registered yet.
    first = count if is_taken else table.producers[0] if table.first_launched[0] else 0
    if NEVER not in lives[first:]:
        raise InvalidArgument(
            f"feed {ring.name!r} has had {MAX_PRODUCERS} producers, which is the limit. Use another feed."
        )
    return lives.index(NEVER, first)


def _check_acceptable(ring: Ring, identity: int, index: int, high_water: int) -> None:
    """Raise an error if the place is taken, the feed is over, or the high-water mark differs."""
    table, name = ring.table, ring.name
    state, is_known = table.life[index], table.identity[index] == identity
    if state == LIVE and not is_known:
        raise Conflict(
            f"producer {index} of feed {name!r} has registered already. One script pushes to a feed: start copies of "
            "it with --producers, or give each script another feed, Feed('valid')."
        )
    count, known_mark = table.producers[0], table.high_water[0]
    is_over = count > 0 and all(life >= ENDED for life in table.life[:count].tolist())
    if state == FAILED or (state == ENDED and not is_known) or (state == NEVER and is_over):
        raise InvalidArgument(
            f"feed {name!r} is over: its {count} producers have ended. A feed is opened once by each producer; if more "
            "are to come, set MANIPLE_PRODUCERS for all of them."
        )
    if known_mark not in {0, high_water}:
        raise Conflict(
            f"high_water={high_water} was given, but another producer of feed {name!r} has given {known_mark}. Give "
            "the same value to all."
        )


def _other_tables(ring: Ring) -> dict[str, RingTable]:
    """Copies of the tables of the other feeds, by name."""
    tables = {path.name: read_table(path) for path in sorted(ring.segment.glob("feed-*")) if path != ring.folder}
    return {name.removeprefix("feed-"): table for name, table in tables.items() if table is not None}


def _blocked_feeds(ring: Ring, exits: bytes) -> dict[str, int] | None:
    """The batches pushed to each full feed, if all live producers of the launcher wait for a slot; None otherwise."""
    full = {name: table for name, table in _other_tables(ring).items() if EMPTY not in table.states}
    waiting = {
        origin - _LAUNCHED
        for table in full.values()
        for origin, life in zip(table.origin, table.life, strict=True)
        if life == LIVE and origin >= _LAUNCHED
    }
    living = {number for number, exited in enumerate(exits) if not exited}
    return {name: table.batches[0] for name, table in full.items()} if living <= waiting else None
