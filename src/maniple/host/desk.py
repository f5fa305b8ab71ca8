"""The desk: where a worker's question reaches the controller, and the answer is written down before it is given.

What the controller knows, and its last answer to each worker, lie in the segment's file `controller`. If the server
is killed before that was written, the question was not heard and is asked again; if after it, the same answer is
given again, and the controller does not hear the question twice.
"""

import os
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from maniple.center.segment import Segment
from maniple.decisions import Decisions, Holder, Known
from maniple.errors import HandlerFailed, ManipleError
from maniple.host.best import Best
from maniple.place import Limits
from maniple.record import Events
from maniple.sampler.remote import Tables
from maniple.sampler.table import Holder as Tenant
from maniple.wire.messages import Request

_FILE = "controller"
_RESERVED = "maniple-"
_KEEP_EVERY_S = 1.0  # the workers' counts, which they tell again


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
    answered: dict[str, tuple[int, msgspec.Raw]] = {}  # by worker: its last question and the answer

    @classmethod
    def read(cls, segment: Path) -> "Minutes":
        """What stands in the segment."""
        path = segment / _FILE
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def write(self, segment: Path) -> None:
        """Write it down, whole or not at all."""
        beside = segment / f".{_FILE}.{os.getpid()}"
        beside.write_bytes(msgspec.json.encode(self))
        beside.replace(segment / _FILE)


class Desk:
    """The questions of all workers of one host, one at a time."""

    def __init__(self, controller: Controls, segment: Segment, events: Events, limits: Limits, best: Best) -> None:
        self._controller, self._segment, self._events, self._best = controller, segment, events, best
        self._lock = threading.RLock()
        self._tables = Tables(segment)
        self._minutes = Minutes.read(segment.path)
        self._kept = 0.0
        self._told = ""
        controller.state |= self._minutes.state
        controller.decisions = Decisions(limits, self._minutes.known)
        controller.decisions.is_alive = lambda who: segment.is_live(*who)
        controller.decisions.powers = self

    @property
    def live(self) -> int:
        """The workers alive now."""
        return self._segment.live

    def keep_candidate(self) -> None:
        """Keep the center as it is now, for the case that it turns out to be the best."""
        self._best.keep_candidate()

    def discard_candidate(self) -> None:
        """It was not the best."""
        self._best.discard_candidate()

    def keep_best(self) -> None:
        """What was validated last is the best so far."""
        path = self._best.keep()
        if path is not None:
            self._events.write("best", loss=self._controller.decisions.known.best, name=path.name)

    def beat(self, who: Holder, steps: int, samples: int) -> tuple[float, str]:
        """A worker tells how far it is; gives when to hear of it again, and why it should stop."""
        decisions, now = self._controller.decisions, time.time()
        with self._lock:
            decisions.count(who, steps, samples)
            reason = self._mind_limits(now)
            if now - self._kept > _KEEP_EVERY_S:
                self._keep(now)
            return decisions.within_s(now), reason

    def answer(self, worker: str, question: Request, info: Any) -> bytes:
        """The answer to a question, as JSON."""
        who = (question.rank, question.incarnation)
        if question.request.startswith(_RESERVED):
            return msgspec.json.encode(self._tables.grant(question.request, info, Tenant(*who)))
        with self._lock:
            number, before = self._minutes.answered.get(worker, (0, msgspec.Raw(b"")))
            if number == question.sequence:
                return bytes(before)
            controller, now = self._controller, time.time()
            controller.decisions.count(who, question.steps, question.samples)
            self._mind_limits(now)
            controller.asking, controller.is_finished = who, question.is_finished
            answer = self._handled(question, info)
            self._mind_limits(now)
            self._minutes.answered[worker] = (question.sequence, msgspec.Raw(answer))
            self._keep(now)
            return answer

    def forget(self, worker: str) -> None:
        """A worker has left, and will not ask again."""
        with self._lock:
            self._minutes.answered.pop(worker, None)
            self._keep(time.time())

    def _handled(self, question: Request, info: Any) -> bytes:
        try:
            answer = self._controller.handle_control(question.request, question.rank, info)
            return msgspec.json.encode(answer)
        except ManipleError:
            raise
        except Exception as error:
            text = traceback.format_exc()
            self._events.write("handler failed", worker=question.rank, request=question.request, error=repr(error))
            raise HandlerFailed(
                f"the controller failed over {question.request!r} of worker {question.rank}. The run goes on. On its "
                f"side:\n{text}"
            ) from error

    def _mind_limits(self, now: float) -> str:
        reason = self._controller.decisions.mind_limits(now)
        if reason and not self._told:
            self._told = reason
            self._events.write("stop", reason=reason)
        return reason

    def _keep(self, now: float) -> None:
        self._minutes.state = self._controller.state
        self._kept = now
        self._minutes.write(self._segment.path)
