"""A host's server on threads of the test's own process, and doors to it."""

import contextlib
import socket
import threading
from pathlib import Path

from maniple.center import Segment
from maniple.connection.link import Endpoint
from maniple.controller import Controller
from maniple.environment import Environment
from maniple.host.server import Server
from maniple.wire.address import Address

TOKEN = "token of a test"


class Serving:
    """A segment in `root` and a server for it, on loopback."""

    def __init__(self, root: Path, *, unix: bool = False, world: int = 0, **environment) -> None:
        self.run = root / "run"
        for part in ("events", "center", "logs"):
            (self.run / part).mkdir(parents=True)
        self.segment = Segment.create(root, "0123456789abcdef", self.run)
        address = Address(path=str(root / "socket")) if unix else Address()
        self._listener = address.listen()
        self.address = address if unix else Address(port=self._listener.getsockname()[1])
        place = Environment(segment=self.segment.path, run=self.run, world=world, token=TOKEN, **environment)
        self.server = Server(place, Controller())
        self._thread = threading.Thread(target=self.server.run, args=([self._listener],), daemon=True)
        self._thread.start()

    def door(self, token: str = TOKEN, **rest) -> Endpoint:
        """A door for one more worker."""
        return Endpoint(self.address, token, **rest)

    def close(self) -> None:
        self.server.end()
        self._thread.join(5)
        with contextlib.suppress(
            OSError
        ):  # wakes the thread that waits in accept(), which keeps the server's files open
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.segment.remove()
