"""The roll of a feed's producers: who has come, who is alive, who has ended and how.

A producer holds a lock for its life. Of one that the launcher has started, the launcher notes how its process ended,
in the file `producers` of the segment; one that came over the network may be away for a while; any other that lets
its lock go without saying that it has ended was killed.
"""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from maniple.center.locks import Patience
from maniple.errors import Conflict, InvalidArgument, ProducerFailed, WaitedTooLong
from maniple.feed.ring import (
    COUNT,
    EMPTY,
    FIRST,
    LAST,
    LIFE,
    MARK,
    MAX_PRODUCERS,
    MAX_SLOTS,
    MISSED,
    PRODUCER_LOCK,
    PUSHED,
    STATE,
    WHO,
    Ring,
    peek,
)

NEVER, LIVE, ENDED, FAILED = range(4)
AWAY_S = 10.0  # for so long a producer elsewhere may be cut off
COME_S = 60.0  # for so long a producer is waited for while nobody is there who could push
# In the word MISSED; of one who is far, also when it was missed first; of one that was launched, less its number.
_NEAR, _FAR, _LAUNCHED = 0, -1, -2


@dataclass(frozen=True)
class Ticket:
    """What a producer says of itself.

    Attributes:
        who: a number of its own, by which it is known when it comes again.
        index, count: its place among the producers of the feed; index -1 is the next free one.
        high_water: how many batches may wait.
        number: its place among all producers that the launcher has started; -1 if it started by itself.
        is_far: it comes over the network.
    """

    who: int
    index: int = -1
    count: int = 1
    high_water: int = 8
    number: int = -1
    is_far: bool = False

    def check(self) -> None:
        """Raise InvalidArgument if it cannot be so."""
        if not 1 <= self.high_water <= MAX_SLOTS:
            raise InvalidArgument(
                f"high_water={self.high_water} cannot be kept (1 to {MAX_SLOTS}). Leave it out for 8."
            )
        if not (1 <= self.count <= MAX_PRODUCERS and -1 <= self.index < self.count):
            raise InvalidArgument(
                f"producer {self.index} of {self.count} cannot be: there are 1 to {MAX_PRODUCERS}, counted from 0. "
                "Set MANIPLE_PRODUCER and MANIPLE_PRODUCERS accordingly."
            )


def enrol(ring: Ring, ticket: Ticket) -> tuple[int, int, int] | None:
    """Enter a producer; gives its index, the count, and how many batches of its own have come.

    None if its own former connection has not been given up yet.
    """
    ticket.check()
    words = ring.words
    with ring.alone:
        index = _place(ring, ticket)
        _refuse_late(ring, ticket, index)
        if not ring.locks.take(PRODUCER_LOCK + index):
            return None
        words[MARK] = ticket.high_water
        words[COUNT] = max(words[COUNT], ticket.count, index + 1)
        if ticket.number >= 0:
            words[FIRST] = ticket.number - ticket.index + 1
        words[WHO + index] = ticket.who
        words[MISSED + index] = _LAUNCHED - ticket.number if ticket.number >= 0 else _FAR if ticket.is_far else _NEAR
        words[LIFE + index] = max(words[LIFE + index], LIVE)
        return index, words[COUNT], max(words[PUSHED + index], ring.newest(index))


def end(ring: Ring, index: int, failure: str | None = None) -> None:
    """Producer `index` has ended: well, or with the traceback in `failure`."""
    with ring.alone:
        if ring.words[LIFE + index] == LIVE:
            if failure is not None:
                (ring.folder / f"failed-{index}").write_text(failure, errors="replace")
            ring.words[LIFE + index] = ENDED if failure is None else FAILED
        ring.locks.give(PRODUCER_LOCK + index)
    ring.full.ring()


