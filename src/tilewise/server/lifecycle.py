"""The lifecycle of a server, from its start (when the engine's process runs and the socket is
bound) to the deadline of the last answers.

This module handles signals and the order in which parts are shut down. SIGTERM and SIGINT close the
listening socket. Answers in progress may continue for `shutdown_timeout_s`, unless a second signal
ends the server at once. If the engine's process dies, every client gets an error and the server
exits with an error.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from tilewise import core
from tilewise.core import InternalError, TilewiseError, get_logger
from tilewise.processes.children import Spawned
from tilewise.server.app import make_app
from tilewise.server.connection import connection_class
from tilewise.server.errors import ApiError
from tilewise.server.link.engine_client import EngineClient
from tilewise.server.requests.model_files import ModelFiles
from tilewise.server.service import Service
from tilewise.server.settings import BACKLOG, ServerSettings

__all__ = ["Lifecycle"]

_NOTIFY_S = 0.5  # time for clients to receive the error when the engine has died
_WARN_S = 60.0  # between two log lines about the limit of open files


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with a deadline for the TLS handshake.

    Args:
        config: uvicorn's configuration.
        handshake_timeout_s: seconds for the whole handshake.
    """

    def __init__(self, config: uvicorn.Config, handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._handshake_timeout_s = handshake_timeout_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept clients."""
        await super().startup(sockets=[])
        config = self.config
        timeout = None if config.ssl is None else self._handshake_timeout_s
        for listener in sockets or ():
            server = await asyncio.get_running_loop().create_server(
                lambda: config.http_protocol_class(  # type: ignore[call-arg]
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                ),
                sock=listener,
                ssl=config.ssl,
                ssl_handshake_timeout=timeout,
                backlog=config.backlog,
            )
            self.servers.append(server)


class Lifecycle:
    """Runs one server from start to exit.

    Args:
        settings: settings of the server.
        files: files of the model.
        spawned: the engine's process.
        name: name of the model.
        context: TLS context; None for plain HTTP.
    """

    def __init__(
        self,
        settings: ServerSettings,
        files: ModelFiles,
        spawned: Spawned,
        name: str,
        context: ssl.SSLContext | None,
    ) -> None:
        self._settings = settings
        self._client = EngineClient(spawned)
        self._service = Service(settings, files, self._client, name)
        config = uvicorn.Config(
            make_app(self._service),
            http=connection_class(settings),
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
            log_level="error",  # uvicorn would log a warning for every invalid request
            timeout_keep_alive=15,
            timeout_graceful_shutdown=max(1, int(settings.shutdown_timeout_s) + 2),
            h11_max_incomplete_event_size=32 << 10,
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = context
        self._server = _Server(config, settings.header_timeout_s)
        self._warned = float("-inf")

    async def until_end(self, listener: socket.socket, on_ready: Callable[[], object]) -> None:
        """Serve until a signal arrives or the engine dies.

        Raises:
            TilewiseError: the engine could not be started, or died.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._log_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        await self._client.start()
        serving = asyncio.create_task(self._server.serve([listener]))
        watching = [
            asyncio.create_task(self._warm()),
            asyncio.create_task(self._await_ready(on_ready)),
            asyncio.create_task(self._await_engine_end()),
        ]
        try:
            await serving
        finally:
            for task in watching:
                task.cancel()
            self._service.close()
            is_dead = self._client.dead.is_set()
            await self._client.close()
        if is_dead:
            raise self._cause()

    def _log_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error of the event loop. If no more files can be opened, asyncio reports this
        hundreds of times a second, but only one line a minute is logged.
        """
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._warned > _WARN_S:
            self._warned = time.monotonic()
            get_logger("server").error(
                "clients must wait because this process may not open more files; raise ulimit -n"
            )

    async def _warm(self) -> None:
        """Start the process that renders chat templates while the model is loaded."""
        with suppress(TilewiseError):  # a model without a template
            await self._service.run_in_thread(self._service.files.renderer.prepare)

    def _drain(self) -> None:
        """Handle a signal: accept no new connections, and end answers at the deadline."""
        if self._service.is_draining:
            self._end_all()
            self._server.force_exit = True
            return
        self._service.is_draining = True
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._settings.shutdown_timeout_s, self._end_all)

    def _end_all(self) -> None:
        text = "[server] an answer must end before the server shuts down; it did not; send the request again"
        self._client.fail_all(ApiError(503, text))

    async def _await_ready(self, on_ready: Callable[[], object]) -> None:
        await self._client.ready.wait()
        on_ready()

    async def _await_engine_end(self) -> None:
        """Shut down after the death of the engine's process. Clients have been sent the error
        already, and get a moment to read it.
        """
        await self._client.dead.wait()
        self._service.is_draining = True
        self._server.should_exit = True
        await asyncio.sleep(_NOTIFY_S)
        self._server.force_exit = True

    def _cause(self) -> TilewiseError:
        if self._client.failure is not None:
            name, text = self._client.failure
            kind = getattr(core, name, None)
            if isinstance(kind, type) and issubclass(kind, TilewiseError):
                return kind(text)
            return InternalError(f"[server.serve] loading failed unexpectedly; got {name}: {text}; report it")
        return InternalError(
            "[server.serve] the engine's process must not end before the server; it did; see its messages above, "
            "and check whether memory ran out"
        )
