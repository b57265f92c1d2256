"""uvicorn's connections with deadlines: clients that send or read too slowly are disconnected.

uvicorn waits forever for the rest of a request's headers, and for a client that has stopped
reading, even after the end of an answer. Here both have deadlines. The deadline of a client that
reads slowly is renewed while it makes progress. Input that is not HTTP is answered with an error
body, like all errors.
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

_LEAST_READ = 16 << 10  # bytes that a client must read by its deadline, unless fewer remain


def connection_class(server: ServerSettings) -> type[H11Protocol]:
    """uvicorn's protocol with a server's deadlines.

    Args:
        server: settings of the server.
    """

    class Connection(_Connection):
        settings = server

    return Connection


class _Connection(H11Protocol):
    """One connection.

    Attributes:
        settings: settings of the server.
    """

    settings: ServerSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_due: asyncio.TimerHandle | None = None
        self._reader_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a client; close it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            transport.abort()
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines of a closed connection."""
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take data; stop the header deadline when the headers are complete."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # its headers are complete
            self._forget_headers()
        elif (before is None or before.response_complete) and self._headers_due is None:
            self._await_headers()

    def pause_writing(self) -> None:
        """Start the reader's deadline, because the write buffer is full."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Stop the reader's deadline, because the write buffer has room again."""
        self._forget_reader()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Start the reader's deadline when an answer is complete, for the part that the client has
        not read.
        """
        super().on_response_complete()
        self._await_reader()

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = "[server] a request must be HTTP/1.1; got other bytes; correct it"
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
        self._headers_due = self.loop.call_later(self.settings.header_timeout_s, self.transport.abort)

    def _forget_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _await_reader(self) -> None:
        """Start the reader's deadline if the write buffer has data."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread and self._reader_due is None:
            seconds = self.settings.send_timeout_s
            self._reader_due = self.loop.call_later(seconds, self._look_at_reader, num_unread)

    def _look_at_reader(self, before: int) -> None:
        """At the reader's deadline, disconnect the client, or renew the deadline if the client has
        made progress.
        """
        self._reader_due = None
        num_unread = self.transport.get_write_buffer_size()
        if num_unread and before - num_unread < _LEAST_READ:
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