class Watch:
    """A worker's eye on the producers."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._patience: Patience | None = None  # while nobody is there who could push
        self._missed: dict[int, tuple[int, Patience]] = {}  # since when a producer elsewhere has been cut off
        self._stand: dict[str, int] | None = None  # of feeds in which all who could open this one are held up

    def has_ended(self) -> bool:
        """All producers have ended and nothing is left. ProducerFailed if one has not ended well."""
        ring = self._ring
        with ring.alone:
            is_empty = ring.is_empty()  # always: what the dead have held must not stay until the others are taken
            fates = [self._fate(index) for index in range(ring.words[COUNT])]
            missing = [index for index, fate in enumerate(fates) if fate == NEVER]
            if LIVE in fates or not is_empty:
                self._patience = None
                return False
            if fates and not missing:
                return True
        self._await(missing)
        return False

    def _fate(self, index: int) -> int:
        """What became of producer `index`; raises ProducerFailed."""
        ring, words = self._ring, self._ring.words
        state = words[LIFE + index]
        if state == LIVE and ring.locks.take(PRODUCER_LOCK + index):  # it has let its life's lock go
            ring.locks.give(PRODUCER_LOCK + index)
            state = words[LIFE + index] = self._judge(index)
        elif state == NEVER and words[FIRST]:
            state = self._told(index)
        if state == FAILED:
            raise ProducerFailed(self._failure(index))
        return state

    def _judge(self, index: int) -> int:
        """What a producer is that has ended without a word."""
        words = self._ring.words
        if words[MISSED + index] <= _LAUNCHED:
            return self._told(index)
        if words[MISSED + index] == _NEAR:
            return FAILED
        if words[MISSED + index] == _FAR:
            words[MISSED + index] = time.monotonic_ns()
        since_ns = words[MISSED + index]
        if self._missed.get(index, (0, None))[0] != since_ns:  # a new absence
            self._missed[index] = since_ns, Patience(AWAY_S - (time.monotonic_ns() - since_ns) / 1e9)
        return FAILED if self._missed[index][1].is_over() else LIVE

    def _told(self, index: int) -> int:
        """What the launcher has noted of a producer: LIVE until its process is collected."""
        marks, number = read_marks(self._ring.segment), self._number(index)
        return (marks[number] if number < len(marks) else NEVER) or LIVE

    def _number(self, index: int) -> int:
        missed = self._ring.words[MISSED + index]
        return _LAUNCHED - missed if missed <= _LAUNCHED else self._ring.words[FIRST] - 1 + index

    def _failure(self, index: int) -> str:
        ring = self._ring
        which, path = f"producer {index} of feed {ring.name!r}", ring.folder / f"failed-{index}"
        if path.exists():
            text = path.read_text(errors="replace")
            return f"{which} has failed, so that batches are missing. It says:\n{text}"
        where = "It was killed, or its connection has been cut for too long."
        if ring.words[MISSED + index] <= _LAUNCHED or ring.words[LIFE + index] == NEVER:
            where = f"What it printed is in logs/producer-{self._number(index)}.log of the run folder."
        return f"{which} ended before its data did, so that batches are missing. {where}"

    def _await(self, missing: list[int]) -> None:
        """Nobody is there who could push: some may still come, but not for ever."""
        ring, marks = self._ring, read_marks(self._ring.segment)
        if marks and not ring.words[COUNT] and self._may_open(marks):
            self._patience = None
            return
        if self._patience is None:
            self._patience = Patience(COME_S)
        if self._patience.is_over():
            who = f"producers {missing} of" if missing else "a producer for"
            others = _names(ring)
            raise WaitedTooLong(
                f"waited {COME_S:g} s for {who} feed {ring.name!r}, and none came. "
                + (f"Is the name right? Producers push to: {others}. If it is, start" if others else "Start")
                + " one with `maniple run --feed produce.py`, or anywhere with MANIPLE_ADDRESS and MANIPLE_TOKEN_FILE "
                "set."
            )

    def _may_open(self, marks: bytes) -> bool:
        """A producer of the launcher's may open this feed yet: one is alive, and does not just wait for room."""
        if 0 not in marks:
            raise ProducerFailed(
                f"feed {self._ring.name!r} was never opened, and all {len(marks)} producers have ended. Is it the name "
                f"that they push to? Theirs: {_names(self._ring) or 'none'}."
            )
        before, self._stand = self._stand, _stand(self._ring, marks)
        return self._stand is None or self._stand != before


