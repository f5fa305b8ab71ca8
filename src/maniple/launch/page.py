"""The page of a run (`--web`): served by a process of its own, which may die without harm and ends with the run."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from types import TracebackType

from maniple.errors import InvalidArgument
from maniple.launch.child import Child
from maniple.record import Folder
from maniple.wire.address import Address

_NEEDED = ("starlette", "uvicorn", "plotly")
_TICK_S = 0.2
_GRACE_S = 4.0  # for viewers to be told of the end
_PAUSE_S = 2.0  # before it is started again


class Page:
    """Serves the page of the run in `folder` for the length of a `with` block; nothing if `where` is None.

    Attributes:
        news: what a person is to be told of it.
    """

    def __init__(self, where: Address | None, folder: Folder) -> None:
        self._folder = folder
        self._door = None if where is None else listen(where)
        self._token = secrets.token_urlsafe(24)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="maniple-page", daemon=True)
        self.news = [] if self._door is None else [f"page: {page_address(self._door, self._token)}"]

    def __enter__(self) -> "Page":
        if self._door is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._door is not None:
            self._end.set()
            self._thread.join()
            self._door.close()

    def _look_after(self) -> None:
        """Start it, and again when it has died: the socket stays, so that browsers find it again."""
        while not self._end.is_set():
            child = self._start()
            while not child.has_ended(_TICK_S) and not self._end.is_set():
                pass
            if self._end.is_set():
                child.signal(signal.SIGTERM)
                if not child.has_ended(_GRACE_S):
                    child.signal(signal.SIGKILL)
            child.collect()
            self._end.wait(_PAUSE_S)

    def _start(self) -> Child:
        assert self._door is not None
        number = self._door.fileno()
        command = [sys.executable, "-m", "maniple.watch", str(number), str(self._folder.path)]
        child = Child()
        child.spawn(command, env={}, log=self._folder.log("page"), descriptors=[number], stdin=subprocess.PIPE)
        child.write(f"{self._token}\n".encode())  # others see the words of a command, and not its input
        return child


def _check_extra() -> None:
    """Raise InvalidArgument if what the page is made with is not installed."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise InvalidArgument(
            f"--web needs {', '.join(missing)}, which this Python does not have. pip install 'maniple[watch]', or "
            "leave --web out."
        )


def listen(address: Address) -> socket.socket:
    """Where a page is to be served; InvalidArgument if that is not possible here."""
    _check_extra()
    try:
        return address.listen()
    except OSError as error:
        raise InvalidArgument(
            f"no page can be served on {address}: {error.strerror}. Choose another address; port 0 is a free one."
        ) from error


def page_address(door: socket.socket, token: str) -> str:
    """What a person opens, for a page that is served on a listening socket."""
    host, port = door.getsockname()[:2]
    shown = os.uname().nodename if host in {"0.0.0.0", "::"} else host
    return f"http://{Address(shown, port)}/?token={token}"
