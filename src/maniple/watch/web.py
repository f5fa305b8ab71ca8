"""The web page of a run, served until somebody ends it. Needs the extra `watch`."""

import signal
import socket
import sys
import webbrowser
from contextlib import suppress
from typing import Any

from maniple.launch.page import listen, page_address
from maniple.watch.subject import Subject
from maniple.wire.address import Address

_FAREWELL_S = 3  # for the last news to arrive


def show(subject: Subject, where: str, *, may_steer: bool, opens: bool) -> None:
    """Serve the page at ADDRESS for a person at a terminal, who is told where, until Ctrl-C."""
    with listen(Address.parse(where, default_port=0)) as door:  # refuses if the extra is not installed
        from maniple.watch.access import Access

        access = Access.of(door)
        address = page_address(door, access.token)
        print(f"{subject.name} is shown at\n    {address}\nuntil Ctrl-C.", flush=True)
        if opens:
            webbrowser.open(address)
        serve(subject, door, token=access.token, may_steer=may_steer)


def serve(subject: Subject, door: socket.socket, *, token: str, may_steer: bool = True) -> None:
    """Serve the page on a listening socket until SIGINT or SIGTERM; viewers are told the last news."""
    import uvicorn

    from maniple.watch.access import Access
    from maniple.watch.scene import Scene
    from maniple.watch.site import make_site

    site = make_site(Scene(subject), Access.of(door, token), may_steer=may_steer, is_ending=lambda: server.should_exit)
    options: dict[str, Any] = {"loop": "asyncio", "http": "h11", "ws": "none", "lifespan": "off"}
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(site, timeout_graceful_shutdown=_FAREWELL_S, **options, **quiet))
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with suppress(KeyboardInterrupt, SystemExit):
            server.run(sockets=[door])
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(*_: Any) -> None:
    """After SIGTERM, which uvicorn raises again when it has ended: in order, as after Ctrl-C."""
    sys.exit(0)
