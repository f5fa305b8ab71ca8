"""The page of a run: its web server, and the state that all viewers share."""

import asyncio
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from maniple.clock import clock
from maniple.connection.find_host import HostStatus
from maniple.errors import InvalidArgument, ManipleError
from maniple.launch.services import page_address
from maniple.monitor import RunState
from maniple.user_class import parse_arguments
from maniple.watch.access import Access, Guard
from maniple.watch.prometheus import metrics_text
from maniple.watch.report import plotly_js
from maniple.watch.updates import SCHEMA, Updates
from maniple.watch.watched_run import WatchedRun

PAGE = Path(__file__).with_name("page")
_UPDATE_EVERY_S = 1.5
_READ_EVERY_S = 1.2  # a little less, so that each update has new rows
_READ_AT_ONCE_S = 1.0  # of a long record; viewers see the rest in the next updates
_FIND_HOST_EVERY_S = 5.0
_CHECK_END_S = 0.25  # how soon viewers are let go when the server ends
_MAX_COMMAND_BYTES = 1 << 14
_LAST_UPDATE_S = 3  # time for the last update to arrive


def show(run: WatchedRun, listener: socket.socket, *, may_steer: bool, opens: bool) -> None:
    """Serve the page on a listening socket for a person at a terminal until Ctrl-C, and print its address."""
    access = Access.of(listener)
    address = page_address(listener, access.token)
    print(f"{run.name} is shown at\n    {address}\nuntil Ctrl-C.", flush=True)
    if opens:
        webbrowser.open(address)
    serve(run, listener, token=access.token, may_steer=may_steer)


def serve(run: WatchedRun, listener: socket.socket, *, token: str, may_steer: bool = True) -> None:
    """Serve the page on a listening socket until SIGINT or SIGTERM; viewers get a last update."""
    import uvicorn

    site = make_site(
        LiveView(run), Access.of(listener, token), may_steer=may_steer, is_ending=lambda: server.should_exit
    )
    options: dict[str, Any] = {"loop": "asyncio", "http": "h11", "ws": "none", "lifespan": "off"}
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(site, timeout_graceful_shutdown=_LAST_UPDATE_S, **options, **quiet))
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        with suppress(KeyboardInterrupt, SystemExit):
            server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(*_: Any) -> None:
    """Exit on SIGTERM, which uvicorn raises again after its shutdown."""
    sys.exit(0)


class LiveView:
    """The state of a watched run, shared by all viewers, and what is known of its host.

    Attributes:
        is_complete: all rows up to now have been read.
        host: status of the host when `find_host` was last called.
        description: contents of run.json.
    """

    def __init__(self, run: WatchedRun) -> None:
        self.run = run
        self.is_complete = False
        self.host = HostStatus("has not been looked for yet", is_alive=True)
        self.description: dict[str, Any] = {}
        self._described_at = 0  # modification time of run.json
        self._state = self._new_state()
        self._lock = threading.Lock()
        self._next_read = self._next_find = self._found_at = 0.0

    @contextmanager
    def state(self, *, is_last: bool = False) -> Generator[RunState]:
        """The state as of about a second ago; for the last update, as of now. Holds a lock: be brief."""
        with self._lock:
            if is_last or clock.monotonic() >= self._next_read:
                self._refresh()
                self._next_read = clock.monotonic() + _READ_EVERY_S * self.is_complete
            yield self._state

    @property
    def is_host_due(self) -> bool:
        """True when it is time to call `find_host`, also after the end of a run: it may be resumed."""
        return clock.monotonic() >= self._next_find

    def find_host(self) -> None:
        """Find out whether the host is alive. This may take seconds, so it does not hold the state's lock."""
        self._next_find, asked_at = clock.monotonic() + _FIND_HOST_EVERY_S, clock.time()
        try:
            self.host = self.run.find_host()
            self._found_at = asked_at
        except (ManipleError, OSError, ValueError) as error:  # the folder is being written, or is gone
            self.host = HostStatus(str(error))

    def _new_state(self) -> RunState:
        description = self.run.folder.read()
        asked = description.get("asked") or {}
        state = RunState(self.run.folder, workers=int(asked.get("workers") or 0))
        state.describe(description)
        return state

    def _refresh(self) -> None:
        try:
            self.run.refresh()
        except ManipleError as error:
            self.host = HostStatus(str(error))
        self.is_complete = self._state.refresh(_READ_AT_ONCE_S)
        if self.is_complete and self.host.is_dead:
            self._state.mark_host_dead(self._found_at)
        with suppress(OSError, ValueError):  # run.json does not exist yet
            written = (self.run.folder.path / "run.json").stat().st_mtime_ns
            if written != self._described_at:
                before, self.description, self._described_at = self.description, self.run.folder.read(), written
                if before and before.get("lineage") != self.description.get("lineage"):
                    self._state = self._new_state()  # another run has started at this address
                else:
                    self._state.describe(self.description)  # perhaps it was resumed with another target


