"""What a host posts in its run folder: where it listens, for those who see the folder. The file is `host.json`."""

import os
from pathlib import Path

import msgspec

from maniple.wire.address import Address

FILE = "host.json"


class Posted(msgspec.Struct):
    """One host, as its run folder tells."""

    host: str  # what it listens on
    port: int
    address: str  # by which other machines find it
    unix: str | None
    certificate: str | None
    key: str | None
    lineage: str
    node: str
    pid: int
    segment: str = ""  # its shared memory

    @classmethod
    def read(cls, path: Path) -> "Posted | None":
        """What stands in the file; None if it cannot be read, or something else stands there."""
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                return msgspec.json.decode(file.read(), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    @property
    def is_here(self) -> bool:
        """The host is, or was, on this machine."""
        return self.node == os.uname().nodename

    @property
    def nearest(self) -> Address:
        """The address to use from here: the socket file on the host's own machine."""
        is_near = self.is_here and self.unix is not None and Path(self.unix[5:]).exists()
        return Address.parse(str(self.unix) if is_near else self.address)
