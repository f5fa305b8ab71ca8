"""Links: connections to a host that reconnect, and requests over them with deadlines.

The host recognises a worker by its random name, which all its links carry, and by the sequence number of its newest
exchange. From these it knows which contributions it has applied already.
"""

import os
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from maniple.clock import Deadline, clock
from maniple.connection.retry import Backoff
from maniple.environment import Environment
from maniple.errors import BadFrame, HostAway, InvalidArgument, NotAdmitted, raise_remote
from maniple.wire.address import Address, HostFile
from maniple.wire.auth import AUTH_TIMEOUT_S, authenticate
from maniple.wire.frames import TIMEOUT_S, Buffer, Stream, connect
from maniple.wire.messages import Message, Refusal, Welcome

if TYPE_CHECKING:
    import ssl

M = TypeVar("M", bound=Message)
_CONNECT_S = 3.0  # one lost SYN is repeated after 1 s, a second one after 3 s


@dataclass(frozen=True)
class Endpoint:
    """How to reach a host and be admitted: its address, the run's token, the certificate to trust."""

    address: Address
    token: str
    tls: "ssl.SSLContext | None" = None
    worker: str = field(default_factory=lambda: secrets.token_hex(8))
    host_file: Path | None = None  # the run's host.json, where it is visible from here

    @classmethod
    def of(cls, environment: Environment) -> "Endpoint":
        """The endpoint that the environment describes."""
        assert environment.address is not None
        if not environment.token:
            raise InvalidArgument(
                f"no token for the host at {environment.address}. Set MANIPLE_TOKEN_FILE to a copy of the file "
                "`token` in the run folder, or MANIPLE_TOKEN to its contents."
            )
        tls = None
        if environment.certificate is not None:
            from maniple.wire.tls import worker_context

            tls = worker_context(environment.certificate)
        return cls(Address.parse(environment.address), environment.token, tls, host_file=environment.host_file)

    @property
    def current_address(self) -> Address:
        """The address in host.json, if it is visible: a host that was restarted elsewhere has written it there."""
        found = None if self.host_file is None else HostFile.read(self.host_file)
        return self.address if found is None else found.nearest


