"""Requests to the controller: answered one at a time, and recorded before the answer is sent.

The controller's state and its last answer to each worker are stored in the segment's file `controller`. If the server
is killed before that, the request was never handled and the worker repeats it; if after, the recorded answer is sent
again, and the controller does not see the request twice.
"""

import threading
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from maniple.clock import clock
from maniple.controller import Controller, ControllerState, DefaultPolicy, HostActions, WorkerProcess
from maniple.errors import BadFrame, HandlerFailed, InvalidArgument, ManipleError, WaitedTooLong, raise_remote
from maniple.live_settings import Changes
from maniple.memory.segment import MAX_WORKERS, Segment
from maniple.memory.shm import shared_memory_full
from maniple.record import Events
from maniple.record.folder import write_whole
from maniple.record.rows import MAX_DEPTH, is_deep
from maniple.sampler.remote_leases import LeaseTables
from maniple.settings.options import Limits
from maniple.wire.frames import NO_TIMEOUT_S, Stream
from maniple.wire.messages import ControllerReply, ControllerRequest, Heartbeat, refusal_of, to_json

_FILE, _STOP_REQUEST = "controller", "stop-request"
_MAX_INFO_BYTES = 8 << 20  # of one request
_MAX_STEPS = 1 << 48  # so that sums over all workers fit into 64 bits
_LEASE_PREFIX = "maniple-"  # requests for leases, which the controller does not see
_MAX_WORKERS = 2 * MAX_WORKERS  # a worker makes requests under one name, and those for leases under another
_RECORD_INTERVAL_S = 1.0  # for the workers' counts: each heartbeat repeats them, so losing one is harmless
_CHANGE_TIMEOUT_S = 30.0  # how long `maniple change` waits for a controller that is answering


def request_stop(segment: Path, reason: str) -> None:
    """Let the controller stop all workers. The launcher, which is another process than the controller's, calls it."""
    write_whole(segment / _STOP_REQUEST, reason.encode())


def withdraw_stop(segment: Path) -> None:
    """Forget the request of `request_stop`: the run is resumed."""
    (segment / _STOP_REQUEST).unlink(missing_ok=True)


class ControllerRecord(msgspec.Struct):
    """What survives a killed server. The names of the keys are those of older snapshots."""

    state: dict[str, Any] = {}  # Controller.state
    policy_state: ControllerState = msgspec.field(default_factory=ControllerState, name="known")
    # By worker: the number of its last request, the kind of error, the answer.
    answers: dict[str, tuple[int, str, msgspec.Raw]] = msgspec.field(default_factory=dict, name="answered")
    changes: Changes = msgspec.field(default_factory=Changes)

    @classmethod
    def read(cls, segment: Path) -> "ControllerRecord":
        """Read it from the segment."""
        path = segment / _FILE
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def write(self, segment: Path) -> None:
        """Replace it in the segment, atomically."""
        write_whole(segment / _FILE, msgspec.json.encode(self, enc_hook=to_json))


