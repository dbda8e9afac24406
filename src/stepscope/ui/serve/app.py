"""The web application and its server: the pages of one served folder on a port of this
machine, behind the guard that decides who may ask.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import html
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from stepscope.errors import UsageError
from stepscope.ui.serve.live_routes import LiveAnswers
from stepscope.ui.serve.routes import RunPages
from stepscope.ui.serve.served_runs import ServedRuns

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


def make_app(served: ServedRuns, token: str, *, cookie: str = "stepscope") -> ASGIApp:
    """Closing the application closes `served`."""
    live = LiveAnswers(served.directory)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        served.keeper.start()
        try:
            yield
        finally:
            live.close()
            served.close()

    app = Starlette(
        routes=[*live.routes(), *RunPages(served).routes()],
        lifespan=lifespan,
        exception_handlers={404: _not_found, 500: _defect},
    )
    return Guard(app, token, cookie)


async def _not_found(_: Request, __: Exception) -> PlainTextResponse:
    return PlainTextResponse("not found\n", status_code=404)


async def _defect(_: Request, error: Exception) -> PlainTextResponse:
    words = f"a defect in stepscope: {type(error).__name__}: {error}\n"
    return PlainTextResponse(words, status_code=500)


# Who may ask: browsers and programs of this machine that know the token.
#
# - The Host must name this machine: a page of another site that makes its own name point here
#   (DNS rebinding) is refused.
# - The token comes once in the URL, or as `Authorization: Bearer`. A browser then holds a cookie
# that
#   is made from it: browsers send cookies to every port of a host, and a program that listens on
#   another one must not learn the token.
# - A request that a page of another origin starts is refused, also with the cookie.

HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_SAFE = frozenset({"GET", "HEAD"})
_BEARER = "bearer"  # the scheme's case does not matter (RFC 9110, 11.1)


class Guard:
    """Asks everybody for the token, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie
        self._pass = hmac.digest(token.encode(), cookie.encode(), "sha256").hex()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # web sockets: none are offered
        answer = self._refusal_or_welcome(scope)
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _refusal_or_welcome(self, scope: Scope) -> Response | None:
        """Return the answer to who may not ask; None lets the request pass."""
        headers = Headers(scope=scope)
        if why := _foreign(headers, scope["method"]):
            return PlainTextResponse(f"refused: {why}\n", status_code=403)
        given = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("token")
        if given is not None and _is_same(given, self._token):
            return self._welcome(scope)
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if cookie is not None and _is_same(cookie, self._pass):
            return None
        if scheme.lower() == _BEARER and _is_same(bearer.strip(), self._token):
            return None
        return PlainTextResponse(
            "refused: open the address that `stepscope serve` printed, with its token\n",
            status_code=401,
            headers={"www-authenticate": "Bearer"},
        )

    def _welcome(self, scope: Scope) -> Response:
        """Give the browser its cookie, and go on without it in the address.

        A page that goes on by itself, not a redirect: after a click in another site's page, a
        redirect would still count as that site's request and come without the cookie.
        """
        pairs = parse_qsl(scope["query_string"].decode("latin-1"))
        rest = urlencode([pair for pair in pairs if pair[0] != "token"])
        # One slash: //name would lead to another host.
        target = "/" + quote(scope["path"].lstrip("/\\")) + (f"?{rest}" if rest else "")
        target = html.escape(target)
        answer = HTMLResponse(
            '<!doctype html><html lang="en"><head><title>stepscope</title>'
            f'<meta http-equiv="refresh" content="0;url={target}"><link rel="icon" href="data:,">'
            f'</head><body><a href="{target}">stepscope</a></body></html>'
        )
        answer.set_cookie(
            self._cookie, self._pass, path="/", httponly=True, samesite="strict", secure=False
        )
        return answer


def _is_same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


def _foreign(headers: Headers, method: str) -> str | None:
    """Say why a request does not come from our own pages or a program of this machine."""
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name.lower() not in HOSTS:
        return "this server answers to 127.0.0.1 and localhost only"
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        return "the request comes from a page of another origin"
    site = headers.get("sec-fetch-site", "none")
    # Somebody who follows a link is fine: the answer is not shown to the page with the link.
    follows_link = method in _SAFE and headers.get("sec-fetch-mode") == "navigate"
    if site not in ("none", "same-origin") and not follows_link:
        return "the request comes from a page of another origin"
    if method not in _SAFE and origin is None and "authorization" not in headers:
        return "a request that changes something must say where it comes from (Origin)"
    return None


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers


# The web server: a port of this machine alone, from the first request to Ctrl-C.

HOST = "127.0.0.1"
PORT = 8763
_PORTS_TRIED = 50
_PATIENCE_S = 2  # for answers under way when the server stops


def open_port(port: int) -> socket.socket:
    """Open a listening socket; 0 is any free port. UsageError if it is in use, with a free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {HOST} is in use: another `stepscope serve`, or another program",
                f"port {_free_port(port)} is free: stepscope serve --port {_free_port(port)}",
            ) from None
        raise UsageError(f"port {port} cannot be opened: {error.strerror}") from None
    return listener


def _free_port(after: int) -> int:
    for port in range(after + 1, min(after + _PORTS_TRIED, 65536)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port
    return 0


def serve_until_stopped(
    app: ASGIApp, listener: socket.socket, on_start: Callable[[], None]
) -> None:
    """Returns after Ctrl-C or a signal to end."""
    import uvicorn

    class AnnouncedServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_start()

    config = uvicorn.Config(
        app,
        log_level="error" if os.environ.get("STEPSCOPE_DEBUG") else "critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_PATIENCE_S,
        timeout_keep_alive=30,
        lifespan="on",
    )
    with contextlib.suppress(KeyboardInterrupt):
        AnnouncedServer(config).run(sockets=[listener])
