"""Access control of the page: a token, and protection from pages of other sites.

The token is part of the address that is opened first, and is exchanged for a cookie so that it leaves the address bar.
A page of another site cannot read (SameSite cookie), cannot send commands (they need the same origin and a header that
forms cannot send), and cannot reach the server under another host name (DNS rebinding: the Host header is checked).
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
    """The token of one page, and the host names under which it is served."""

    port: int
    names: frozenset[str]  # besides those of the loopback interface
    token: str = field(repr=False)
    is_open: bool = False  # to other machines

    @classmethod
    def of(cls, listener: socket.socket, token: str | None = None) -> "Access":
        """For a page on a listening socket; creates a token unless one is given."""
        host, port = listener.getsockname()[:2]
        is_open = not ipaddress.ip_address(host).is_loopback
        names = {os.uname().nodename.lower(), socket.getfqdn().lower()} if is_open else set[str]()
        return cls(port, frozenset(names), token or secrets.token_urlsafe(24), is_open)

    @property
    def cookie(self) -> str:
        """The cookie's name, with the port, since all ports of a machine share cookies."""
        return f"maniple-{self.port}"

    def refusal(self, request: HTTPConnection, method: str) -> str:
        """Why a request is refused; "" if it is allowed."""
        if not self._is_name(request.headers.get("host", "")):
            return "This page is not served under that name. Open the address that maniple has printed."
        if not self.knows(request):
            return (
                "The token is missing or wrong. Open the whole address that maniple has printed, with ?token=, or call "
                "maniple watch RUN --web for a new one."
            )
        if method not in {"GET", "HEAD"} and not _is_own(request):
            return "A command must come from the page itself. Open the page and use its buttons."
        return ""

    def knows(self, request: HTTPConnection) -> bool:
        """True if it has the token: in the address, in a cookie or as `Authorization: Bearer`."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = (
            request.query_params.get("token"),
            request.cookies.get(self.cookie),
            bearer if scheme.lower() == "bearer" else None,
        )
        return any(one and hmac.compare_digest(one.encode(), self.token.encode()) for one in given)

    def _is_name(self, host: str) -> bool:
        """True for names of this machine. Numeric addresses cannot be pointed at it by another site."""
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
    """ASGI middleware that refuses requests without the token, and sets the cookie for those with it."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
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
    """True if it comes from a page of this site: same origin, and a header that forms of other sites cannot send."""
    origin = request.headers.get("origin")
    same = origin is None or origin.partition("://")[2] == request.headers.get("host")
    return same and request.headers.get("x-maniple") == "1"
