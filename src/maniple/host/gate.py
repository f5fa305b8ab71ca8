"""The gate: where a host listens, and the token that opens. Who holds it keeps the sockets while the server changes.

A worker that comes while the server is being started again waits in the sockets' queue. Address and token of a host
that listens to other machines are written to the run folder, from which a successor takes them. A host that does not
listen to others has a socket in its segment, for the workers of this machine and for its owner, who may watch it:
address and token lie beside it, where nobody else can read.
"""

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from maniple.center.locks import read_own
from maniple.errors import InvalidArgument
from maniple.host.host import Host
from maniple.host.server import unsay_over
from maniple.place import Place
from maniple.record import Folder
from maniple.record.folder import write_json, write_whole
from maniple.wire.address import Address
from maniple.wire.posted import FILE, Posted
from maniple.wire.proof import fresh_token
from maniple.wire.tls import host_context, make_certificate

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


class Gate:
    """The listening sockets of one host.

    Attributes:
        address: for other machines; None if they cannot reach it.
        unix: the socket of this machine, if its path is not too long.
        sockets: the listening sockets.
        place: `place`, with what workers and the server need to find each other.
    """

    def __init__(self, host: Host, listen: Listen | None, place: Place) -> None:
        self._host = host
        unsay_over(host.segment.path)
        self.address: Address | None = None
        self.sockets: list[socket.socket] = []
        home = host.folder.path if listen else host.segment.path
        self.unix = self._open_unix(home)
        if listen is not None:
            tcp = self.address = self._open_tcp(listen.address, _known(host.folder))
            place = place.told(**_certificate(host.folder, listen))
            (host.segment.path / FILE).unlink(missing_ok=True)  # of one before it that did not listen
        else:
            tcp = Address() if self.unix else self._open_tcp(Address(), None)
        self.place = place.told(address=str(self.unix or tcp), token=_token(home))
        self._describe(home, tcp)

    @property
    def public(self) -> Address:
        """The address by which other machines find it."""
        assert self.address is not None
        host = socket.gethostname() if self.address.is_everywhere else self.address.host
        return Address(host, self.address.port)

    def close(self) -> None:
        """Listen no more."""
        for one in self.sockets:
            one.close()
        if self.unix is not None:
            Path(str(self.unix.path)).unlink(missing_ok=True)

    def _open_unix(self, folder: Path) -> Address | None:
        path = folder / "host.sock"
        if len(str(path)) > _MAX_PATH:
            return None
        path.unlink(missing_ok=True)
        address = Address(path=str(path))
        self.sockets.append(address.listen())
        return address

    def _open_tcp(self, address: Address, known: Posted | None) -> Address:
        if address.port == 0 and known is not None:  # a successor is found where its predecessor was
            # On another machine that port may be somebody else's; workers find the new one in the run folder.
            port = known.port if known.is_here else 0
            address = Address(known.host if address == Address() and known.is_here else address.host, port)
        try:
            self.sockets.append(address.listen())
        except OSError as error:
            self.close()
            raise InvalidArgument(
                f"cannot listen on {address}: {error.strerror or error}. Choose another address or port with --listen."
            ) from None
        return Address(address.host, self.sockets[-1].getsockname()[1])

    def _describe(self, home: Path, tcp: Address) -> None:
        posted = Posted(
            host=tcp.host,
            port=tcp.port,
            address=str(self.public if self.address else tcp),
            unix=str(self.unix) if self.unix else None,
            certificate=str(self.place.certificate) if self.place.certificate else None,
            key=str(self.place.key) if self.place.key else None,
            lineage=self._host.lineage,
            node=socket.gethostname(),
            pid=os.getpid(),
            segment=str(self._host.segment.path),
        )
        write_json(home / FILE, msgspec.to_builtins(posted))


def _known(folder: Folder) -> Posted | None:
    return Posted.read(folder.path / FILE)


def _token(home: Path) -> str:
    """The run's token: the one that is there, or a fresh one, in a file that only its owner can read."""
    path = home / "token"
    if path.exists() or path.is_symlink():
        if token := read_own(path).decode().strip():
            return token
        raise InvalidArgument(
            f"{path} is empty, and without a token no worker is let in. Remove it: a new one is made, which workers "
            "elsewhere need then."
        )
    token = fresh_token()
    write_whole(path, f"{token}\n".encode(), mode=0o600)
    return token


def _certificate(folder: Folder, listen: Listen) -> dict[str, Path]:
    """Certificate and key: those given, else of the run folder, made if need be; none without TLS."""
    certificate, key = folder.path / "certificate.pem", folder.path / "key.pem"
    if listen.certificate is not None and listen.key is not None:
        certificate, key = listen.certificate.resolve(), listen.key.resolve()
    elif (given := _known(folder)) is not None and given.certificate and given.key and Path(given.key).exists():
        certificate, key = Path(given.certificate), Path(given.key)
    elif not listen.tls and not key.exists():
        return {}
    elif not key.exists():
        make_certificate(certificate, key)
    host_context(certificate, key)  # tells now what is wrong with them
    return {"certificate": certificate, "key": key}
