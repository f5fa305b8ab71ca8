"""Requests to the controller, over a separate connection, so that a slow answer delays no heartbeat."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from maniple.clock import Deadline
from maniple.connection.link import Endpoint, Link, check_reply
from maniple.connection.retry import retry_until
from maniple.errors import BadFrame, HostAway, InvalidArgument, WaitedTooLong, raise_remote
from maniple.replica.context import HostUpdates
from maniple.wire.messages import ControllerReply, ControllerRequest, Message, Refusal, to_json
from maniple.worker.heartbeat_sender import Count

_MAX_ANSWER_BYTES = 8 << 20  # an answer is JSON; more is a mistake of the handler


class ControllerClient:
    """Sends the requests of one worker, one at a time. The first one connects."""

    def __init__(
        self,
        door: Endpoint,
        *,
        who: Callable[[], tuple[int, int]],
        count: Count,
        status: HostUpdates | None = None,
    ) -> None:
        self._link = Link(door, "ask")
        self._who, self._count, self._status = who, count, status
        self._lock = threading.Lock()
        self._sequence = 0

    def ask(self, request: str, info: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Return the controller's reply. A request whose reply was lost with the connection is repeated with the same
        number, and the controller handles it once."""
        deadline = Deadline(timeout_s, slice_s=timeout_s)
        payload = _encode(request, info)
        if not self._lock.acquire(timeout=timeout_s):
            raise _expired(request, timeout_s, "another thread's request is still in progress")
        try:
            self._sequence += 1
            reply, data = retry_until(
                self._link,
                lambda: self._request(request, payload, deadline),
                deadline.left_s(),
                blocked_s=timeout_s + 1.0,
                on_failure=lambda: self._check_over(request),
            )
        except HostAway as error:
            self._check_over(request)
            raise _expired(request, timeout_s, str(error)) from error
        finally:
            self._lock.release()
        if isinstance(reply, Refusal):
            raise_remote(reply.kind, reply.reason)
        return msgspec.json.decode(data)

    def close(self) -> None:
        """Close the connection."""
        self._link.drop("this worker has left")

    def _request(self, request: str, payload: bytes, deadline: Deadline) -> tuple[Message, bytes]:
        stream = self._link.stream()
        rank, incarnation = self._who()
        steps, samples, is_finished = self._count()
        stream.send(ControllerRequest(self._sequence, request, rank, incarnation, steps, samples, is_finished), payload)
        reply, size = stream.receive(deadline=deadline)
        if isinstance(reply, Refusal):  # the controller's reply, after which the connection can be used again
            return reply, b""
        if check_reply(reply, ControllerReply).sequence != self._sequence:
            raise BadFrame(f"the reply to {request!r} was expected, and that to another request came.")
        return reply, bytes(stream.receive_bytes(size, at_most=_MAX_ANSWER_BYTES))

    def _check_over(self, request: str) -> None:
        if self._status is not None and self._status.is_over:
            raise HostAway(
                f"no controller answers {request!r}: the run has ended. Look at worker.should_stop, and end."
            ) from None


def _expired(request: str, timeout_s: float, reason: str) -> WaitedTooLong:
    return WaitedTooLong(
        f"the controller has not answered {request!r} within {timeout_s:g} s: {reason}. If its handler takes "
        "longer, give ask() a larger timeout_s; else look into logs/server.log of the run."
    )


def _encode(request: str, info: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(info, enc_hook=to_json)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"ask({request!r}) cannot send what it was given: {error}. Give numbers, words, lists and dicts of them."
        ) from None


def check_request(request: Any) -> None:
    """Raise InvalidArgument unless `request` is the name of a request that a script may make."""
    if not isinstance(request, str):  # pyright: ignore[reportUnnecessaryIsInstance] - a dict, in older systems
        raise InvalidArgument(_request_error(request))
    if request.startswith("maniple-"):
        raise InvalidArgument(
            f"{request!r} cannot be asked: names that begin with 'maniple-' are reserved. Choose another name."
        )


def _request_error(request: Any) -> str:
    """The error for a request that is not a string, with the call that was probably meant."""
    how = 'ask("next")'
    if (
        request
        and isinstance(request, dict)
        and all(isinstance(key, str) and key.isidentifier() for key in cast(Any, request))
    ):
        first = next(iter(cast(dict[str, Any], request)))
        name = "next" if first == "done" else first  # the number of batches done is sent with the next request
        info = ", ".join(f"{key}={value!r}" for key, value in cast(dict[str, Any], request).items())
        how = f'ask("{name}", {info})'
    return (
        f"ask({request!r}) is no request: its name, a string, comes first, and its data are keyword arguments, not a "
        f"{type(request).__name__}. Write worker.{how}."
    )