class Link:
    """A connection in one role: "data", "control" and so on.

    Attributes:
        lineage: that of the center at the host; None before the first connection.
        reason: why there is no connection.
        sequence: the number of the newest exchange.
        unresolved: exchanges of which it is unknown what was applied.
        on_wait: called between two attempts of a request; may raise to give up.
        retry_s: for how long an exchange is continued over connections that break again and again.
        lock: held for each operation on a center, since exchanges of several models may run in the background.
    """

    retry_s = 60.0

    def __init__(
        self,
        endpoint: Endpoint,
        role: str,
        *,
        lineage: str | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_s: float = _CONNECT_S,
        auth_s: float = AUTH_TIMEOUT_S,
        on_restored: Callable[[Welcome], None] = lambda _: None,
    ) -> None:
        """`on_restored` is called after a reconnect to a host that has restored the center from a snapshot in the
        meantime."""
        self.lineage = lineage
        self.reason = "no attempt was made yet"
        self.sequence = 0
        self.unresolved: list[Callable[[], list[int]]] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._endpoint, self._role, self._timeout_s = endpoint, role, timeout_s
        self._connect_s, self._auth_s = connect_s, auth_s
        self._address = endpoint.address  # of the last attempt
        self._on_restored = on_restored
        self._stream: Stream | None = None
        self._past_bytes = 0  # through earlier connections
        self._restored: int | None = None
        self._backoff = Backoff()
        self._next_attempt = 0.0

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection that is not known to be broken."""
        return self._stream is not None

    @property
    def wire_bytes(self) -> int:
        """All bytes sent and received."""
        stream = self._stream
        return self._past_bytes + (0 if stream is None else stream.sent_bytes + stream.received_bytes)

    def stream(self) -> Stream:
        """Return the connection, and make it if there is none.

        Raises:
            HostAway: the attempt failed, or the backoff after an earlier one has not passed yet.
        """
        if os.getpid() != self._pid:
            self._begin_in_child()
        if self._stream is None:
            self._stream = self._reconnect()
            self._stream.set_timeout(self._timeout_s)
        return self._stream

    def exchanging(self) -> AbstractContextManager[None]:
        """For the length of an exchange, treat the connection as the caller's thread needs it; see `TrainingLink`."""
        return nullcontext()

    def request(
        self,
        message: Message,
        *payload: Buffer,
        reply: type[M],
        max_reply_bytes: int = 0,
        deadline: Deadline | None = None,
    ) -> tuple[M, bytearray]:
        """Send a message and return the reply and its payload.

        Args:
            reply: the expected type; a `Refusal` is raised as the error that it names, anything else as BadFrame.
            max_reply_bytes: the limit of the reply's payload.
            deadline: when the reply must be complete. By default the connection's timeout limits each pause between
                two bytes.
        """
        stream = self.stream()
        stream.set_timeout(self._timeout_s if deadline is None else deadline.left_s())
        stream.send(message, *payload)
        received, size = stream.receive(deadline=deadline)
        answer = check_reply(received, reply)
        return answer, stream.receive_bytes(size, at_most=max_reply_bytes, deadline=deadline)

    def drop(self, reason: str = "the connection broke") -> None:
        """Close the connection; the next `stream()` makes a new one."""
        if self._stream is not None:
            self._past_bytes = self.wire_bytes
            if self._stream.has_stalled:
                self._stream.discard()
            else:
                self._stream.abort()
                self._stream.close()
            self._stream = None
            self.reason = reason

    def abort(self) -> None:
        """Wake a thread that is blocked in the connection. Called from another thread, which knows that it broke."""
        stream = self._stream
        if stream is not None:
            stream.abort()

    def _begin_in_child(self) -> None:
        """After a fork, be another worker, with another name and sequence."""
        self._pid, self._stream, self.sequence, self.unresolved = os.getpid(), None, 0, []
        self._endpoint = replace(self._endpoint, worker=secrets.token_hex(8))

    def _reconnect(self) -> Stream:
        """Make one attempt to connect, unless the backoff after an earlier one has not passed yet."""
        if clock.monotonic() < self._next_attempt:
            raise self._away()
        try:
            stream, welcome = self._attempt(self._connect_s, self._auth_s)
        except (OSError, NotAdmitted, BadFrame) as error:
            if self.lineage is None and not isinstance(error, OSError):
                raise  # on first contact the token or the address is wrong, and retrying does not help
            self.reason = str(error) or type(error).__name__
            self._next_attempt = clock.monotonic() + self._backoff.next_s()
            raise self._away() from error
        self._backoff.reset()
        return self._accept(stream, welcome)

    def _away(self) -> HostAway:
        return HostAway(f"the host at {self._address} cannot be reached: {self.reason}")

    def _attempt(self, connect_s: float, auth_s: float) -> tuple[Stream, Welcome]:
        """Connect and authenticate. Changes nothing that another thread reads, except for the address."""
        self._address = self._endpoint.current_address
        stream = connect(self._address, timeout_s=connect_s, handshake_s=max(connect_s, auth_s), tls=self._endpoint.tls)
        try:
            stream.set_timeout(connect_s)
            try:
                welcome = authenticate(
                    stream, self._endpoint.token, self._role, self._endpoint.worker, timeout_s=auth_s
                )
            except ConnectionError as error:
                hint = "" if self._endpoint.tls else " (if the host uses TLS, give its certificate: --certificate)"
                raise ConnectionError(f"{error}{hint}") from None
            if self.lineage is not None and welcome.lineage != self.lineage:
                raise NotAdmitted(
                    f"it serves another center now (lineage {welcome.lineage}, this worker's is {self.lineage})"
                )
        except BaseException:
            stream.close()
            raise
        return stream, welcome

    def _accept(self, stream: Stream, welcome: Welcome) -> Stream:
        """Use a new connection."""
        self.lineage = welcome.lineage
        if self._restored not in {None, welcome.restored}:
            self._on_restored(welcome)
        self._restored = welcome.restored
        return stream


def check_reply(reply: Message, expected: type[M]) -> M:
    """Return `reply` if it has the expected type. A refusal is raised as the error that it names."""
    if isinstance(reply, Refusal):
        raise_remote(reply.kind, reply.reason)
    if not isinstance(reply, expected):
        raise BadFrame(f"{expected.__name__} was expected, and {type(reply).__name__} came.")
    return reply
