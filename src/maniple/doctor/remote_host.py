"""Checks of a host over the network: the steps of a joining worker, one by one, without joining."""

import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import msgspec

from maniple.clock import Deadline
from maniple.connection.find_host import locate_host, with_token
from maniple.doctor.checks import Case, Checks, Finding, fine, grave, warning
from maniple.doctor.line import STEP_TIMES_S, LineSpeed, suggest
from maniple.environment import Environment
from maniple.errors import BadFrame, InvalidArgument, ManipleError, NotAdmitted
from maniple.host.watchers import MAX_ECHO_BYTES, incompressible
from maniple.record.folder import versions
from maniple.text import count
from maniple.wire.address import Address
from maniple.wire.auth import authenticate
from maniple.wire.frames import Stalled, Stream, configure_socket
from maniple.wire.messages import AuthChallenge, DoctorReply, DoctorRequest, Echo, LineTest

checks = Checks("host")
T = TypeVar("T")
Steps = Iterator[tuple[str, Finding]]  # with the names of their checks
_STEPS = ("address", "port", "greeting", "encryption", "token", "both versions", "both clocks", "center", "way", "rule")
_ECHOES = 5
_FIRST_TEST_BYTES = 1 << 16
_TEST_S = 0.5  # a longer test of a direction of the line is the last one; the longest takes four times as long
_BYTES_PER_PARAMETER = 4
_CLOCKS_S = 1.0  # apart
_LOOK_AT_SERVER = "Its server may be stopped, swapping or overloaded: look at its machine and logs/server.log."


def _findings(step: str, case: Case) -> Iterable[Finding]:
    visit = case.once("visit", lambda case: list(_visit(case)))
    return [finding for name, finding in visit if name == step]


for _step in _STEPS:
    checks(_step)(partial(_findings, _step))


def place_of(case: Case) -> Environment:
    """How to reach the host; InvalidArgument if what was given cannot be used."""
    assert case.host is not None
    return with_token(locate_host(case.host, case.token_file, case.certificate))


def _visit(case: Case) -> Steps:
    """Look up the name and connect. Workers connect to the host, never the other way. A step that fails is the last."""
    environment = place_of(case)
    assert environment.address is not None
    where, wait_s = Address.parse(environment.address), case.wait_s
    if where.path is not None:
        yield "address", fine(f"it is on this machine, at {where}")
    else:
        try:
            entries = within(wait_s, lambda: socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM))
        except OSError as error:
            fix = "Check the spelling, `getent hosts` and /etc/hosts; or give its address as a number."
            seen = f"{where.host} does not resolve: {error}"
            yield "address", grave(seen, limit="the name server of this machine", fix=fix)
            return
        yield "address", fine(f"{where.host} is {', '.join(sorted({str(entry[4][0]) for entry in entries}))}")
    try:
        link = within(2 * wait_s, lambda: where.connect(wait_s))
    except (ConnectionRefusedError, FileNotFoundError):
        fix = (
            "Start the host, or look into its host.json for the port of today. One that was started with --listen "
            "127.0.0.1 is for its own machine: start it with --listen 0.0.0.0:PORT."
        )
        yield "port", grave(f"no process listens at {where}: connection refused", limit="its machine is up", fix=fix)
        return
    except OSError as error:
        fix = (
            f"Is the machine up? Does a firewall let connections to port {where.port} in? `nc -vz {where.host} "
            f"{where.port}` tries the same; a proxy or an ssh tunnel cannot be seen from here."
        )
        yield "port", grave(f"{where} cannot be reached: {error}", limit=f"limit {wait_s:g} s", fix=fix)
        return
    yield "port", fine(f"{where} takes connections; only this direction is needed, from workers to the host")
    with closing(link):
        yield from _enter(link, where, environment, case)


def _enter(link: socket.socket, where: Address, environment: Environment, case: Case) -> Steps:
    """Encrypt if there is a certificate, and prove to know the token."""
    wait_s = case.wait_s
    try:
        stream = Stream(configure_socket(link, _tls_context(environment), timeout_s=wait_s))
        stream.set_timeout(wait_s)
    except (OSError, InvalidArgument) as error:
        yield "encryption", _handshake_failure(error, wait_s)
        return
    token, error = environment.token, None
    try:
        if token is None:
            said = stream.receive_message(deadline=Deadline(wait_s, slice_s=wait_s))
            is_host = isinstance(said, AuthChallenge)
        else:
            authenticate(stream, token, "doctor", secrets.token_hex(8), timeout_s=wait_s)
            is_host = True
    except (OSError, BadFrame, NotAdmitted) as caught:
        error = caught
        is_host = stream.received_bytes > 0 and not isinstance(error, BadFrame)
    if not is_host:
        link.close()
        is_silent = isinstance(error, Stalled) and environment.certificate is None
        yield _no_host(where, error, _silent_service(where, wait_s) if is_silent else "")
        return
    yield "greeting", fine("a host of maniple speaks there")
    is_secret = environment.certificate is not None
    yield (
        "encryption",
        fine("the connection is encrypted" if is_secret else "values travel in the clear; --tls encrypts"),
    )
    fix = "Copy the file `token` of the present run, and name it by --token-file or MANIPLE_TOKEN_FILE."
    if not token:
        yield "token", grave("no token was given", limit=f"the host at {where} asks for one", fix=fix)
    elif isinstance(error, NotAdmitted):
        yield "token", grave("the token is not this run's", limit=f"the host at {where} has another", fix=fix)
    elif error is not None:
        limit, fix = "hosts of older versions know no doctor", "Install the same maniple on both sides."
        yield "token", grave(f"the host ended the talk after the proof: {error}", limit=limit, fix=fix)
    else:
        yield "token", fine("both sides know the token")
        yield from _converse(stream, case, is_near=where.path is not None)


