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

from maniple.errors import Conflict, InvalidArgument, ProducerFailed, WaitedTooLong
from maniple.feed.ring import (
    COUNT,
    FIRST,
    LIFE,
    MARK,
    MAX_PRODUCERS,
    MAX_SLOTS,
    MISSED,
    PRODUCER_LOCK,
    PUSHED,
    WHO,
    Ring,
)

NEVER, LIVE, ENDED, FAILED = range(4)
AWAY_S = 10.0  # for so long a producer elsewhere may be cut off
COME_S = 60.0  # for so long the first producer is waited for, if nobody has started one
_NEAR, _FAR, _LAUNCHED = 0, -1, -2  # in the word MISSED; of one who is far, also when it was missed first


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
            words[FIRST] = ticket.number - index + 1
        words[WHO + index] = ticket.who
        words[MISSED + index] = _LAUNCHED if ticket.number >= 0 else _FAR if ticket.is_far else _NEAR
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
        self._since = time.monotonic()  # nobody who could push was there since then

    def has_ended(self) -> bool:
        """All producers have ended and nothing is left. ProducerFailed if one has not ended well."""
        ring = self._ring
        with ring.alone:
            fates = [self._fate(index) for index in range(ring.words[COUNT])]
            missing = [index for index, fate in enumerate(fates) if fate == NEVER]
            if LIVE in fates or (not ring.is_empty()):
                self._since = time.monotonic()
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
        if words[MISSED + index] == _LAUNCHED:
            return self._told(index)
        if words[MISSED + index] == _NEAR:
            return FAILED
        if words[MISSED + index] == _FAR:
            words[MISSED + index] = time.monotonic_ns()
        return FAILED if time.monotonic_ns() - words[MISSED + index] > AWAY_S * 1e9 else LIVE

    def _told(self, index: int) -> int:
        """What the launcher has noted of a producer: LIVE until its process is collected."""
        marks, number = read_marks(self._ring.segment), self._number(index)
        return (marks[number] if number < len(marks) else NEVER) or LIVE

    def _number(self, index: int) -> int:
        return self._ring.words[FIRST] - 1 + index

    def _failure(self, index: int) -> str:
        ring = self._ring
        which, path = f"producer {index} of feed {ring.name!r}", ring.folder / f"failed-{index}"
        if path.exists():
            text = path.read_text(errors="replace")
            return f"{which} has failed, so that batches are missing. It says:\n{text}"
        where = "It was killed, or its connection has been cut for too long."
        if ring.words[MISSED + index] == _LAUNCHED or ring.words[LIFE + index] == NEVER:
            where = f"What it printed is in logs/producer-{self._number(index)}.log of the run folder."
        return f"{which} ended before its data did, so that batches are missing. {where}"

    def _await(self, missing: list[int]) -> None:
        """Nobody is there who could push: some may still come, but not for ever."""
        ring, marks = self._ring, read_marks(self._ring.segment)
        if marks and not ring.words[COUNT]:
            if 0 in marks:
                return  # a script of the launcher's is alive, and may open the feed yet
            raise ProducerFailed(
                f"feed {ring.name!r} was never opened, and all {len(marks)} producers have ended. Is it the name that "
                "they push to? Theirs: " + (_others(ring) or "none") + "."
            )
        if time.monotonic() - self._since > COME_S:
            who = f"producers {missing} of" if missing else "a producer for"
            raise WaitedTooLong(
                f"waited {COME_S:g} s for {who} feed {ring.name!r}, and none came. Start one with `maniple run --feed "
                "produce.py`, or anywhere with MANIPLE_ADDRESS and MANIPLE_TOKEN_FILE set."
            )


def begin(segment: Path, count: int) -> None:
    """Begin the launcher's notes on `count` producers; feeds that a killed host has left are gone with theirs."""
    for path in segment.glob("feed-*"):
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
    lives, whos = (ring.words[start : start + MAX_PRODUCERS].tolist() for start in (LIFE, WHO))
    if ticket.who in whos:
        return whos.index(ticket.who)
    if ticket.index >= 0:
        return ticket.index
    first = ring.words[COUNT] if ring.words[FIRST] else 0  # the launcher's own may not have come yet
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


def _others(ring: Ring) -> str:
    return ", ".join(
        sorted(path.name.removeprefix("feed-") for path in ring.segment.glob("feed-*") if path != ring.folder)
    )
