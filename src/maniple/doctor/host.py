"""A host elsewhere: is it found, is it one, does it let us in, and does it fit to this machine?"""

import time
from collections.abc import Iterable

from maniple.doctor.case import Case
from maniple.doctor.finding import Finding, fine, grave, warning
from maniple.doctor.visit import ECHO_BYTES, visit
from maniple.errors import BadFrame, InvalidArgument, NotAdmitted
from maniple.launch.board import count
from maniple.record.versions import versions

_CLOCKS_S = 1.0  # apart


def look_up_host(case: Case) -> Iterable[Finding]:
    """Its name."""
    came = visit(case)
    host = came.address.host
    if came.address.path is not None:
        yield fine(f"it is on this machine, at {came.address}")
    elif came.lookup is not None:
        fix = "Check the spelling, `getent hosts` and /etc/hosts; or give its address as a number."
        yield grave(f"{host} does not resolve: {came.lookup}", limit="the name server of this machine", fix=fix)
    else:
        yield fine(f"{host} is {', '.join(came.found)}")


def look_at_port(case: Case) -> Iterable[Finding]:
    """Its port: open, closed, or behind a firewall. Workers connect to the host, never the other way."""
    came = visit(case)
    error, where = came.connect, came.address
    if error is None:
        if came.lookup is None:
            yield fine(f"{where} takes connections; only this direction is needed, from workers to the host")
    elif isinstance(error, ConnectionRefusedError | FileNotFoundError):
        fix = (
            "Start the host, or look into its host.json for the port of today. One that was started with --listen "
            "127.0.0.1 is for its own machine: start it with --listen 0.0.0.0:PORT."
        )
        yield grave(f"nobody listens at {where}: connection refused", limit="its machine is up", fix=fix)
    else:
        fix = (
            f"Is the machine up? Does a firewall let connections to port {where.port} in? `nc -vz {where.host} "
            f"{where.port}` tries the same; a proxy or an ssh tunnel cannot be seen from here."
        )
        yield grave(f"{where} cannot be reached: {error}", limit=f"limit {case.wait_s:g} s", fix=fix)


def look_at_greeting(case: Case) -> Iterable[Finding]:
    """Whether a host of maniple speaks there, of this version of the protocol."""
    came = visit(case)
    if came.connect or came.lookup or came.handshake or came.other == "tls":
        return
    if came.has_greeted:
        yield fine("a host of maniple speaks there")
        return
    fix = "Check the port: the host prints its own, and writes it to host.json in the run folder."
    limit = "a host of maniple says hello at once"
    if isinstance(came.greeting, BadFrame):
        yield grave(f"no host for this maniple is at {came.address}: {_plain(came.greeting)}", limit=limit, fix=fix)
    elif came.other:
        kind = "an HTTP server" if came.other == "http" else "another service"
        yield grave(f"{kind} is at {came.address}", limit=limit, fix=fix)
    else:
        fix = f"Its server may be stopped, swapping or overloaded: look at its machine and logs/server.log. {fix}"
        yield grave(f"{came.address} takes the connection and says nothing: {came.greeting}", limit=limit, fix=fix)


def look_at_encryption(case: Case) -> Iterable[Finding]:
    """Whether both sides encrypt, or none."""
    import ssl  # takes its time, and launchers, who look at quick things only, need not wait for it

    came = visit(case)
    error = came.handshake
    if came.other == "tls":
        fix = "Give a copy of its certificate.pem by --certificate (`maniple join` needs it too)."
        yield grave(f"the host at {came.address} encrypts", limit="no certificate was given", fix=fix)
    elif isinstance(error, ssl.SSLCertVerificationError):
        fix = "Copy certificate.pem from the folder of the run that goes on now."
        yield grave(f"the host has another certificate: {error.verify_message}", limit="the one given", fix=fix)
    elif isinstance(error, InvalidArgument):
        fix = "Copy certificate.pem from the run folder."
        yield grave("the certificate that was given cannot be used", limit=_plain(error), fix=fix)
    elif isinstance(error, TimeoutError):
        fix = "Its server may be stopped, swapping or overloaded: look at its machine and logs/server.log."
        yield grave("the host takes the connection and says nothing", limit=f"limit {case.wait_s:g} s", fix=fix)
    elif error is not None:
        fix = "Leave --certificate out (unset MANIPLE_CERTIFICATE), or start the host with --tls."
        yield grave(f"the host does not encrypt: {error}", limit="a certificate was given", fix=fix)
    elif came.has_greeted:
        secret = "the connection is encrypted" if came.is_secret else "values travel in the clear; --tls encrypts"
        yield fine(secret)