def make_site(view: LiveView, access: Access, *, may_steer: bool, is_ending: Callable[[], bool]) -> Starlette:
    """The site of one run; when it `is_ending`, viewers get a last update and are let go."""
    site = _Site(view, may_steer=may_steer, is_ending=is_ending)
    return Starlette(
        routes=[
            Route("/", _page),
            Route("/plotly.js", _plotly),
            Route("/updates", site.updates),
            Route("/metrics", site.metrics),
            Route("/commands", site.command, methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        middleware=[Middleware(Guard, access=access)],
    )


async def _page(request: Request) -> Response:
    # Not a redirect that drops the token: the new cookie would not be sent along after a link from another site.
    del request
    return FileResponse(PAGE / "page.html", headers={"Cache-Control": "no-store"})


async def _plotly(request: Request) -> Response:
    del request
    try:
        path = plotly_js()
    except InvalidArgument as error:
        return PlainTextResponse(str(error), 404)
    return FileResponse(path, media_type="text/javascript", headers={"Cache-Control": "private, max-age=86400"})


class _Site:
    """Handlers of requests that need the state of the run."""

    def __init__(self, view: LiveView, *, may_steer: bool, is_ending: Callable[[], bool]) -> None:
        self._view, self._may_steer, self._is_ending = view, may_steer, is_ending
        self._finding_host: asyncio.Task[None] | None = None

    async def updates(self, request: Request) -> Response:
        """An update every one or two seconds, for as long as the viewer stays."""
        del request
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def metrics(self, request: Request) -> Response:
        """The run, for Prometheus."""
        del request

        def text() -> str:
            with self._view.state() as state:
                return metrics_text(state, self._view.run.name)

        return PlainTextResponse(await run_in_threadpool(text), media_type="text/plain; version=0.0.4")

    async def command(self, request: Request) -> Response:
        """Send a command to the host; its reply, or the reason of a refusal, is shown to the person."""
        if int(request.headers.get("content-length") or _MAX_COMMAND_BYTES) >= _MAX_COMMAND_BYTES:
            return PlainTextResponse("a command is shorter", 413)
        try:
            command = msgspec.json.decode(await request.body(), type=dict[str, Any])
        except msgspec.MsgspecError:
            return PlainTextResponse("a command is JSON", 400)
        try:
            return JSONResponse({"done": True, "text": await run_in_threadpool(partial(self._send, command))})
        except ManipleError as error:
            return JSONResponse({"done": False, "text": str(error)})

    def _send(self, command: dict[str, Any]) -> str:
        if not self._may_steer:
            raise InvalidArgument("this page was opened with --read-only and takes no commands. Open one without it.")
        steering = self._view.run.steering()
        if command.get("command") == "stop":
            return steering.stop()
        if command.get("command") == "snapshot":
            return f"saved: {steering.snapshot()}"
        settings: dict[str, Any] = command.get("settings") or {}
        return steering.change(
            parse_arguments([f"{name}={value}" for name, value in settings.items()], "maniple change")
        )

    async def _stream(self) -> AsyncIterator[bytes]:
        updates = Updates()
        while True:
            is_last = self._is_ending()
            if self._view.is_host_due and (self._finding_host is None or self._finding_host.done()):
                self._finding_host = asyncio.create_task(run_in_threadpool(self._view.find_host))
            yield b"data: " + await run_in_threadpool(self._next, updates, is_last) + b"\n\n"
            if is_last:
                return
            # Without a pause while there is more of the record to read.
            for _ in range(round(_UPDATE_EVERY_S / _CHECK_END_S) if self._view.is_complete else 0):
                await asyncio.sleep(_CHECK_END_S)
                if self._is_ending():
                    break

    def _next(self, updates: Updates, is_last: bool) -> bytes:
        view = self._view
        with view.state(is_last=is_last) as state:
            extra = {
                "name": view.run.name,
                "folder": str(view.run.folder.path),
                "described": view.description,
                "host": {"words": view.host.description, "is_alive": view.host.is_alive},
                "schema": SCHEMA,
                "may_steer": self._may_steer,
                "is_complete": view.is_complete,
            }
            return updates.next(state, extra)
