"""The link: one worker's connection to its host, made again whenever it breaks.

It carries the worker's random name and the number of its newest exchange, by which the host knows what it has
applied already. Tries that fail are followed by a pause that doubles, up to a limit, with jitter, so that the
workers of a host that returns do not all come at once.
"""

import os
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from maniple.errors import BadFrame, HostAway, InvalidArgument, NotAdmitted, raise_remote
from maniple.place import Place
from maniple.wire.address import Address
from maniple.wire.messages import Message, Refusal, Welcome
from maniple.wire.posted import Posted
from maniple.wire.proof import HALF_OPEN_S, introduce
from maniple.wire.stream import TIMEOUT_S, Stream, connect

if TYPE_CHECKING:
    import ssl

_CONNECT_S = 3.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


@dataclass(frozen=True)
class Door:
    """How to reach a host: its address, the token that opens, the certificate to trust."""

    address: Address
    token: str
    tls: "ssl.SSLContext | None" = None
    worker: str = field(default_factory=lambda: secrets.token_hex(8))
    posted: Path | None = None  # where the host posts its address, for those who see its run folder

    @property
    def newest(self) -> Address:
        """Where the host was last: one that was started again elsewhere has posted that."""
        found = None if self.posted is None else Posted.read(self.posted)
        return self.address if found is None else found.nearest

    @classmethod
    def of(cls, place: Place) -> "Door":
        """The door that the environment tells of."""
        assert place.address is not None
        if not place.token:
            raise InvalidArgument(
                f"no token for the host at {place.address}. Set MANIPLE_TOKEN_FILE to a copy of the file `token` in "
                "the run folder, or MANIPLE_TOKEN to what it says."
            )
        tls = None
        if place.certificate is not None:
            from maniple.wire.tls import worker_context

            tls = worker_context(place.certificate)
        return cls(Address.parse(place.address), place.token, tls, posted=place.host_file)


class Link:
    """A connection in one role: "data", "control" and so on."""

    def __init__(
        self,
        door: Door,
        role: str,
        *,
        lineage: str | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_s: float = _CONNECT_S,
        greeting_s: float = HALF_OPEN_S,
        may_try: Callable[[], bool] = lambda: True,
        on_restored: Callable[[Welcome], None] = lambda _: None,
    ) -> None:
        self.lineage = lineage
        self.reason = "no try was made yet"  # why it is not connected
        self.sequence = 0
        self.unsettled: list[Callable[[], list[int]]] = []  # questions that a lost host has left open
        self._pid = os.getpid()
        self._door, self._role, self._timeout_s = door, role, timeout_s
        self._connect_s, self._greeting_s = connect_s, greeting_s
        self._address = door.address  # the last one that was tried
        self._may_try, self._on_restored = may_try, on_restored
        self._stream: Stream | None = None
        self._past_bytes = 0  # through connections that broke
        self._restored: int | None = None
        self._pause_s = _SHORTEST_PAUSE_S
        self._next_try = 0.0

    @property
    def is_connected(self) -> bool:
        """A connection was made, and nothing has shown that it broke."""
        return self._stream is not None

    @property
    def wire_bytes(self) -> int:
        """All bytes that went either way."""
        stream = self._stream
        return self._past_bytes + (0 if stream is None else stream.sent_bytes + stream.received_bytes)

    def stream(self) -> Stream:
        """The connection, made if need be. HostAway if that fails, or if it is too early for another try."""
        if os.getpid() != self._pid:  # forked: a worker of its own, which must not count on in its parent's name
            self._pid, self._stream, self.sequence, self.unsettled = os.getpid(), None, 0, []
            self._door = replace(self._door, worker=secrets.token_hex(8))
        if self._stream is None:
            if not self._may_try() or time.monotonic() < self._next_try:
                raise HostAway(f"the host at {self._address} is away: {self.reason}")
            try:
                self._stream = self._connect()
            except (OSError, NotAdmitted, BadFrame) as error:
                if self.lineage is None and not isinstance(error, OSError):
                    raise  # at the first contact: the token or the address is wrong, and no waiting helps
                self._wait(str(error) or type(error).__name__)
                raise HostAway(f"the host at {self._address} is away: {self.reason}") from error
            self._pause_s = _SHORTEST_PAUSE_S
        return self._stream

    def drop(self, reason: str = "the connection broke") -> None:
        """Give a broken connection up."""
        if self._stream is not None:
            self._past_bytes = self.wire_bytes
            self._stream.abort()
            self._stream.close()
            self._stream = None
            self.reason = reason

    def abort(self) -> None:
        """Wake whoever waits in the connection, from another thread: it is known to be broken."""
        stream = self._stream
        if stream is not None:
            stream.abort()

    def say(self, message: Message) -> Message:
        """Ask something and take the answer, both without a payload. A refusal is raised as the error it names."""
        stream = self.stream()
        stream.send(message)
        return checked(stream.receive_message())

    def _connect(self) -> Stream:
        self._address = self._door.newest
        stream = connect(self._address, timeout_s=self._connect_s, tls=self._door.tls)
        try:
            stream.set_timeout(self._connect_s)
            try:
                welcome = introduce(stream, self._door.token, self._role, self._door.worker, timeout_s=self._greeting_s)
            except ConnectionError as error:
                hint = "" if self._door.tls else " (if the host encrypts, give its certificate: --certificate)"
                raise ConnectionError(f"{error}{hint}") from None
            if self.lineage is not None and welcome.lineage != self.lineage:
                raise NotAdmitted(
                    f"it serves another center now (lineage {welcome.lineage}, this worker's is {self.lineage})"
                )
            stream.set_timeout(self._timeout_s)
        except BaseException:
            stream.close()
            raise
        self.lineage = welcome.lineage
        if self._restored not in {None, welcome.restored}:
            self._on_restored(welcome)
        self._restored = welcome.restored
        return stream

    def _wait(self, reason: str) -> None:
        self.reason = reason
        self._next_try = time.monotonic() + self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def checked(answer: Message) -> Message:
    """The answer, unless it is a refusal, which is raised."""
    if isinstance(answer, Refusal):
        raise_remote(answer.kind, answer.reason)
    return answer
