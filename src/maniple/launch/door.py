"""The host's door: where it listens, the token that opens, and the process that serves, started again when it dies.

The launcher holds the listening sockets, so that a worker that comes while the server is being started again
waits in their queue. Address and token are written to the run folder, from which a successor takes them.
"""

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from maniple.errors import InvalidArgument
from maniple.host import Host
from maniple.launch.child import Child
from maniple.place import Place, environment
from maniple.record import Folder
from maniple.record.folder import write_json
from maniple.wire.address import Address
from maniple.wire.proof import fresh_token
from maniple.wire.tls import host_context, make_certificate

_LONGEST_PAUSE_S = 2.0
_MAX_PATH = 100  # of a socket file, by the kernel's own limit of 107


@dataclass(frozen=True)
class Listen:
    """What was asked about listening."""

    address: Address = field(default_factory=Address)
    tls: bool = False
    certificate: Path | None = None
    key: Path | None = None

    def check(self) -> None:
        """Raise InvalidArgument if it cannot be done."""
        if self.address.path is not None:
            raise InvalidArgument(
                f"--listen {self.address} is no address for other machines. Give HOST:PORT; workers of this machine "
                "find a socket in the run folder by themselves."
            )
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument("--certificate and --key belong together, and one is missing. Give both, or none.")


class Door(Child):
    """The listening sockets and the server process of one host."""

    def __init__(self, host: Host, listen: Listen, place: Place) -> None:
        super().__init__()
        self._host, self._listen = host, listen
        known = _known(host.folder)
        address = listen.address
        if address.port == 0 and known:  # a successor is found where its predecessor was
            address = Address(known["host"] if address == Address() else address.host, known["port"])
        try:
            self._sockets = [address.listen()]
        except OSError as error:
            raise InvalidArgument(
                f"cannot listen on {address}: {error.strerror or error}. Choose another address or port with --listen."
            ) from None
        self.address = Address(address.host, self._sockets[0].getsockname()[1])
        path = host.folder.path / "host.sock"
        self.unix: Address | None = None
        if len(str(path)) <= _MAX_PATH:
            path.unlink(missing_ok=True)
            self.unix = Address(path=str(path))
            self._sockets.append(self.unix.listen())
        self.place = place.told(
            address=str(self.unix or self.address), token=_token(host.folder), **_certificate(host.folder, listen)
        )
        self._describe()
        self._starts = 0
        self._due = time.monotonic()
        self._started = 0.0

    @property
    def public(self) -> Address:
        """The address by which other machines find it."""
        host = socket.gethostname() if self.address.host in {"0.0.0.0", "::"} else self.address.host
        return Address(host, self.address.port)

    @property
    def is_due(self) -> bool:
        """It should be started now."""
        return not self.is_running and time.monotonic() >= self._due

    def start(self) -> None:
        """Start the server, for the first time or again."""
        numbers = [one.fileno() for one in self._sockets]
        command = [sys.executable, "-m", "maniple.host.server", *map(str, numbers)]
        env = environment(self.place)
        pid = self.spawn(command, env=env, log=self._host.folder.log("server"), descriptors=numbers)
        self._starts += 1
        self._started = time.monotonic()
        self._host.events.write("server", pid=pid, start=self._starts)

    def restart(self) -> None:
        """Plan another start: at once, or after a pause if it does not live long."""
        lived_s = time.monotonic() - self._started
        self._due = time.monotonic() + (0.0 if lived_s > 1 else _LONGEST_PAUSE_S if lived_s < 0.2 else 0.2)

    def shut(self, timeout_s: float) -> None:
        """Let the server tell the workers that the run has ended; then end it."""
        if self.is_running:
            self.signal(signal.SIGTERM)
            if not self.has_ended(timeout_s):
                self.signal(signal.SIGKILL)
            self.collect()
        for one in self._sockets:
            one.close()
        if self.unix is not None:
            Path(str(self.unix.path)).unlink(missing_ok=True)

    def _describe(self) -> None:
        write_json(
            self._host.folder.path / "host.json",
            {
                "host": self.address.host,
                "port": self.address.port,
                "address": str(self.public),
                "unix": str(self.unix) if self.unix else None,
                "certificate": str(self.place.certificate) if self.place.certificate else None,
                "key": str(self.place.key) if self.place.key else None,
                "lineage": self._host.lineage,
                "node": socket.gethostname(),
                "pid": os.getpid(),
            },
        )


def _known(folder: Folder) -> dict[str, Any]:
    path = folder.path / "host.json"
    return msgspec.json.decode(path.read_bytes()) if path.exists() else {}


def _token(folder: Folder) -> str:
    """The run's token: that of its folder, or a fresh one, in a file that only its owner can read."""
    path = folder.path / "token"
    if path.exists():
        return path.read_text().strip()
    token = fresh_token()
    beside = path.with_name(f".token.{os.getpid()}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    beside.rename(path)
    return token


def _certificate(folder: Folder, listen: Listen) -> dict[str, Path]:
    """Certificate and key: those given, else of the run folder, made if need be; none without TLS."""
    certificate, key = folder.path / "certificate.pem", folder.path / "key.pem"
    if listen.certificate is not None and listen.key is not None:
        certificate, key = listen.certificate.resolve(), listen.key.resolve()
    elif (given := _known(folder)).get("key") and Path(given["key"]).exists():
        certificate, key = Path(given["certificate"]), Path(given["key"])
    elif not listen.tls and not key.exists():
        return {}
    elif not key.exists():
        make_certificate(certificate, key)
    host_context(certificate, key)  # tells now what is wrong with them
    return {"certificate": certificate, "key": key}
