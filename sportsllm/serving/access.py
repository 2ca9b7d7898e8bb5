"""Who may call the server, and what a refusal looks like."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from sportsllm.serving.requests import ApiError

IDLE_S = 10  # that a connection may stay open without a complete request head
STALLED_S = 60.0  # that a client may take to read a part of its reply
MOST_CONNECTIONS = 512
_PUBLIC = ("/", "/health", "/models", "/v1/models")  # without a key
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class Access:
    """Who may ask what.

    Attributes:
        host: the name or address that the server listens on.
        api_key: a secret to be sent as bearer token or x-api-key; None lets everybody in.
        origins: of other pages that may call the server from a browser; `*` is any.
    """

    host: str = "127.0.0.1"
    api_key: str | None = None
    origins: tuple[str, ...] = ()

    def check(self, request: Request) -> str | None:
        """Refuse strangers; returns the origin of another page that is let in.

        Raises:
            ApiError: a host that is not this machine (DNS rebinding), another page's origin, a wrong key.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self._is_ours(host):
            raise ApiError(403, "the Host header does not name this server", "permission_error")
        foreign = origin is not None and origin.partition("://")[2] != host
        if foreign and origin not in self.origins and "*" not in self.origins:
            raise ApiError(403, "pages of other origins may not call this server", "permission_error")
        if self.api_key is not None and request.method != "OPTIONS" and request.url.path not in _PUBLIC:
            bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
            given = bearer or request.headers.get("x-api-key", "")
            if not hmac.compare_digest(given.encode("latin-1"), self.api_key.encode()):  # headers are read as Latin-1
                raise ApiError(401, "Invalid API Key", "authentication_error")
        return origin if foreign else None

    def _is_ours(self, header: str) -> bool:
        try:
            name = urlsplit(f"//{header}").hostname or ""
            machine = socket.gethostname().lower()
            if name in ("localhost", machine, f"{machine}.local", self.host.lower()):
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def guard(self, app: Any) -> Any:
        """An ASGI application that lets checked requests through to `app`, and adds headers to the replies."""

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            request, inner, added, begun = Request(scope), app, _HEADERS, False
            try:
                if (origin := self.check(request)) is not None:
                    added = {**_HEADERS, "Access-Control-Allow-Origin": origin, "Vary": "Origin"}
                    if request.method == "OPTIONS":
                        allowed = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": "*"}
                        inner = Response(headers=allowed)
            except ApiError as error:
                inner = refusal(request, error)

            async def send_with_headers(message: Any) -> None:
                nonlocal begun
                if message["type"] == "http.response.start":
                    begun = True
                    message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in added.items())]
                async with asyncio.timeout(STALLED_S):  # else clients that never read would hold all connections
                    await send(message)

            try:
                await inner(scope, receive, send_with_headers)
            except asyncio.CancelledError:  # the server ends
                reply = refusal(request, ApiError(503, "the server is closing", "unavailable_error"))
                if begun:
                    await send({"type": "http.response.body", "body": b"data: " + bytes(reply.body) + b"\n\n"})
                else:
                    await reply(scope, receive, send_with_headers)

        return guarded


class TimedProtocol(H11Protocol):  # type: ignore[misc]  # uvicorn is not checked
    """HTTP whose keep-alive timeout runs from the connection's first moment until a request's head is complete.

    uvicorn starts it after a reply and ends it with the next byte; silent connections would hold all there are.
    """

    def connection_made(self, transport: Any) -> None:
        """Start the timeout."""
        super().connection_made(transport)
        if max(len(self.connections), len(self.tasks)) > MOST_CONNECTIONS:  # uvicorn's own limit says so in plain text
            busy = ApiError(503, "too many connections; try again", "unavailable_error", retry_s=1)
            self.app = refusal(None, busy)
            self.app.headers["Connection"] = "close"
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Read on, in the time that is left unless a request begins."""
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_task = timer
        elif timer is not None:
            timer.cancel()


def refusal(_request: object, error: Exception) -> Response:
    """The reply to a request that fails."""
    headers = dict[str, str]()
    if isinstance(error, HTTPException):
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        error = ApiError(error.status_code, str(error.detail), kind)
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal error; the server's log says more", "server_error")
        headers["Connection"] = "close"  # as uvicorn does after an error, without a word
    if error.retry_s is not None:
        headers["Retry-After"] = str(error.retry_s)
    return JSONResponse(error.body, error.status, headers)
