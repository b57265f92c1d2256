"""Connections as uvicorn has them, with deadlines: senders and readers that are too slow are ended.

uvicorn waits for ever for the rest of a request's headers, and for a client that has stopped reading, also behind the
end of an answer. Here each has its time; a client that reads slowly has it again while it gets on. What is no HTTP gets
an error body as everything else does.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tilewise.server.errors import error_body
from tilewise.server.settings import ServerSettings

__all__ = ["connection_class"]

_LEAST_READ = 16 << 10  # bytes that a client reads in its time, unless fewer are left


def connection_class(settings: ServerSettings) -> type[H11Protocol]:
    """uvicorn's protocol with a server's deadlines.

    Args:
        settings: of the server.
    """

    class Connection(_Connection):
        given = settings

    return Connection


class _Connection(H11Protocol):
    """One connection.

    Attributes:
        given: settings of the server.
    """

    given: ServerSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_due: asyncio.TimerHandle | None = None
        self._reader_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come; with too many of them, it goes again."""
        super().connection_made(transport)
        if len(self.connections) > self.given.max_connections:
            transport.abort()
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was ended."""
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of a request came."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # its headers are complete
            self._forget_headers()
        elif (before is None or before.response_complete) and self._headers_due is None:
            self._await_headers()

    def pause_writing(self) -> None:
        """The client reads slower than is written."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has read."""
        self._forget_reader()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """An answer was written; what the client has not read of it waits."""
        super().on_response_complete()
        self._await_reader()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = "[server] a request must be HTTP/1.1; got something else; correct it"
            content = json.dumps(error_body(text, 400)).encode()
            rows = [(b"content-type", b"application/json"), (b"connection", b"close")]
            rows.append((b"content-length", str(len(content)).encode()))
            for event in (
                h11.Response(status_code=400, headers=rows, reason=b"Bad Request"),
                h11.Data(data=content),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._await_reader()

    def _await_headers(self) -> None:
        self._headers_due = self.loop.call_later(self.given.header_timeout_s, self.transport.abort)

    def _forget_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _await_reader(self) -> None:
        """Give the client its time, where something is left for it."""
        left = self.transport.get_write_buffer_size()
        if left and self._reader_due is None:
            seconds = self.given.send_timeout_s
            self._reader_due = self.loop.call_later(seconds, self._look_at_reader, left)

    def _look_at_reader(self, before: int) -> None:
        """Its time is over."""
        self._reader_due = None
        left = self.transport.get_write_buffer_size()
        if left and before - left < _LEAST_READ:
            self.transport.abort()
        else:
            self._await_reader()

    def _forget_reader(self) -> None:
        if self._reader_due is not None:
            self._reader_due.cancel()
            self._reader_due = None

    def _cancel(self) -> None:
        self._forget_headers()
        self._forget_reader()
