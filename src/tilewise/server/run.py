"""A server from its start to its end: the socket, the engine's process, signals, the deadline of the last answers.

Owns the order of both. It listens at once, so that `/health` can say that the model is being loaded. SIGTERM and SIGINT
stop it from taking connections; what is being answered has its time to end, a second signal ends it at once. When the
engine's process dies, every client is told and the server ends with an error.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn

from tilewise import core
from tilewise.core import Border, InternalError, ResourceError, TilewiseError
from tilewise.server.app import make_app
from tilewise.server.connection import connection_class
from tilewise.server.errors import ApiError
from tilewise.server.link.engine_client import EngineClient
from tilewise.server.requests.model_files import ModelFiles
from tilewise.server.service import Service
from tilewise.server.settings import ServerSettings

__all__ = ["serve"]

_BACKLOG = 512
_TELL_S = 0.5  # for clients to hear that the engine has died
_border = Border("server")


def serve(
    model: str | Path,
    settings: ServerSettings,
    engine: dict[str, Any],
    *,
    name: str | None = None,
    on_listening: Callable[[str], object] = lambda address: None,
    on_ready: Callable[[str], object] = lambda address: None,
) -> None:
    """Serve a model until a signal ends it.

    Args:
        model: a directory.
        settings: of the server.
        engine: fields of `EngineSettings` by name.
        name: what clients may call the model, where the settings name nothing; by default the directory as given.
        on_listening: called with the address, before the model is loaded.
        on_ready: called with the address, when the model is loaded.

    Raises:
        ConfigError, CheckpointError, LayoutError, ResourceError: the model cannot be served so, or the address cannot
            be bound.
        InternalError: the engine's process has died.
    """
    files = ModelFiles(str(model), settings, engine)
    if files.is_encoder:
        engine = {**engine, "runner": "pooling"}
    context = _tls(settings)
    with _listening(settings) as (listener, address):
        on_listening(address)
        asyncio.run(
            _Run(settings, files, str(model), engine, name or str(model), context).until_end(
                listener, lambda: on_ready(address)
            )
        )


@contextmanager
def _listening(settings: ServerSettings) -> Iterator[tuple[socket.socket, str]]:
    """A bound socket, and how clients call it."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    if settings.uds is not None:
        path = Path(settings.uds)
        listener = socket.socket(socket.AF_UNIX)
        try:
            if path.is_socket():  # left by one that was killed
                _check_unused(path)
                path.unlink()
            listener.bind(str(path))
            listener.listen(_BACKLOG)
            path.chmod(0o660)
        except (OSError, ResourceError) as error:
            listener.close()
            raise _unbound(settings.uds, error) from None
        try:
            with listener:
                yield listener, f"{scheme}+unix://{settings.uds}"
        finally:
            with suppress(OSError):
                path.unlink()
        return
    try:
        family, kind, _, _, place = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _unbound(f"{settings.host}:{settings.port}", error) from None
    with listener:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        yield listener, f"{scheme}://{host}:{listener.getsockname()[1]}"


def _check_unused(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ResourceError("another server listens there")


def _unbound(address: str, error: Exception) -> TilewiseError:
    return ResourceError(
        f"[server.serve] the address must be free and this machine's; got {address}: {error}; choose another"
    )


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    """The certificate, read before anything is loaded."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:
        rule, advice = "--ssl-certfile and --ssl-keyfile must be a certificate and its key", "correct them"
        _border.refuse("serve", rule, f"{settings.ssl_certfile!r}: {error}", advice)
    return context


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


class _Run:
    """One life of a server.

    Args:
        settings: of it.
        files: of the model.
        model: its directory.
        engine: settings of the engine.
        name: of the model.
        context: of TLS.
    """

    def __init__(
        self,
        settings: ServerSettings,
        files: ModelFiles,
        model: str,
        engine: dict[str, Any],
        name: str,
        context: ssl.SSLContext | None,
    ) -> None:
        self._settings = settings
        self._client = EngineClient(model, engine)
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
            timeout_keep_alive=15,
            timeout_graceful_shutdown=max(1, int(settings.shutdown_timeout_s) + 2),
            h11_max_incomplete_event_size=32 << 10,
            backlog=_BACKLOG,
        )
        config.load()
        config.ssl = context
        self._server = _Server(config)

    async def until_end(self, listener: socket.socket, on_ready: Callable[[], object]) -> None:
        """Answer until a signal comes, or the engine dies.

        Raises:
            TilewiseError: the engine could not be started, or has died.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        await self._client.start()
        serving = asyncio.create_task(self._server.serve([listener]))
        watching = [
            asyncio.create_task(self._await_ready(on_ready)),
            asyncio.create_task(self._await_death()),
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

    def _drain(self) -> None:
        """A signal came: take nothing new, and give what is being answered its time."""
        if self._service.is_draining:
            self._end_all()
            self._server.force_exit = True
            return
        self._service.is_draining = True
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._settings.shutdown_timeout_s, self._end_all)

    def _end_all(self) -> None:
        text = "[server] an answer must end before the server does; it did not; ask another one"
        self._client.fail_all(ApiError(503, text))

    async def _await_ready(self, on_ready: Callable[[], object]) -> None:
        await self._client.ready.wait()
        on_ready()

    async def _await_death(self) -> None:
        """Clients have heard of it already; they get a moment to read it."""
        await self._client.dead.wait()
        self._service.is_draining = True
        self._server.should_exit = True
        await asyncio.sleep(_TELL_S)
        self._server.force_exit = True

    def _cause(self) -> TilewiseError:
        if self._client.failure is not None:
            name, text = self._client.failure
            kind = getattr(core, name, None)
            if isinstance(kind, type) and issubclass(kind, TilewiseError):
                return kind(text)
            return InternalError(f"[server.serve] loading must not fail so; got {name}: {text}; report it")
        return InternalError(
            "[server.serve] the engine's process must live as long as the server; got its end; see its messages above, "
            "and whether memory has run out"
        )
