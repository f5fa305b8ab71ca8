"""The desk: where a worker's question reaches the controller, and the answer is written down before it is given.

What the controller knows, and its last answer to each worker, lie in the segment's file `controller`. If the server
is killed before that was written, the question was not heard and is asked again; if after it, the same answer is
given again, and the controller does not hear the question twice.
"""

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from maniple.center.segment import MAX_WORKERS, Segment, refusal
from maniple.changes import Changes
from maniple.decisions import Decisions, Holder, Known
from maniple.errors import BadFrame, HandlerFailed, InvalidArgument, ManipleError, WaitedTooLong, raise_remote
from maniple.host.best import Best
from maniple.place import Limits
from maniple.record import Events
from maniple.record.folder import write_whole
from maniple.sampler.lease import Holder as Tenant
from maniple.sampler.remote import Tables
from maniple.wire.messages import Request
from maniple.wire.plain import plain

_FILE = "controller"
_RESERVED = "maniple-"
_MOST_ASKERS = 2 * MAX_WORKERS  # a worker asks under one name, and its leases under another
_KEEP_EVERY_S = 1.0  # the workers' counts, which they tell again
_PATIENCE_S = 30.0  # for a controller that is answering
_BEAT_COST_S = 0.001  # so that a crowd near its limit does not keep the host from its work

T = TypeVar("T")


class Controls(Protocol):
    """What the desk asks of a controller."""

    state: dict[str, Any]
    decisions: Decisions
    asking: Holder
    is_finished: bool

    def handle_control(self, request: str, worker: int, info: Mapping[str, Any]) -> Any: ...


class Minutes(msgspec.Struct):
    """What is written down."""

    state: dict[str, Any] = {}
    known: Known = msgspec.field(default_factory=Known)
    answered: dict[
        str, tuple[int, str, msgspec.Raw]
    ] = {}  # by worker: its last question, the kind of error, the answer
    changes: Changes = msgspec.field(default_factory=Changes)

    @classmethod
    def read(cls, segment: Path) -> "Minutes":
        """What stands in the segment."""
        path = segment / _FILE
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def write(self, segment: Path) -> None:
        """Write it down, whole or not at all."""
        write_whole(segment / _FILE, msgspec.json.encode(self, enc_hook=plain))


