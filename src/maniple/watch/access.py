"""Access to the page: who knows the token may look, and nobody else's page may act in a viewer's name.

The token comes once with the address, and is exchanged for a cookie, so that it leaves the address bar. A page of
another site cannot read (the cookie is not sent along), cannot give orders (they need a header of ours and the same
origin), and cannot take a name of its own for this machine (the name asked for is checked).
"""

import hmac
import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass, field
from html import escape

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HERE = {"localhost", "127.0.0.1", "::1"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_REFUSED = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>maniple: not shown</title><style>:root{{color-scheme:light dark}}body{{font:16px/1.5 system-ui;max-width:34em;
margin:15vh auto;padding:0 1em}}</style><h1>Not shown</h1><p>{}</p></html>"""


@dataclass(frozen=True)
class Access:
    """The token of one page, and the names by which it may be asked for."""

    port: int
    names: frozenset[str]  # other than those of every machine for itself
    token: str = field(repr=False)
    is_open: bool = False  # to other machines, too

    @classmethod
    def of(cls, door: socket.socket, token: str | None = None) -> "Access":
        """For a page that is served on a listening socket; with a new token, if there is none yet."""
        host, port = door.getsockname()[:2]
        is_open = not ipaddress.ip_address(host).is_loopback
        names = {os.uname().nodename.lower(), socket.getfqdn().lower()} if is_open else set[str]()
        return cls(port, frozenset(names), token or secrets.token_urlsafe(24), is_open)

    @property
    def cookie(self) -> str:
        """Its name: cookies of one machine are shared by all its ports."""
        return f"maniple-{self.port}"

    def refusal(self, request: HTTPConnection, method: str) -> str:
        """Why a request is refused; "" if it is not."""
        if not self._is_name(request.headers.get("host", "")):
            return "This page is not served under that name. Open the address that maniple has printed."
        if not self.knows(request):
            return (
                "The token is missing or wrong. Open the whole address that maniple has printed, with ?token=, or call "
                "maniple watch RUN --web for a new one."
            )
        if method not in {"GET", "HEAD"} and not _is_own(request):
            return "An order must come from the page itself. Open the page, and use its buttons."
        return ""

    def knows(self, request: HTTPConnection) -> bool:
        """It brings the token: in the address, in a cookie or as `Authorization: Bearer`."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        brought = (
            request.query_params.get("token"),
            request.cookies.get(self.cookie),
            bearer if scheme.lower() == "bearer" else None,
        )
        return any(one and hmac.compare_digest(one.encode(), self.token.encode()) for one in brought)

    def _is_name(self, host: str) -> bool:
        """It is a name of this machine. Of addresses in digits nobody else can be the owner."""
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]").lower()
        if name in _HERE or name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.is_open


class Guard:
    """Stands before a site: refuses, or lets pass, and gives the cookie to who has come with the token."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        request = HTTPConnection(scope)
        refusal = self._access.refusal(request, scope["method"])

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if not refusal and "token" in request.query_params:
                    kept = f"{self._access.cookie}={self._access.token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("Set-Cookie", kept)
            await send(message)

        app = HTMLResponse(_REFUSED.format(escape(refusal)), 403) if refusal else self._app
        await app(scope, receive, send_guarded)


def _is_own(request: HTTPConnection) -> bool:
    """It comes from a page of this site, by a header that no form of another site can send."""
    origin = request.headers.get("origin")
    same = origin is None or origin.partition("://")[2] == request.headers.get("host")
    return same and request.headers.get("x-maniple") == "1"