def _tls_context(environment: Environment) -> Any:
    if environment.certificate is None:
        return None
    from maniple.wire.tls import worker_context

    return worker_context(environment.certificate)


def _handshake_failure(error: OSError | InvalidArgument, wait_s: float) -> Finding:
    import ssl  # takes its time, and launchers, who look at quick things only, need not wait for it

    if isinstance(error, ssl.SSLCertVerificationError):
        fix = "Copy certificate.pem from the folder of the present run."
        return grave(f"the host has another certificate: {error.verify_message}", limit="the one given", fix=fix)
    if isinstance(error, InvalidArgument):
        fix = "Copy certificate.pem from the run folder."
        return grave("the certificate that was given cannot be used", limit=_plain(error), fix=fix)
    if isinstance(error, TimeoutError):
        seen = "the host takes the connection and says nothing"
        return grave(seen, limit=f"limit {wait_s:g} s", fix=_LOOK_AT_SERVER)
    fix = "Leave --certificate out (unset MANIPLE_CERTIFICATE), or start the host with --tls."
    return grave(f"the host does not encrypt: {error}", limit="a certificate was given", fix=fix)


def _no_host(where: Address, error: Exception | None, service: str) -> tuple[str, Finding]:
    """What is there instead of a host of maniple that speaks this version of the protocol."""
    if service == "tls":
        fix = "Give a copy of its certificate.pem by --certificate (`maniple join` needs it too)."
        return "encryption", grave(f"the host at {where} encrypts", limit="no certificate was given", fix=fix)
    fix = "Check the port: the host prints its own, and writes it to host.json in the run folder."
    if isinstance(error, BadFrame):
        seen = f"no host for this maniple is at {where}: {_plain(error)}"
    elif service:
        seen = f"{'an HTTP server' if service == 'http' else 'another service'} is at {where}"
    else:
        seen, fix = f"{where} takes the connection and says nothing: {error}", f"{_LOOK_AT_SERVER} {fix}"
    return "greeting", grave(seen, limit="a host of maniple says hello at once", fix=fix)


def _converse(stream: Stream, case: Case, *, is_near: bool) -> Steps:
    """Ask the host how it is, and measure the way: how long a word takes there and back, and how fast values flow.

    Args:
        stream: the connection.
        case: for the size of the model and the time of a step.
        is_near: the host is on this machine, where workers that `maniple run` starts need no line.
    """
    reply, told, offset_s, round_trip_s = None, dict[str, Any](), 0.0, 0.0
    try:
        stream.set_timeout(case.wait_s)
        round_trip_s = min(_echo(stream, 0) for _ in range(_ECHOES))
        before = time.time()
        stream.send(DoctorRequest())
        message, size = stream.receive()
        data = stream.receive_bytes(size, at_most=MAX_ECHO_BYTES)
        if isinstance(message, DoctorReply):
            reply, told = message, msgspec.json.decode(data)
            offset_s = message.time - (before + time.time()) / 2
        up, down = (_bytes_per_s(stream, round_trip_s, is_up=is_up) for is_up in (True, False))
        line = LineSpeed(round_trip_s, up, down)
        size = case.model_mb * 1e6 or sum(int(one["bytes"]) for one in told.get("centers", ()))
        exchange = (
            f"; an exchange of {_mb(size)} MB takes about {line.exchange_s(size / _BYTES_PER_PARAMETER):.2g} s"
            if size
            else ""
        )
        speeds = f"{_mb(up)} MB/s to the host, {_mb(down)} MB/s from it"
        yield "way", fine(f"there and back in {1000 * round_trip_s:.2g} ms, {speeds}{exchange}", **asdict(line))
        if not is_near:
            known_s = 0.0 if case.model_mb else told.get("step_s") or 0.0  # of the host's model, not of another
            for finding in _suggest(line, size, case.step_s or known_s):
                yield "rule", finding
    except (OSError, ManipleError, msgspec.DecodeError) as error:
        seen, limit = "the host accepted the token and then broke off", "it describes itself to anyone with the token"
        yield "center", grave(f"{seen}: {_plain(error)}", limit=limit, fix=_LOOK_AT_SERVER)
    if reply is not None:
        yield from _compare_versions(told.get("versions", {}))
        yield "both clocks", _compare_clocks(offset_s, round_trip_s)
        yield from _describe_centers(f"{count(reply.live, 'live worker')} at {reply.node}", told.get("centers", []))