class Desk:
    """The questions of all workers of one host, one at a time."""

    def __init__(self, controller: Controls, segment: Segment, events: Events, limits: Limits, best: Best) -> None:
        self._controller, self._segment, self._events, self._best = controller, segment, events, best
        self._lock = threading.Lock()  # held while the controller answers
        self._looking = threading.Lock()
        self._tables = Tables(segment)
        self._minutes = Minutes.read(segment.path)
        self._outlook = (1.0, self._minutes.known.reason)  # when to hear of a worker again, and why it should stop
        self._kept = 0.0
        self.changes = self._minutes.changes.text  # what a person has changed, for those who beat
        if self._minutes.state:
            controller.state = self._minutes.state
        controller.decisions = Decisions(limits, self._minutes.known)
        controller.decisions.is_alive = lambda who: segment.is_live(*who)
        controller.decisions.powers = self

    @property
    def live(self) -> int:
        """The workers alive now."""
        return self._segment.live

    def keep_candidate(self) -> None:
        """Keep the center as it is now, for the case that it turns out to be the best."""
        self._trying(self._best.keep_candidate)

    def discard_candidate(self) -> None:
        """It was not the best."""
        self._best.discard_candidate()

    def keep_best(self, number: int) -> None:
        """What was validated last is the best so far, for the `number`-th time."""
        loss = self._controller.decisions.known.best
        if (path := self._trying(lambda: self._best.keep(number, loss))) is not None:
            self._events.write("best", loss=loss, name=path.name)

    def keep_epoch(self, number: int) -> str | None:
        """Keep the center as it is now, after so many epochs; gives the snapshot's name."""
        path = self._trying(lambda: self._best.keep_epoch(number))
        if path is not None:
            self._events.write("snapshot", name=path.name)
        return None if path is None else path.name

    def beat(self, who: Holder, steps: int, samples: int) -> tuple[float, str]:
        """A worker tells how far it is; gives when to hear of it again, and why it should stop.

        A beat never waits for a question that is being answered.
        """
        now = time.time()
        self._controller.decisions.count(who, steps, samples)
        self._look(now)
        if now - self._kept > _KEEP_EVERY_S and self._lock.acquire(blocking=False):
            try:
                self._keep(now)
            finally:
                self._lock.release()
        return self._outlook

    def change(self, settings: Mapping[str, Any]) -> Changes:
        """Settings that hold for all workers from now on: written down before they hear of them."""
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise WaitedTooLong(
                f"the controller has been answering a question for {_PATIENCE_S:g} s, so nothing is changed. Ask again."
            )
        before = self._minutes.changes
        try:
            self._minutes.changes = changes = before.add(settings)
            self._minutes.write(self._segment.path)
            self.changes = changes.text
        except OSError as error:
            self._minutes.changes = before
            raise refusal(self._segment.path, error) from error
        finally:
            self._lock.release()
        return changes

    def answer(self, worker: str, question: Request, info: Any) -> bytes:
        """The answer to a question, as JSON."""
        who = (question.rank, question.incarnation)
        if not (0 <= who[0] < MAX_WORKERS and 0 <= who[1] < 1 << 32):
            raise BadFrame(f"worker {who[0]} cannot ask: ranks are 0 to {MAX_WORKERS - 1}.")
        if question.request.startswith(_RESERVED):
            return msgspec.json.encode(self._tables.grant(question.request, info, Tenant(*who)))
        with self._lock:
            number, kind, answer = self._minutes.answered.get(worker, (0, "", msgspec.Raw()))
            if question.sequence < number:
                raise WaitedTooLong(
                    f"{question.request!r} was given up by its worker, which has asked on. Ask it again."
                )
            if number == 0 and len(self._minutes.answered) >= _MOST_ASKERS:
                raise InvalidArgument(
                    f"{len(self._minutes.answered):,} workers have asked the controller, and the last answer to each "
                    f"is kept (limit {_MOST_ASKERS:,}). Let workers end in order, by worker.leave(): that frees theirs."
                )
            if question.sequence > number:
                controller, now = self._controller, time.time()
                controller.decisions.count(who, question.steps, question.samples)
                self._look(now)
                controller.asking, controller.is_finished = who, question.is_finished
                bests = controller.decisions.known.bests
                kind, answer = self._handled(question, info)
                self._minutes.answered[worker] = (question.sequence, kind, answer)
                self._look(now)
                self._keep(now)
                if controller.decisions.known.bests > bests:  # written down: the one before is not needed any more
                    self._best.prune(controller.decisions.known.bests)
        if kind:
            raise_remote(kind, msgspec.json.decode(answer))
        return bytes(answer)

    def forget(self, worker: str) -> None:
        """A worker has left, and will not ask again. Like a beat, its goodbye does not wait for the controller."""
        self._minutes.answered.pop(worker, None)
        if self._lock.acquire(blocking=False):
            try:
                self._keep(time.time())
            finally:
                self._lock.release()

    def _handled(self, question: Request, info: Any) -> tuple[str, msgspec.Raw]:
        """The controller's answer, or the kind and the text of its error: that too is heard and written once."""
        try:
            answer = msgspec.json.encode(self._answered(question, info), enc_hook=plain)
            return "", msgspec.Raw(answer)
        except ManipleError as error:
            return type(error).__name__, msgspec.Raw(msgspec.json.encode(str(error)))
        except (Exception, SystemExit) as error:
            self._events.write("handler failed", worker=question.rank, request=question.request, error=repr(error))
            text = (
                f"the controller failed over {question.request!r} of worker {question.rank}. The run goes on. On its "
                f"side:\n{traceback.format_exc()}"
            )
            return HandlerFailed.__name__, msgspec.Raw(msgspec.json.encode(text))

    def _answered(self, question: Request, info: Any) -> Any:
        """The controller's answer. A state that cannot be written down gives way to the last that was."""
        try:
            return self._controller.handle_control(question.request, question.rank, info)
        finally:
            try:
                msgspec.json.decode(msgspec.json.encode(self._controller.state, enc_hook=plain), type=dict[str, Any])
            except Exception:
                self._controller.state = Minutes.read(self._segment.path).state
                raise

    def _look(self, now: float) -> None:
        """See whether a limit is reached."""
        decisions = self._controller.decisions
        with self._looking:
            reason = decisions.mind_limits(now)
            if reason and not self._outlook[1]:
                self._events.write("stop", reason=reason)
            self._outlook = max(decisions.within_s(now), _BEAT_COST_S * self.live), reason

    def _trying(self, act: Callable[[], T]) -> T | None:
        """A full disk, or a worker that is stopped while it holds a parameter, must not end the run."""
        try:
            return act()
        except (OSError, ManipleError, TypeError, ValueError) as error:
            self._events.write("unsaved", error=str(error))
            return None

    def _keep(self, now: float) -> None:
        self._minutes.state = self._controller.state
        self._kept = now
        self._trying(lambda: self._minutes.write(self._segment.path))
