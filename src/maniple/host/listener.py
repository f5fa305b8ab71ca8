"""The listening sockets of a host, its token and its certificate. They stay open while the server is restarted.

During a restart, new connections wait in the sockets' backlog. With --listen, address and token are written to the run
folder, from which a successor takes them. Otherwise the host has only a Unix socket in its segment, for workers of this
machine and for its owner's watchers; address and token are beside it, where no other user can read them.
"""

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from maniple.environment import Environment
from maniple.errors import InvalidArgument
from maniple.host.host import Host
from maniple.host.server import OVER_FILE
from maniple.memory.shm import read_owned
from maniple.record import RunFolder
from maniple.record.folder import write_json, write_whole
from maniple.wire.address import HOST_FILE, Address, HostFile
from maniple.wire.auth import new_token
from maniple.wire.tls import host_context, make_certificate

_MAX_PATH = 100  # of a Unix socket; the kernel's limit is 107


@dataclass(frozen=True)
class Listen:
    """Options about listening."""

    address: Address = field(default_factory=Address)
    tls: bool = False
    certificate: Path | None = None
    key: Path | None = None

    def check(self) -> None:
        """Raise InvalidArgument for options that cannot be combined."""
        if self.address.path is not None:
            raise InvalidArgument(
                f"--listen {self.address} is not an address for other machines. Give HOST:PORT; workers of this "
                "machine find a socket in the run folder by themselves."
            )
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument("--certificate and --key belong together, and one is missing. Give both or none.")


class Listener:
    """The listening sockets of one host.

    Attributes:
        address: for other machines; None without --listen.
        unix: the Unix socket for this machine; None if its path is too long.
        sockets: the listening sockets.
        environment: the given one, with address, token and certificate for workers and the server.
    """

    def __init__(self, host: Host, listen: Listen | None, environment: Environment) -> None:
        self._host = host
        (host.segment.path / OVER_FILE).unlink(missing_ok=True)  # of a run that is resumed
        self.address: Address | None = None
        self.sockets: list[socket.socket] = []
        home = host.folder.path if listen else host.segment.path
        self.unix = self._open_unix(home)
        if listen is not None:
            tcp = self.address = self._open_tcp(listen.address, HostFile.read(host.folder.path / HOST_FILE))
            environment = environment.replace(**_find_certificate(host.folder, listen))
            (host.segment.path / HOST_FILE).unlink(missing_ok=True)  # of a predecessor without --listen
        else:
            tcp = Address() if self.unix else self._open_tcp(Address(), None)
        self.environment = environment.replace(address=str(self.unix or tcp), token=_token(home))
        self._describe(home, tcp)

    @property
    def public(self) -> Address:
        """The address under which other machines reach it."""
        assert self.address is not None
        host = socket.gethostname() if self.address.is_wildcard else self.address.host
        return Address(host, self.address.port)

    def close(self) -> None:
        """Close the sockets."""
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

    def _open_tcp(self, address: Address, known: HostFile | None) -> Address:
        if address.port == 0 and known is not None:  # reuse the predecessor's port, so that workers reconnect there
            # On another machine the port may be in use; workers find the new one in the run folder.
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
        posted = HostFile(
            host=tcp.host,
            port=tcp.port,
            address=str(self.public if self.address else tcp),
            unix=str(self.unix) if self.unix else None,
            certificate=str(self.environment.certificate) if self.environment.certificate else None,
            key=str(self.environment.key) if self.environment.key else None,
            lineage=self._host.lineage,
            node=socket.gethostname(),
            pid=os.getpid(),
            segment=str(self._host.segment.path),
        )
        write_json(home / HOST_FILE, msgspec.to_builtins(posted))


def _token(home: Path) -> str:
    """The run's token: read from its file, which only the owner can read, or a new one."""
    path = home / "token"
    if path.exists() or path.is_symlink():
        if token := read_owned(path).decode().strip():
            return token
        raise InvalidArgument(
            f"{path} is empty, and no worker can join without a token. Remove the file: a new token is made, which "
            "workers elsewhere need then."
        )
    token = new_token()
    write_whole(path, f"{token}\n".encode(), mode=0o600)
    return token


def _find_certificate(folder: RunFolder, listen: Listen) -> dict[str, Path]:
    """Certificate and key: the given ones, else those of the run folder, created if needed; {} without TLS."""
    certificate, key = folder.path / "certificate.pem", folder.path / "key.pem"
    if listen.certificate is not None and listen.key is not None:
        certificate, key = listen.certificate.resolve(), listen.key.resolve()
    elif (
        (given := HostFile.read(folder.path / HOST_FILE)) is not None
        and given.certificate
        and given.key
        and Path(given.key).exists()
    ):
        certificate, key = Path(given.certificate), Path(given.key)
    elif not listen.tls and not key.exists():
        return {}
    elif not key.exists():
        make_certificate(certificate, key)
    host_context(certificate, key)  # raises now if they cannot be used
    return {"certificate": certificate, "key": key}
