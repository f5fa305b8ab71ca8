"""The host's half of the control plane: who is there, how far they are, what they ask."""

import threading
from collections.abc import Callable

import msgspec

from maniple.center.segment import Segment
from maniple.center.turns import Turns
from maniple.errors import BadFrame, ManipleError
from maniple.host.desk import Desk
from maniple.host.membership import Membership
from maniple.place import Place
from maniple.record import Folder
from maniple.wire.messages import Beat, Beaten, Join, Joined, Refusal, Reply, Request, refusal_of
from maniple.wire.stream import NEVER_S, Stalled, Stream

SILENCE_S = 10.0  # a worker that has not beaten for so long counts as dead until it does
_MAX_ROWS_BYTES = 8 << 20
_MAX_INFO_BYTES = 8 << 20


class Control:
    """The control connections of one host."""

    def __init__(
        self, place: Place, segment: Segment, folder: Folder, *, members: Membership, desk: Desk, turns: Turns
    ) -> None:
        self._place, self._segment, self._folder = place, segment, folder
        self._members, self._desk, self._turns = members, desk, turns
        self._lock = threading.Lock()
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
        except (OSError, ManipleError) as error:
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
            info = stream.receive_bytes(size, at_most=_MAX_INFO_BYTES)
            try:
                answer = self._desk.answer(worker, question, msgspec.json.decode(info))
            except msgspec.DecodeError as error:
                raise BadFrame(f"a question came with what is no JSON: {error}.") from None
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
        while True:
            beat, size = stream.receive()
            if not isinstance(beat, Beat):
                raise BadFrame("a worker's beat was expected.")
            new = stream.receive_bytes(size, at_most=_MAX_ROWS_BYTES)
            if new and self._members.is_news(worker, beat.number):
                with self._folder.events(who[0]).open("ab", buffering=0) as rows:
                    rows.write(new)
            within_s, reason = self._desk.beat(who, beat.steps, beat.samples)
            if beat.is_last:
                self._members.leave(worker, is_early=beat.is_early)
                self._desk.forget(worker)
                self._turns.forget(worker)
            if is_over():
                stream.send(Refusal("RunOver", "the run has ended"))
                return
            stream.send(Beaten(self._members.live, within_s, reason, self._desk.changes))
            if beat.is_last:
                return
