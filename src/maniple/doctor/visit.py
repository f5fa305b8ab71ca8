"""A visit to a host: as far as a worker would come, step by step, and what was learned on the way. It joins nothing."""

import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from maniple.doctor.case import Case
from maniple.errors import BadFrame, InvalidArgument, ManipleError, NotAdmitted
from maniple.host.examined import MAX_ECHO_BYTES
from maniple.host.reach import reach, with_token
from maniple.place import Place
from maniple.wire.address import Address
from maniple.wire.examination import Echo, Examine, Examined
from maniple.wire.messages import Hello
from maniple.wire.proof import introduce
from maniple.wire.stream import Stalled, Stream, prepare

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")
_ECHOES = 5
ECHO_BYTES = 1 << 20
assert ECHO_BYTES <= MAX_ECHO_BYTES


@dataclass
class Visit:
    """How far it came. Each step that was not reached has left its field empty."""

    address: Address
    is_secret: bool  # a certificate is there
    has_token: bool
    found: list[str] = field(default_factory=list[str])  # addresses of the name
    lookup: Exception | None = None  # why a step failed
    connect: Exception | None = None
    handshake: Exception | None = None
    greeting: Exception | None = None
    other: str = ""  # what speaks there instead: "http", "tls", "another", or "" for silence
    has_greeted: bool = False  # it said hello as a host of maniple does
    talk: Exception | None = None
    examined: Examined | None = None
    told: dict[str, Any] = field(default_factory=dict[str, Any])
    offset_s: float = 0.0  # by which its clock is ahead
    round_trip_s: float = 0.0
    echo_s: float = 0.0  # for ECHO_BYTES there and back


def visit(case: Case) -> Visit:
    """Go there, once per case."""
    return case.once("visit", _visit)


def _visit(case: Case) -> Visit:
    place = place_of(case)
    assert place.address is not None
    address = Address.parse(place.address)
    came = Visit(address, place.certificate is not None, bool(place.token))
    link = _reached(came, case.wait_s)
    if link is None:
        return came
    with closing(link):
        stream = _opened(came, link, place, case.wait_s)
        if stream is not None:
            _talk(came, stream, place.token, case.wait_s)
    if isinstance(came.greeting, Stalled) and not came.is_secret and not came.has_greeted:
        came.other = _other(address, case.wait_s)
    return came


def place_of(case: Case) -> Place:
    """How to reach the host; InvalidArgument if what was given cannot be used."""
    assert case.host is not None
    return with_token(reach(case.host, case.token_file, case.certificate))


def _reached(came: Visit, wait_s: float) -> socket.socket | None:
    """A connection."""
    address = came.address
    try:
        if address.path is None:
            entries = within(wait_s, lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
            came.found = sorted({str(entry[4][0]) for entry in entries})
    except OSError as error:
        came.lookup = error
        return None
    try:
        return within(2 * wait_s, lambda: address.connect(wait_s))
    except OSError as error:
        came.connect = error
        return None


def _opened(came: Visit, link: socket.socket, place: Place, wait_s: float) -> Stream | None:
    """A stream, encrypted if there is a certificate."""
    try:
        stream = Stream(prepare(link, _context(place), timeout_s=wait_s))
        stream.set_timeout(wait_s)
        return stream
    except (OSError, InvalidArgument) as error:
        came.handshake = error
        return None


def _context(place: Place) -> "ssl.SSLContext | None":
    if place.certificate is None:
        return None
    from maniple.wire.tls import worker_context

    return worker_context(place.certificate)


def _talk(came: Visit, stream: Stream, token: str | None, wait_s: float) -> None:
    """Be let in, ask how it is, and measure the way."""
    try:
        if token is None:
            said = stream.receive_message(deadline=time.monotonic() + wait_s)
            came.has_greeted = isinstance(said, Hello)
            return
        introduce(stream, token, "doctor", secrets.token_hex(8), timeout_s=wait_s)
        came.has_greeted = True
    except (OSError, BadFrame, NotAdmitted) as error:
        came.greeting = error
        came.has_greeted = stream.received_bytes > 0 and not isinstance(error, BadFrame)
        return
    try:
        _ask(came, stream, wait_s)
    except (OSError, ManipleError, msgspec.DecodeError) as error:
        came.talk = error


def _ask(came: Visit, stream: Stream, wait_s: float) -> None:
    stream.set_timeout(wait_s)
    came.round_trip_s = min(_timed(lambda: _echoed(stream, b"")) for _ in range(_ECHOES))
    before = time.time()
    stream.send(Examine())
    message, size = stream.receive()
    told = stream.receive_bytes(size, at_most=MAX_ECHO_BYTES)
    if isinstance(message, Examined):
        came.examined, came.told = message, msgspec.json.decode(told)
        came.offset_s = message.time - (before + time.time()) / 2
    came.echo_s = _timed(lambda: _echoed(stream, bytes(ECHO_BYTES)))


def _echoed(stream: Stream, data: bytes) -> None:
    stream.send(Echo(), data)
    _, size = stream.receive()
    stream.receive_bytes(size, at_most=len(data))


def _timed(act: Callable[[], None]) -> float:
    before = time.perf_counter()
    act()
    return time.perf_counter() - before


def _other(address: Address, wait_s: float) -> str:
    """What kind of service is silent until it is spoken to."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is said to it
    answer = b""
    with suppress(OSError), address.connect(wait_s) as link:
        link.settimeout(wait_s)
        link.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answer = link.recv(5)
    if answer == b"HTTP/":
        return "http"
    with suppress(OSError), address.connect(wait_s) as link:
        link.settimeout(wait_s)
        with context.wrap_socket(link):
            return "tls"
    return "another" if answer else ""


def within(wait_s: float, act: Callable[[], T]) -> T:
    """What `act` gives, or TimeoutError: for calls of the system that know no deadline."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((act(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name="maniple-doctor-wait", daemon=True).start()
    try:
        answer, error = answers.get(timeout=wait_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {wait_s:g} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value] - without an error it is there
