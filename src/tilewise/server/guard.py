"""Middleware before all endpoints: checks `Host` and the API key, names each request, writes the access log.

Only method, path and status of a request are logged. `/health` needs no key and no `Host`, so that
load balancers can watch the server. The pages for browsers need no key, because they contain no
data and ask the user for the key.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewise.core import get_logger
from tilewise.server.errors import ApiError
from tilewise.server.http import send_error
from tilewise.server.pages import assets
from tilewise.server.service import Service

__all__ = ["Guard", "is_known_host"]

OPEN_PATHS = ("/health", *assets())
_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def is_known_host(header: str, names: tuple[str, ...]) -> bool:
    """Whether a `Host` is this server's: an address, or one of its names. This stops DNS rebinding, where a browser
    is made to send requests to this server under the name of another site.

    Args:
        header: value of `Host`, with or without a port.
        names: names of the server, in lower case.
    """
    name = re.sub(r":\d*$", "", header.strip().lower())
    if name in names:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class Guard:
    """Checks requests and passes them to the application.

    Args:
        app: the application.
        service: state of the server.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        settings = service.settings
        names = ("localhost", socket.gethostname(), settings.host, *settings.allowed_hosts)
        self._names = tuple(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        own_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = own_id if _NAME.fullmatch(own_id) else secrets.token_hex(16)
        begun, status = time.monotonic(), 0

        async def send_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id
        try:
            scope["state"]["salt"] = self._check(scope, headers)
        except ApiError as error:
            await send_error(send_headers, error)
        else:
            await self._app(scope, receive, send_headers)
        route = scope["state"].get("route", "other")
        self._service.metrics.answer(route, status)
        if self._service.settings.log_requests:
            seconds = time.monotonic() - begun
            get_logger("server").info("%s %s %d %.3f s", scope["method"], route, status, seconds)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """The salt of the client's key.

        Raises:
            ApiError: the key is missing or wrong (401), or the `Host` is not this server's (403).
        """
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        # load balancers may use HTTP/1.0 without a Host or with an empty one; browsers always send a name
        is_balancer = not any(hosts) and scope["path"] == "/health"
        if not is_balancer and not is_known_host(host, self._names):
            text = "[server] Host must be an address or a name of this server; got another name; see --allowed-hosts"
            raise ApiError(403, text, headers={"connection": "close"})
        kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        salt = self._service.settings.find_key(key.strip() if kind.lower() == "bearer" else None)
        if salt is None and scope["path"] not in OPEN_PATHS:
            text = (
                "[server] a request must have an API key of this server; got none or another; see --api-key"
            )
            challenge = {"www-authenticate": "Bearer", "connection": "close"}
            raise ApiError(401, text, code="invalid_api_key", headers=challenge)
        return salt or ""