def _echo(stream: Stream, size: int) -> float:
    """The seconds that a message with `size` bytes takes there and back."""
    before = time.perf_counter()
    stream.send(Echo(), bytes(size))
    _, returned = stream.receive()
    stream.receive_bytes(returned, at_most=size)
    return time.perf_counter() - before


def _bytes_per_s(stream: Stream, round_trip_s: float, *, is_up: bool) -> float:
    """The throughput of one direction, from messages that grow until one takes `_TEST_S`, or has the largest size."""
    size = _FIRST_TEST_BYTES
    while True:
        payload = incompressible(size) if is_up else b""
        before = time.perf_counter()
        stream.send(LineTest(0 if is_up else size), payload)
        _, returned = stream.receive()
        stream.receive_bytes(returned, at_most=MAX_ECHO_BYTES)
        seconds = time.perf_counter() - before
        if seconds >= _TEST_S or size == MAX_ECHO_BYTES:
            return size / max(seconds - round_trip_s, 1e-6)
        size = min(4 * size, MAX_ECHO_BYTES)


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f}" if size >= 1e8 else f"{size / 1e6:.2g}"


def _suggest(line: LineSpeed, size_bytes: float, step_s: float) -> Iterator[Finding]:
    """A rule, a period and a compression for workers at the other end of this line."""
    if not size_bytes:
        yield fine("no model is known: --model-size 120M and --step-time 0.2 make this suggest rule, period and wire")
        return
    for seconds in (step_s,) if step_s else STEP_TIMES_S:
        found = suggest(line, size_bytes / _BYTES_PER_PARAMETER, seconds)
        yield fine(f"{found.options}: {found.reason}", step_s=seconds, options=found.options, **asdict(found))


def _compare_versions(theirs: dict[str, str]) -> Steps:
    """The versions of both sides. Another maniple may speak another protocol; the rest changes results at most."""
    mine = versions()
    differing = [name for name in mine if name in theirs and differ(name, mine[name], theirs[name])]
    for name in differing:
        kind = grave if name == "maniple" else warning
        fix = f"`pip install {name}=={theirs[name]}` here, or {mine[name]} there."
        if name == "python":
            fix = f"Use the same Python on both sides, {theirs[name]} or {mine[name]}."
        yield "both versions", kind(f"{name} {mine[name]} is here", limit=f"{theirs[name]} at the host", fix=fix)
    if not differing:
        same = ", ".join(f"{name} {theirs[name]}" for name in theirs)
        yield "both versions", fine(f"the same versions as here: {same}")


def differ(name: str, mine: str, theirs: str) -> bool:
    """Two versions are not as good as one: of maniple all of it counts, of others the first two numbers."""
    return mine != theirs if name == "maniple" else mine.split(".")[:2] != theirs.split(".")[:2]


def _compare_clocks(offset_s: float, round_trip_s: float) -> Finding:
    """The clocks of both sides agree. Workers elsewhere write timestamps of their machine's clock."""
    seen = f"the host's clock is {abs(offset_s):.3g} s {'ahead of' if offset_s > 0 else 'behind'} this one"
    if abs(offset_s) - round_trip_s <= _CLOCKS_S:
        return fine(seen)
    now = time.strftime("%H:%M:%S", time.localtime())
    fix = "Set both by a time server (chrony, systemd-timesyncd), or curves of several workers are displaced."
    return warning(seen, limit=f"limit {_CLOCKS_S:g} s; here it is {now}", fix=fix)


def _describe_centers(live: str, centers: list[dict[str, Any]]) -> Steps:
    """The tables of shared parameters, by which a joining worker's model is compared."""
    if not centers:
        yield "center", fine(f"{live}, and no model is shared yet: the first worker's becomes the center")
    for one in centers:
        size = f"{one['parameters']:,} parameters, {one['bytes'] / 1e6:,.2f} MB"
        yield "center", fine(f"{live}; {one['name']} has digest {one['digest'][:16]}, {size}")


def _silent_service(address: Address, wait_s: float) -> str:
    """What kind of service is silent until it is spoken to: "http", "tls", "another", or "" if it stays silent."""
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


def _plain(error: Exception) -> str:
    return str(error).rstrip(".")
