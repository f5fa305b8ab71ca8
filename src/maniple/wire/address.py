"""Addresses of hosts: `10.0.0.7:29400`, `[::1]:29400`, `node-07:29400`, or `unix:/path` for a Unix-domain socket.

A host publishes its addresses in `host.json` of its run folder (`HostFile`).
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

from maniple.errors import InvalidArgument

HOST_FILE = "host.json"
_UNIX = "unix:"


@dataclass(frozen=True)
class Address:
    """A TCP address, or the path of a Unix-domain socket."""

    host: str = "127.0.0.1"
    port: int = 0
    path: str | None = None

    @classmethod
    def parse(cls, text: str, *, default_port: int | None = None) -> "Address":
        """Parse an address. The port is required unless there is a `default_port`."""
        if text.startswith(_UNIX):
            return cls(path=text.removeprefix(_UNIX))
        host, colon, port = text.rpartition(":")
        if default_port is not None and (not colon or (host.count(":") and not host.endswith("]"))):
            host, port = text, str(default_port)  # a name, or a bare IPv6 address
        if text.isdigit():
            raise InvalidArgument(
                f"{text!r} is a port without a host. Write 127.0.0.1:{text} to listen to this machine alone, or "
                f"0.0.0.0:{text} to listen to all machines."
            )
        if not host or not port.isdigit() or not int(port) <= 65535:
            raise InvalidArgument(
                f"{text!r} is not an address. Write HOST:PORT with a port up to 65535, for instance 10.0.0.7:29400, "
                "or unix:PATH."
            )
        return cls(host=host.strip("[]"), port=int(port))

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all addresses of a machine. Other machines are then given its name instead."""
        return self.path is None and self.host in {"0.0.0.0", "::"}

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can connect to it."""
        return self.path is not None or self.host in {"localhost", "::1"} or self.host.startswith("127.")

    def connect(self, timeout_s: float) -> socket.socket:
        """Return a connected socket, or raise OSError within `timeout_s`."""
        if self.path is None:
            return socket.create_connection((self.host, self.port), timeout_s)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(self.path)
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self, backlog: int = 1024) -> socket.socket:
        """Return a listening socket."""
        if self.path is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(self.path)
            listener.listen(backlog)
            return listener
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        return socket.create_server((self.host, self.port), family=family, backlog=backlog)

    def __str__(self) -> str:
        if self.path is not None:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HostFile(msgspec.Struct):
    """The contents of host.json: how to reach the host of a run."""

    host: str  # the address that it listens on
    port: int
    address: str  # HOST:PORT for other machines
    unix: str | None
    certificate: str | None
    key: str | None
    lineage: str
    node: str
    pid: int
    segment: str = ""  # the folder of its shared memory

    @classmethod
    def read(cls, path: Path) -> "HostFile | None":
        """Read the file; None if it is missing or not a host file. A symbolic link is not followed."""
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                return msgspec.json.decode(file.read(), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether the host is, or was, on this machine."""
        return self.node == os.uname().nodename

    @property
    def nearest(self) -> Address:
        """The best address from here: the Unix-domain socket on the host's own machine, else the TCP address."""
        is_near = self.is_here and self.unix is not None and Path(self.unix[5:]).exists()
        return Address.parse(str(self.unix) if is_near else self.address)

    def answers(self, timeout_s: float) -> bool:
        """Whether something accepts connections at the nearest address."""
        try:
            self.nearest.connect(timeout_s).close()
        except OSError:
            return False
        return True