def begin(segment: Path, count: int) -> None:
    """Begin the launcher's notes on `count` producers.

    Those of a launcher that was killed have died with it. Their feeds make room for those of the new ones; if there
    are none, they have failed.
    """
    if not count:
        if marks := read_marks(segment):
            (segment / "producers").write_bytes(marks.replace(b"\0", bytes([FAILED])))
        return
    for path in segment.glob("feed-*"):
        words = peek(path)
        if words is not None and words[FIRST]:  # else its producers were started by hand, and are alive maybe
            shutil.rmtree(path, ignore_errors=True)
    (segment / "producers").write_bytes(bytes(count))


def mark(segment: Path, number: int, *, is_well: bool) -> None:
    """Note how the process of producer `number` has ended."""
    with (segment / "producers").open("r+b") as file:
        os.pwrite(file.fileno(), bytes([ENDED if is_well else FAILED]), number)


def read_marks(segment: Path) -> bytes:
    """What the launcher has noted; nothing if it has started no producer."""
    try:
        return (segment / "producers").read_bytes()
    except FileNotFoundError:
        return b""


def _place(ring: Ring, ticket: Ticket) -> int:
    """The index that a producer had, wants or gets."""
    words = ring.words
    lives, whos = (words[start : start + MAX_PRODUCERS].tolist() for start in (LIFE, WHO))
    if ticket.who in whos:
        return whos.index(ticket.who)
    # One that was started by hand may have come before the launcher's own.
    is_taken = ticket.number >= 0 and lives[ticket.index] != NEVER and words[MISSED + ticket.index] > _LAUNCHED
    if ticket.index >= 0 and not is_taken:
        return ticket.index
    first = ticket.count if is_taken else words[COUNT] if words[FIRST] else 0  # those of the launcher may come yet
    if NEVER not in lives[first:]:
        raise InvalidArgument(f"feed {ring.name!r} has had {MAX_PRODUCERS} producers, and no more can come.")
    return lives.index(NEVER, first)


def _refuse_late(ring: Ring, ticket: Ticket, index: int) -> None:
    """Raise an error if producer `index` comes to a feed that is over, is another one, or wants something else."""
    words = ring.words
    state, is_known, mark = words[LIFE + index], words[WHO + index] == ticket.who, words[MARK]
    if state == LIVE and not is_known:
        raise Conflict(
            f"producer {index} of feed {ring.name!r} has come already. One script pushes to a feed: start copies of it "
            "with --producers, or give each script a feed of its own, Feed('valid')."
        )
    if state == FAILED or (state == ENDED and not is_known) or (state == NEVER and _is_over(ring)):
        raise InvalidArgument(
            f"feed {ring.name!r} is over: its {words[COUNT]} producers have ended. A feed is opened once by each "
            "producer; if more are to come, set MANIPLE_PRODUCERS for all of them."
        )
    if mark not in {0, ticket.high_water}:
        raise Conflict(
            f"high_water={ticket.high_water} is asked for, and another producer of feed {ring.name!r} has asked for "
            f"{mark}. Give the same to all."
        )


def _is_over(ring: Ring) -> bool:
    count = ring.words[COUNT]
    return count > 0 and all(state >= ENDED for state in ring.words[LIFE : LIFE + count].tolist())


def _others(ring: Ring) -> dict[str, memoryview]:
    """The tables of the other feeds to which somebody has pushed, as they are now."""
    tables = {path.name: peek(path) for path in sorted(ring.segment.glob("feed-*")) if path != ring.folder}
    return {name.removeprefix("feed-"): words for name, words in tables.items() if words is not None}


def _names(ring: Ring) -> str:
    return ", ".join(_others(ring))


def _stand(ring: Ring, marks: bytes) -> dict[str, int] | None:
    """How many batches the full feeds have had, if all living producers of the launcher wait for room in them."""
    full = {name: words for name, words in _others(ring).items() if EMPTY not in words[STATE : STATE + words[MARK]]}
    held_up = {number for words in full.values() for number in _launched(words)}
    living = {number for number, mark in enumerate(marks) if not mark}
    return {name: words[LAST] for name, words in full.items()} if living <= held_up else None


def _launched(words: memoryview) -> list[int]:
    """The numbers of the launcher's producers that a table tells to be alive."""
    found = [words[MISSED + index] for index in range(words[COUNT]) if words[LIFE + index] == LIVE]
    return [_LAUNCHED - missed for missed in found if missed <= _LAUNCHED]
