"""Questions to the controller, over a connection of their own, so that a slow answer delays no heartbeat."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from maniple.center.link import Door, Link, checked
from maniple.errors import BadFrame, HostAway, InvalidArgument, ManipleError, WaitedTooLong
from maniple.wire.messages import Reply, Request
from maniple.wire.plain import plain
from maniple.worker.seat import Count

_MAX_ANSWER_BYTES = 8 << 20


class Questions:
    """What one worker asks, one question at a time. The connection is made at the first."""

    def __init__(
        self,
        door: Door,
        *,
        who: Callable[[], tuple[int, int]],
        count: Count,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._link = Link(door, "ask")
        self._who, self._count, self._is_over = who, count, is_over
        self._lock = threading.Lock()
        self._sequence = 0

    def ask(self, request: str, info: Mapping[str, Any], *, timeout_s: float) -> Any:
        """The controller's answer. A question whose answer was lost with the connection is asked again by its number,
        and the controller does not hear it twice."""
        deadline = time.monotonic() + timeout_s
        payload = _encode(request, info)
        if not self._lock.acquire(timeout=timeout_s):
            self._mind_deadline(0.0, request, timeout_s, "another thread's question is still under way")
        try:
            self._sequence += 1
            return self._insist(request, payload, deadline, timeout_s)
        finally:
            self._lock.release()

    def _insist(self, request: str, payload: bytes, deadline: float, timeout_s: float) -> Any:
        while True:
            try:
                return self._say(request, payload, deadline)
            except HostAway as error:
                if self._is_over():
                    raise HostAway(
                        f"nobody answers {request!r}: the run has ended. Look at worker.should_stop, and end."
                    ) from None
                self._mind_deadline(deadline, request, timeout_s, str(error))
                time.sleep(0.02)
            except BadFrame as error:
                self._link.drop(str(error))
                raise
            except ManipleError:  # the answer
                raise
            except OSError as error:
                self._link.drop(str(error))
                self._mind_deadline(deadline, request, timeout_s, str(error))
                time.sleep(0.02)
            except BaseException:  # a late answer must not be taken for that of another question
                self._link.drop("interrupted")
                raise

    def close(self) -> None:
        """Ask no more."""
        self._link.drop("this worker has left")

    def _say(self, request: str, payload: bytes, deadline: float) -> Any:
        stream = self._link.stream()
        rank, incarnation = self._who()
        steps, samples, is_finished = self._count()
        stream.send(Request(self._sequence, request, rank, incarnation, steps, samples, is_finished), payload)
        answer, size = stream.receive(deadline=deadline)
        if not isinstance(checked(answer), Reply) or answer.sequence != self._sequence:  # type: ignore[union-attr] # pyright: ignore
            raise BadFrame(f"the answer to {request!r} was expected, and something else came.")
        return msgspec.json.decode(stream.receive_bytes(size, at_most=_MAX_ANSWER_BYTES))

    def _mind_deadline(self, deadline: float, request: str, timeout_s: float, reason: str) -> None:
        if time.monotonic() >= deadline:
            raise WaitedTooLong(
                f"the controller has not answered {request!r} within {timeout_s:g} s: {reason}. If its handler takes "
                "longer, give ask() a larger timeout_s; else look into logs/server.log of the run."
            )


def _encode(request: str, info: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(info, enc_hook=plain)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"ask({request!r}) cannot send what it was given: {error}. Give numbers, words, lists and dicts of them."
        ) from None
