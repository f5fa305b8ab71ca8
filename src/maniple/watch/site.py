"""The site: the page of a run, its news as server-sent events, orders, and the metrics."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib.util import find_spec
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

from maniple.errors import InvalidArgument
from maniple.spec import arguments
from maniple.watch.access import Access, Guard
from maniple.watch.metrics import metrics_text
from maniple.watch.news import COLUMNS, News
from maniple.watch.scene import Scene
from maniple.watch.subject import told

PAGE = Path(__file__).with_name("page")
_EVERY_S = 1.5
_GLANCE_S = 0.25  # how soon viewers are let go when the page ends
_MOST_BYTES = 1 << 14  # of an order


def make_site(scene: Scene, access: Access, *, may_steer: bool, is_ending: Callable[[], bool]) -> Starlette:
    """The site of one run; when it `is_ending`, viewers are told the last news and let go."""
    site = _Site(scene, may_steer=may_steer, is_ending=is_ending)
    return Starlette(
        routes=[
            Route("/", _page),
            Route("/plotly.js", _plotly),
            Route("/news", site.news),
            Route("/metrics", site.metrics),
            Route("/orders", site.order, methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        middleware=[Middleware(Guard, access=access)],
    )


async def _page(request: Request) -> Response:
    # Not a redirect away from the token: after a link of another site the new cookie would not come along with it.
    del request
    return FileResponse(PAGE / "page.html", headers={"Cache-Control": "no-store"})


async def _plotly(request: Request) -> Response:
    del request
    found = find_spec("plotly")  # without importing it, which takes long
    if found is None or found.origin is None:
        return PlainTextResponse("plotly is not installed", 404)
    path = Path(found.origin).parent / "package_data" / "plotly.min.js"
    return FileResponse(path, media_type="text/javascript", headers={"Cache-Control": "private, max-age=86400"})


class _Site:
    """What is answered from the scene."""

    def __init__(self, scene: Scene, *, may_steer: bool, is_ending: Callable[[], bool]) -> None:
        self._scene, self._may_steer, self._is_ending = scene, may_steer, is_ending
        self._look: asyncio.Task[None] | None = None

    async def news(self, request: Request) -> Response:
        """News every one or two seconds, for as long as the viewer stays."""
        del request
        return StreamingResponse(self._tell(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def metrics(self, request: Request) -> Response:
        """The run, for Prometheus."""
        del request

        def text() -> str:
            with self._scene.story() as story:
                return metrics_text(story, self._scene.subject.name)

        return PlainTextResponse(await run_in_threadpool(text), media_type="text/plain; version=0.0.4")

    async def order(self, request: Request) -> Response:
        """An order to the host; what it says, or why it was refused, is for the person."""
        if int(request.headers.get("content-length") or _MOST_BYTES) >= _MOST_BYTES:
            return PlainTextResponse("an order is shorter", 413)
        try:
            order = msgspec.json.decode(await request.body(), type=dict[str, Any])
        except msgspec.MsgspecError:
            return PlainTextResponse("an order is JSON", 400)
        is_done, text = await run_in_threadpool(told, partial(self._follow, order))
        return JSONResponse({"done": is_done, "text": text})

    def _follow(self, order: dict[str, Any]) -> str:
        if not self._may_steer:
            raise InvalidArgument("this page was opened with --read-only, and takes no orders. Open one without it.")
        steering = self._scene.subject.steering()
        if order.get("order") == "stop":
            return steering.stop()
        if order.get("order") == "snapshot":
            return f"saved: {steering.snapshot()}"
        settings: dict[str, Any] = order.get("settings") or {}
        return steering.change(arguments([f"{name}={value}" for name, value in settings.items()], "maniple change"))

    async def _tell(self) -> AsyncIterator[bytes]:
        news = News()
        while True:
            is_last = self._is_ending()
            if self._scene.is_host_due and (self._look is None or self._look.done()):
                self._look = asyncio.create_task(run_in_threadpool(self._scene.look_for_host))
            yield b"data: " + await run_in_threadpool(self._news, news, is_last) + b"\n\n"
            if is_last:
                return
            # Who has more to read goes on.
            for _ in range(round(_EVERY_S / _GLANCE_S) if self._scene.is_whole else 0):
                await asyncio.sleep(_GLANCE_S)
                if self._is_ending():
                    break

    def _news(self, news: News, is_last: bool) -> bytes:
        scene = self._scene
        with scene.story(is_last=is_last) as story:
            about = {
                "name": scene.subject.name,
                "folder": str(scene.subject.folder.path),
                "described": scene.described,
                "host": {"words": scene.host.words, "is_alive": scene.host.is_alive},
                "columns": COLUMNS,
                "may_steer": self._may_steer,
                "is_whole": scene.is_whole,
            }
            return news.tell(story, about)