def look_at_token(case: Case) -> Iterable[Finding]:
    """Whether both sides know the same token."""
    came = visit(case)
    fix = "Copy the file `token` of the run that goes on now, and name it by --token-file or MANIPLE_TOKEN_FILE."
    if not came.has_greeted:
        return
    if not came.has_token:
        yield grave("no token was given", limit=f"the host at {came.address} asks for one", fix=fix)
    elif isinstance(came.greeting, NotAdmitted):
        yield grave("the token is not this run's", limit=f"the host at {came.address} has another", fix=fix)
    elif came.greeting is not None:
        fix = "Install the same maniple on both sides."
        limit = "hosts of older versions know no doctor"
        yield grave(f"the host ended the talk after the proof: {came.greeting}", limit=limit, fix=fix)
    else:
        yield fine("both sides know the token")


def compare_versions(case: Case) -> Iterable[Finding]:
    """The versions of both sides. Another maniple may speak another protocol; the rest changes results at most."""
    came = visit(case)
    if came.examined is None:
        return
    theirs: dict[str, str] = came.told["versions"]
    mine = versions()
    differing = [name for name in mine if name in theirs and differ(name, mine[name], theirs[name])]
    for name in differing:
        kind = grave if name == "maniple" else warning
        fix = f"`pip install {name}=={theirs[name]}` here, or {mine[name]} there."
        if name == "python":
            fix = f"Use the same Python on both sides, {theirs[name]} or {mine[name]}."
        yield kind(f"{name} {mine[name]} is here", limit=f"{theirs[name]} at the host", fix=fix)
    if not differing:
        yield fine("the same versions as here: " + ", ".join(f"{name} {theirs[name]}" for name in theirs))


def differ(name: str, mine: str, theirs: str) -> bool:
    """Two versions are not as good as one: of maniple all of it counts, of others the first two numbers."""
    return mine != theirs if name == "maniple" else mine.split(".")[:2] != theirs.split(".")[:2]


def compare_clocks(case: Case) -> Iterable[Finding]:
    """The clocks of both sides: timestamps of workers elsewhere are of their own."""
    came = visit(case)
    if came.examined is None:
        return
    seen = f"the host's clock is {abs(came.offset_s):.3g} s {'ahead of' if came.offset_s > 0 else 'behind'} this one"
    if abs(came.offset_s) - came.round_trip_s > _CLOCKS_S:
        now = time.strftime("%H:%M:%S", time.localtime())
        fix = "Set both by a time server (chrony, systemd-timesyncd), or curves of several workers are displaced."
        yield warning(seen, limit=f"limit {_CLOCKS_S:g} s; here it is {now}", fix=fix)
    else:
        yield fine(seen)


def look_at_centers(case: Case) -> Iterable[Finding]:
    """The tables of shared parameters, by which a joining worker's model is compared."""
    came = visit(case)
    if came.talk is not None:
        fix = "Its server may be stopped, swapping or overloaded: look at its machine and logs/server.log."
        limit = "it tells of itself to whoever knows the token"
        yield grave(f"the host let this one in, and then broke off: {_plain(came.talk)}", limit=limit, fix=fix)
    if came.examined is None:
        return
    live = f"{count(came.examined.live, 'live worker')} at {came.examined.node}"
    if not came.told["centers"]:
        yield fine(f"{live}, and no model is shared yet: the first worker's becomes the center")
    for one in came.told["centers"]:
        size = f"{one['parameters']:,} parameters, {one['bytes'] / 1e6:,.2f} MB"
        yield fine(f"{live}; {one['name']} has digest {one['digest'][:16]}, {size}")


def measure_way(case: Case) -> Iterable[Finding]:
    """How long a word takes there and back, and how fast values flow."""
    came = visit(case)
    if not came.echo_s:
        return
    rate = 2 * ECHO_BYTES / came.echo_s
    size = sum(int(one["bytes"]) for one in came.told.get("centers", ()))
    exchange = f"; an exchange of the center takes about {2 * size / rate:.2g} s" if size else ""
    yield fine(f"there and back in {1000 * came.round_trip_s:.2g} ms, {rate / 1e6:,.0f} MB/s{exchange}")


def _plain(error: Exception) -> str:
    return str(error).rstrip(".")