class ControllerRequests:
    """The requests of all workers of one host. `actions` does what the controller asks of the host.

    Attributes:
        stop_reason: why all workers should stop; "" if they should not.
        next_check_s: when to check the limits again.
    """

    def __init__(
        self, controller: Controller, segment: Segment, events: Events, limits: Limits, actions: HostActions
    ) -> None:
        self._controller, self._segment, self._events, self._actions = controller, segment, events, actions
        self._lock = threading.Lock()  # held while the controller answers
        self._limits_lock = threading.Lock()
        self._lease_tables = LeaseTables(segment)
        self._record = record = ControllerRecord.read(segment.path)
        self._recorded = 0.0
        self.stop_reason, self.next_check_s = record.policy_state.reason, 1.0
        if record.state:
            controller.state = record.state
        controller.policy = self._policy = DefaultPolicy(limits, record.policy_state)
        controller.policy.host = actions

    def serve(self, stream: Stream, worker: str) -> None:
        """Answer a worker's requests to the controller until it closes the connection."""
        stream.set_timeout(NO_TIMEOUT_S)
        while True:
            request, size = stream.receive()
            if not isinstance(request, ControllerRequest):
                raise BadFrame(f"{type(request).__name__} came where a worker's request was expected.")
            check_counts(request)
            info = stream.receive_bytes(size, at_most=_MAX_INFO_BYTES)
            try:
                answer = self.answer(worker, request, _decode_info(info))
            except ManipleError as error:
                stream.send(refusal_of(error))
            else:
                stream.send(ControllerReply(request.sequence), answer)

    @property
    def changes(self) -> str:
        """The settings changed by `maniple change`, as sent with each heartbeat."""
        return self._record.changes.text

    def answer(self, worker: str, request: ControllerRequest, info: Any) -> bytes:
        """Answer a request, as JSON."""
        who = (request.rank, request.incarnation)
        if not (0 <= who[0] < MAX_WORKERS and 0 <= who[1] < 1 << 32):
            raise BadFrame(f"worker {who[0]} cannot ask: ranks are 0 to {MAX_WORKERS - 1}.")
        if request.request.startswith(_LEASE_PREFIX):
            return msgspec.json.encode(self._lease_tables.grant(request.request, info, who))
        answers = self._record.answers
        with self._lock:
            sequence, error, answer = answers.get(worker, (0, "", msgspec.Raw()))
            if request.sequence < sequence:
                raise WaitedTooLong(
                    f"{request.request!r} was given up by its worker, which has made a newer request. Ask it again."
                )
            if sequence == 0 and len(answers) >= _MAX_WORKERS:
                raise InvalidArgument(
                    f"{len(answers):,} workers have asked the controller, and the last answer to each is kept (limit "
                    f"{_MAX_WORKERS:,}). Let workers end in order, by worker.leave(): that frees theirs."
                )
            if request.sequence > sequence:
                now = clock.time()
                self._policy.count(who, request.steps, request.samples)
                self._check_limits(now)
                self._controller.asking, self._controller.is_finished = who, request.is_finished
                bests = self._policy.state.bests
                error, answer = self._handle(request, info)
                answers[worker] = (request.sequence, error, answer)
                self._check_limits(now)
                self._write_record(now)
                if self._policy.state.bests > bests:  # recorded: the previous best is not needed any more
                    self._actions.prune_bests(self._policy.state.bests)
        if error:
            raise_remote(error, msgspec.json.decode(answer))
        return bytes(answer)

    def count(self, who: WorkerProcess, steps: int, samples: int) -> str:
        """Note how far a worker is; returns why it should stop. Never waits for a request that is being answered."""
        now = clock.time()
        self._policy.count(who, steps, samples)
        self._check_limits(now)
        if now - self._recorded > _RECORD_INTERVAL_S:
            self._write_record_unless_answering(now)
        return self.stop_reason

    def forget(self, worker: str) -> None:
        """Drop the answer to a worker that has left. Never waits for a request that is being answered."""
        self._record.answers.pop(worker, None)
        self._write_record_unless_answering(clock.time())

    def change(self, settings: Mapping[str, Any]) -> Changes:
        """Record settings for all workers, which learn of them at their next heartbeat."""
        if not self._lock.acquire(timeout=_CHANGE_TIMEOUT_S):
            raise WaitedTooLong(
                f"the controller has been answering a request for {_CHANGE_TIMEOUT_S:g} s, so nothing is changed. "
                "Try again."
            )
        try:
            changes = self._record.changes.add(settings)
            msgspec.structs.replace(self._record, changes=changes).write(self._segment.path)
            self._record.changes = changes
        except OSError as error:
            raise shared_memory_full(self._segment.path, error) from error
        finally:
            self._lock.release()
        return changes

    def _handle(self, request: ControllerRequest, info: Any) -> tuple[str, msgspec.Raw]:
        """The controller's answer, or the kind and text of its error, which is also recorded once."""
        try:
            answer = msgspec.json.encode(self._call_controller(request, info), enc_hook=to_json)
            return "", msgspec.Raw(answer)
        except ManipleError as error:
            return type(error).__name__, msgspec.Raw(msgspec.json.encode(str(error)))
        except (Exception, SystemExit) as error:
            self._events.write("handler failed", worker=request.rank, request=request.request, error=repr(error))
            text = (
                f"the controller failed over {request.request!r} of worker {request.rank}. The run continues. On its "
                f"side:\n{traceback.format_exc()}"
            )
            return HandlerFailed.__name__, msgspec.Raw(msgspec.json.encode(text))

    def _call_controller(self, request: ControllerRequest, info: Any) -> Any:
        """Call the handler. A `state` that is not JSON is reset to the last recorded one."""
        try:
            return self._controller.handle_control(request.request, request.rank, info)
        finally:
            try:
                msgspec.json.decode(msgspec.json.encode(self._controller.state, enc_hook=to_json), type=dict[str, Any])
            except Exception:
                self._controller.state = ControllerRecord.read(self._segment.path).state
                raise

    def _check_limits(self, now: float) -> None:
        with self._limits_lock:
            with suppress(OSError):  # usually there is none
                self._policy.stop((self._segment.path / _STOP_REQUEST).read_text())
            reason = self._policy.check_limits(now)
            if reason and not self.stop_reason:
                self._events.write("stop", reason=reason)
            self.stop_reason, self.next_check_s = reason, self._policy.next_check_s(now)

    def _write_record_unless_answering(self, now: float) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._write_record(now)
            finally:
                self._lock.release()

    def _write_record(self, now: float) -> None:
        self._record.state = self._controller.state
        self._recorded = now
        with recording_failure(self._events):
            self._record.write(self._segment.path)


@contextmanager
def recording_failure(events: Events) -> Generator[None]:
    """Record what cannot be written: neither a full disk nor a worker stopped while it holds a lock may end the run."""
    try:
        yield
    except (OSError, ManipleError, TypeError, ValueError) as error:
        events.write("unsaved", error=str(error))


def check_counts(message: Heartbeat | ControllerRequest) -> None:
    """Raise BadFrame if a worker cannot have made that number of steps."""
    if not (0 <= message.steps < _MAX_STEPS and 0 <= message.samples < _MAX_STEPS):
        raise BadFrame(
            f"{message.steps} steps on {message.samples} samples cannot have been made (limit {_MAX_STEPS:,})."
        )


def _decode_info(info: bytearray) -> Any:
    if is_deep(bytes(info)):
        raise BadFrame(f"a request came with JSON that is nested more than {MAX_DEPTH} levels deep.")
    try:
        return msgspec.json.decode(info)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(f"a request came with what is no JSON: {error}.") from None
