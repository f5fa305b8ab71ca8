"""The link of a training thread, which a slow, silent or broken network holds up for less than a second.

A connection that makes no progress during an exchange is dropped, and reconnecting is left to a background thread.
Until it has succeeded, `stream` raises HostAway at once, and training continues. Calls that wait for the host anyway
(`retry_until`) ask again.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from maniple.clock import clock
from maniple.connection.link import Endpoint, Link
from maniple.connection.retry import Backoff
from maniple.errors import BadFrame, NotAdmitted
from maniple.wire.frames import TIMEOUT_S, Stream
from maniple.wire.messages import Welcome

_STALL_S = 0.75  # two retransmissions of a lost packet on a LAN; and with all that comes before and after, below 1 s
_SHRINK = 0.9  # of a longer limit, with each exchange that was made: a host that is slow for good is interrupted rarely
_RETRY_S = 1.0  # for which an exchange is continued over connections that break again and again
_FIRST_ATTEMPT_S = 0.5  # a server that was restarted accepts connections within that time
# To connect, and to be admitted then, in consecutive attempts. On a LAN both take milliseconds, so a packet is sent
# every second: the kernel repeats a lost SYN after 1 s and then after 3 s. Later attempts suffice for a slow host and
# for a satellite link with TLS.
_TIMEOUTS_S = ((1.0, 2.0), (1.0, 3.0), (2.0, 5.0))


class TrainingLink(Link):
    """A worker's link in the role "data".

    The limit for a stall is 0.75 s. A host that is alive may be silent for longer: it is overloaded, or waits for a
    lock. So the limit doubles with each further stall, without an exchange in between, after which the first attempt to
    reconnect has succeeded. It shrinks again with the exchanges that are made.
    """

    def __init__(
        self, endpoint: Endpoint, *, lineage: str, on_restored: Callable[[Welcome], None] = lambda _: None
    ) -> None:
        super().__init__(endpoint, "data", lineage=lineage, on_restored=on_restored)
        self._attempts: _Attempts | None = None
        self._is_closed = False
        self._may_wait = True  # for the first attempt: the host is not known to be away
        self._stall_s = _STALL_S
        self._has_stalled = False  # the last connection
        self._stalls = 0  # since the last exchange that was made

    @contextmanager
    def exchanging(self) -> Generator[None]:
        """For the length of the block, limit each stall, and the time for which broken connections are replaced."""
        self.retry_s = _RETRY_S
        self._set_timeout(self._stall_s)
        try:
            yield
            self._stalls, self._stall_s = 0, max(_STALL_S, _SHRINK * self._stall_s)
        finally:
            self.retry_s = Link.retry_s
            self._set_timeout(TIMEOUT_S)

    def drop(self, reason: str = "the connection broke") -> None:
        if self._stream is not None:
            self._has_stalled = self._stream.has_stalled
            self._may_wait = not self._has_stalled
        super().drop(reason)

    def close(self, reason: str) -> None:
        """Close the connection for good."""
        self._is_closed = True
        self.drop(reason)
        if self._attempts is not None:
            self._attempts.cancel()
            self._attempts = None

    def _set_timeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        if self._stream is not None:
            self._stream.set_timeout(timeout_s)

    def _begin_in_child(self) -> None:
        super()._begin_in_child()
        self._attempts, self._may_wait = None, True

    def _reconnect(self) -> Stream:
        """Return the connection that the background thread has made; HostAway while there is none."""
        if self._is_closed:
            raise self._away()
        attempts = self._attempts = self._attempts or _Attempts(self._attempt)
        may_wait, self._may_wait = self._may_wait, False
        made = attempts.result(_FIRST_ATTEMPT_S if may_wait else 0.0)
        if made is None:
            self.reason = attempts.reason or self.reason
            raise self._away()
        self._attempts = None
        if self._has_stalled:
            self._stalls = 0 if attempts.failed else self._stalls + 1
            if self._stalls > 1:
                self._stall_s = min(2 * self._stall_s, TIMEOUT_S)
                self._timeout_s = min(2 * self._timeout_s, TIMEOUT_S)
            self._has_stalled = False
        return self._accept(*made)


class _Attempts:
    """Attempts to connect, in a background thread, until one succeeds.

    Attributes:
        failed: the number of attempts that have failed.
        reason: why the last one has.
    """

    def __init__(self, attempt: Callable[[float, float], tuple[Stream, Welcome]]) -> None:
        self.failed = 0
        self.reason = ""
        self._attempt = attempt
        self._lock = threading.Lock()  # of the two that follow
        self._made: tuple[Stream, Welcome] | None = None
        self._defect: Exception | None = None
        self._has_tried = threading.Event()
        self._is_cancelled = threading.Event()
        threading.Thread(target=self._run, name="maniple-connect", daemon=True).start()

    def result(self, wait_s: float) -> tuple[Stream, Welcome] | None:
        """Return the connection, or None if there is none yet; wait up to `wait_s` for the end of the first attempt."""
        if wait_s:
            self._has_tried.wait(wait_s)
        with self._lock:
            if self._defect is not None:
                raise self._defect
            made, self._made = self._made, None
        return made

    def cancel(self) -> None:
        """End the attempts, and close a connection that was made and not used."""
        with self._lock:
            self._is_cancelled.set()
            if self._made is not None:
                self._made[0].close()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._is_cancelled.is_set():
            begin, (connect_s, auth_s) = clock.monotonic(), _TIMEOUTS_S[min(self.failed, len(_TIMEOUTS_S) - 1)]
            try:
                made = self._attempt(connect_s, auth_s)
            except (OSError, NotAdmitted, BadFrame) as error:
                self.failed += 1
                self.reason = str(error) or type(error).__name__
                self._has_tried.set()
                has_timed_out = clock.monotonic() - begin >= connect_s  # then it was a pause itself
                self._is_cancelled.wait(0.0 if has_timed_out else backoff.next_s())
            except Exception as error:  # a defect, which the training thread raises
                self._defect = error
                break
            else:
                with self._lock:
                    self._made = made
                    if self._is_cancelled.is_set():
                        made[0].close()
                break
        self._has_tried.set()
