"""The host's half of the control plane: who is there, how far they are, what they ask."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from maniple.center.segment import Segment
from maniple.center.turns import Turns
from maniple.errors import BadFrame, ManipleError
from maniple.host.desk import Desk
from maniple.host.membership import Membership
from maniple.place import Place
from maniple.record import Folder
from maniple.record.events import append_rows
from maniple.record.rows import MAX_DEPTH, BadRow, decode_row, is_deep
from maniple.story.rows import bad_progress
from maniple.wire.messages import Beat, Beaten, Join, Joined, Refusal, Reply, Request, refusal_of
from maniple.wire.stream import NEVER_S, Stalled, Stream

SILENCE_S = 10.0  # a worker that has not beaten for so long counts as dead until it does
_MAX_ROWS_BYTES = 8 << 20
_MAX_INFO_BYTES = 8 << 20
_MOST_STEPS = 1 << 48
_REJECTED_EVERY_S = 10.0  # between two rows that tell of rejected ones, so that those do not fill the disk


class Sieve:
    """Checks the rows that come from one worker elsewhere before they are written.

    Rows that no reader could use are left out. A row `rejected` tells how many there were, and what was wrong with the
    first of them; the worker itself goes on.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count, self._reason = 0, ""  # rejected, and not told yet
        self._next = 0.0

    def passed(self, rows: bytes) -> tuple[bytes, list[str]]:
        """Those of `rows` that may be written, each with the end of its line, and what is wrong with the others."""
        kept: list[bytes] = []
        wrong: list[str] = []
        for line in rows.split(b"\n"):
            try:
                if line:
                    decode_row(line)
                    if reason := bad_progress(line):
                        raise BadRow(reason)
                    kept.append(line + b"\n")
            except BadRow as error:
                wrong.append(str(error)[:200])
        return b"".join(kept), wrong

    def note(self, wrong: list[str]) -> None:
        """Count rejected rows; once for each heartbeat, which comes again if its rows could not be written."""
        self._count += len(wrong)
        self._reason = self._reason or next(iter(wrong), "")

    def told(self, *, is_last: bool = False) -> bytes:
        """The row that tells of what was rejected, if there is one and it is time."""
        now = time.time()
        if not self._count or (now < self._next and not is_last):
            return b""
        row = {"event": "rejected", "timestamp": now, "datestamp": time.strftime("%Y-%m-%d %H:%M")}
        row |= {"worker": self._rank, "rows": self._count, "reason": self._reason}
        self._count, self._reason, self._next = 0, "", now + _REJECTED_EVERY_S
        return msgspec.json.encode(row) + b"\n"


class Control:
    """The control connections of one host."""

    def __init__(
        self, place: Place, segment: Segment, folder: Folder, *, members: Membership, desk: Desk, turns: Turns
    ) -> None:
        self._place, self._segment, self._folder = place, segment, folder
        self._members, self._desk, self._turns = members, desk, turns
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self.count = 0  # connections of workers that have joined

    def attend(self, stream: Stream, worker: str, is_over: Callable[[], bool]) -> None:
        """Take a worker in, and hear its beats until it leaves or is lost."""
        stream.set_timeout(SILENCE_S)
        join = stream.receive_message()
        if not isinstance(join, Join):
            raise BadFrame("a worker that does not join was not expected.")
        rank, incarnation = self._members.join(worker, stream, join)
        with self._lock:
            self.count += 1
        try:
            stream.send(self._joined(rank, incarnation))
            self._hear(stream, worker, (rank, incarnation), is_over)
        except Exception as error:  # whatever ends the connection, the worker is gone
            self._members.lose(worker, stream, str(error), is_silent=isinstance(error, Stalled))
            raise
        finally:
            with self._lock:
                self.count -= 1

    def answer(self, stream: Stream, worker: str) -> None:
        """Answer a worker's questions until it asks no more."""
        stream.set_timeout(NEVER_S)
        while True:
            question, size = stream.receive()
            if not isinstance(question, Request):
                raise BadFrame("a worker's question was expected.")
            _check_counts(question)
            info = stream.receive_bytes(size, at_most=_MAX_INFO_BYTES)
            try:
                answer = self._desk.answer(worker, question, _decoded(info))
            except ManipleError as error:
                stream.send(refusal_of(error))
            else:
                stream.send(Reply(question.sequence), answer)

    def _joined(self, rank: int, incarnation: int) -> Joined:
        place = self._place
        return Joined(
            rank,
            incarnation,
            max(place.world, rank + 1),
            self._members.live,
            place.seed,
            place.rule or "",
            place.pace or "",
            place.wire or "",
            place.host_deadline_s,
            place.limits.max_epochs,
        )

    def _hear(self, stream: Stream, worker: str, who: tuple[int, int], is_over: Callable[[], bool]) -> None:
        sieve = Sieve(who[0])
        try:
            self._hear_all(stream, worker, who, sieve, is_over)
        finally:
            self._tell_rejected(who[0], sieve, is_last=True)

    def _tell_rejected(self, rank: int, sieve: Sieve, *, is_last: bool = False) -> None:
        if row := sieve.told(is_last=is_last):
            with suppress(OSError):
                append_rows(self._folder.events(rank), row)

    def _hear_all(
        self, stream: Stream, worker: str, who: tuple[int, int], sieve: Sieve, is_over: Callable[[], bool]
    ) -> None:
        while True:
            beat, size = stream.receive()
            if not isinstance(beat, Beat):
                raise BadFrame("a worker's beat was expected.")
            _check_counts(beat)
            new = stream.receive_bytes(size, at_most=_MAX_ROWS_BYTES)
            is_full = bool(new) and not self._write(worker, who[0], beat.number, bytes(new), sieve)
            within_s, reason = self._desk.beat(who, beat.steps, beat.samples)
            if beat.is_last:
                self._tell_rejected(who[0], sieve, is_last=True)
                self._members.leave(worker, is_early=beat.is_early)
                self._desk.forget(worker)
                self._turns.forget(worker)
            if is_over():
                stream.send(Refusal("RunOver", "the run has ended"))
                return
            stream.send(Beaten(self._members.live, within_s, reason, self._desk.changes, is_full))
            if beat.is_last:
                return

    def _write(self, worker: str, rank: int, number: int, rows: bytes, sieve: Sieve) -> bool:
        """Write a worker's rows, if they are not written yet; False if that is not possible now, for want of room say.

        Then the worker keeps them, and stays a member: rows are no reason to cut it off from the center.
        """
        with self._writing:
            if self._members.is_news(worker, number):
                kept, wrong = sieve.passed(rows)
                try:
                    append_rows(self._folder.events(rank), kept)
                except OSError:
                    return False
                self._members.heard(worker, number)
                sieve.note(wrong)
                self._tell_rejected(rank, sieve)
        return True


def _check_counts(said: Beat | Request) -> None:
    """Sums of all workers' counts are written down as 64-bit numbers."""
    if not (0 <= said.steps < _MOST_STEPS and 0 <= said.samples < _MOST_STEPS):
        raise BadFrame(f"{said.steps} steps on {said.samples} samples cannot have been made (limit {_MOST_STEPS:,}).")


def _decoded(info: bytearray) -> Any:
    """What goes with a question."""
    if is_deep(bytes(info)):
        raise BadFrame(f"a question came with JSON that is nested more than {MAX_DEPTH} levels deep.")
    try:
        return msgspec.json.decode(info)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(f"a question came with what is no JSON: {error}.") from None
