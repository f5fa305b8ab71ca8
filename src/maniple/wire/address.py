"""Where a host listens: `10.0.0.7:29400`, `[::1]:29400`, `node-07:29400`, or a socket file `unix:/path`."""

import socket
from dataclasses import dataclass

from maniple.errors import InvalidArgument

_UNIX = "unix:"


@dataclass(frozen=True)
class Address:
    """A TCP address, or the path of a Unix-domain socket."""

    host: str = "127.0.0.1"
    port: int = 0
    path: str | None = None

    @classmethod
    def parse(cls, text: str, *, default_port: int | None = None) -> "Address":
        """Read an address; without `default_port` the port must be there."""
        if text.startswith(_UNIX):
            return cls(path=text.removeprefix(_UNIX))
        host, colon, port = text.rpartition(":")
        if default_port is not None and (not colon or (host.count(":") and not host.endswith("]"))):
            host, port = text, str(default_port)  # a name, or a bare IPv6 address
        if text.isdigit():
            raise InvalidArgument(
                f"{text!r} is no address but a port. Write 127.0.0.1:{text} for this machine alone, or "
                f"0.0.0.0:{text} for all that reach it."
            )
        if not host or not port.isdigit() or not int(port) <= 65535:
            raise InvalidArgument(
                f"{text!r} is no address. Write HOST:PORT with a port up to 65535, for instance 10.0.0.7:29400, "
                "or unix:PATH."
            )
        return cls(host=host.strip("[]"), port=int(port))

    @property
    def is_everywhere(self) -> bool:
        """It stands for all addresses of a machine: others are told the machine's name instead."""
        return self.path is None and self.host in {"0.0.0.0", "::"}

    def connect(self, timeout_s: float) -> socket.socket:
        """A connected socket, or OSError within `timeout_s`."""
        if self.path is None:
            return socket.create_connection((self.host, self.port), timeout_s)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(timeout_s)
            link.connect(self.path)
        except BaseException:
            link.close()
            raise
        return link

    def listen(self, backlog: int = 1024) -> socket.socket:
        """A listening socket."""
        if self.path is not None:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.bind(self.path)
            link.listen(backlog)
            return link
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        return socket.create_server((self.host, self.port), family=family, backlog=backlog)

    def __str__(self) -> str:
        if self.path is not None:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
