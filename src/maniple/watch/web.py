"""The web page of a run, served until somebody ends it. Needs the extra `watch`."""

import os
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from maniple.errors import InvalidArgument
from maniple.watch.subject import Subject
from maniple.wire.address import Address

_NEEDED = ("starlette", "uvicorn", "plotly")
_FAREWELL_S = 3  # for the last news to arrive


def check_extra() -> None:
    """Raise InvalidArgument if what the page is made with is not installed."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise InvalidArgument(
            f"the page needs {', '.join(missing)}, which this Python does not have. pip install 'maniple[watch]', or "
            "look at the run without --web."
        )


def listen(address: Address) -> socket.socket:
    """Where the page is to be served; InvalidArgument if that is not possible here."""
    try:
        return address.listen()
    except OSError as error:
        raise InvalidArgument(
            f"the page cannot be served on {address}: {error.strerror}. Choose another --listen; port 0 is a free one."
        ) from error


def serve(
    subject: Subject,
    door: socket.socket,
    *,
    token: str | None = None,
    may_steer: bool = True,
    tell: Callable[[str], Any] = lambda _: None,
) -> None:
    """Serve the page on a listening socket until SIGINT or SIGTERM; `tell` is given its address, with the token."""
    check_extra()
    import uvicorn

    from maniple.watch.access import Access
    from maniple.watch.scene import Scene
    from maniple.watch.site import make_site

    host, port = door.getsockname()[:2]
    access = Access(port, Address(host, port).is_loopback, **({} if token is None else {"token": token}))
    site = make_site(Scene(subject), access, may_steer=may_steer, is_ending=lambda: server.should_exit)
    options: dict[str, Any] = {"loop": "asyncio", "http": "h11", "ws": "none", "lifespan": "off"}
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(site, timeout_graceful_shutdown=_FAREWELL_S, **options, **quiet))
    tell(page_address(host, port, access.token))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it has ended
    try:
        with suppress(KeyboardInterrupt, SystemExit):
            server.run(sockets=[door])
    finally:
        signal.signal(signal.SIGTERM, before)


def page_address(host: str, port: int, token: str) -> str:
    """What a person opens."""
    shown = {"0.0.0.0": os.uname().nodename, "::": os.uname().nodename}.get(host, host)
    return f"http://{Address(shown, port)}/?token={token}"


def show(subject: Subject, where: str, *, may_steer: bool, opens: bool) -> None:
    """Serve the page at ADDRESS for a person at a terminal, who is told where, until Ctrl-C."""

    def tell(address: str) -> None:
        print(f"{subject.name} is shown at\n    {address}\nuntil Ctrl-C.", flush=True)
        if opens:
            webbrowser.open(address)

    check_extra()
    with listen(Address.parse(where, default_port=0)) as door:
        serve(subject, door, may_steer=may_steer, tell=tell)
