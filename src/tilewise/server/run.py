"""Starts a server: binds the socket, starts loading in the engine's process, then loads the HTTP modules.

The engine's process may have been started earlier, to load its modules in the meantime. The socket
listens before anything else is loaded. So `/health` can report that the model is being loaded, and
nothing is loaded if the address is in use.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tilewise.core import ResourceError, TilewiseError, Validator
from tilewise.server.link.spawn import EngineSpawned, spawn_engine
from tilewise.server.settings import BACKLOG, ServerSettings

__all__ = ["serve"]

_validate = Validator("server")
_OTHER_FILES = BACKLOG + 256  # room for clients that are accepted before those beyond the limit are closed


def serve(
    model: str | Path,
    settings: ServerSettings,
    engine: dict[str, Any],
    *,
    name: str | None = None,
    spawned: EngineSpawned | None = None,
    on_listening: Callable[[str], object] = lambda address: None,
    on_ready: Callable[[str], object] = lambda address: None,
) -> None:
    """Serve a model until a signal ends it.

    Args:
        model: directory of the model.
        settings: settings of the server.
        engine: fields of `EngineSettings` by name.
        name: name of the model for clients, if the settings have no name; None for the directory.
        spawned: the engine's process, if it was started already. This function ends it.
        on_listening: called with the address, before the model is loaded.
        on_ready: called with the address, when the model is loaded.

    Raises:
        ConfigError, CheckpointError, LayoutError, ResourceError: the model cannot be served with these settings, or
            the address cannot be bound.
        InternalError: the engine's process died unexpectedly.
    """
    context = _tls(settings)
    _allow_files(settings.max_connections + _OTHER_FILES)
    with _listening(settings) as (listener, address):
        on_listening(address)
        spawned = spawned or spawn_engine()
        try:
            spawned.load(str(model), engine)
            from tilewise.server.lifecycle import Lifecycle
            from tilewise.server.requests.model_files import ModelFiles

            files = ModelFiles(str(model), settings, engine)
            lifecycle = Lifecycle(settings, files, spawned, name or str(model), context)
            asyncio.run(lifecycle.until_end(listener, lambda: on_ready(address)))
        finally:
            spawned.end()


@contextmanager
def _listening(settings: ServerSettings) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket, and its address for clients."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    if settings.uds is not None:
        path = Path(settings.uds)
        listener = socket.socket(socket.AF_UNIX)
        try:
            if path.is_socket():  # left behind by a killed server
                _check_unused(path)
                path.unlink()
            listener.bind(str(path))
            listener.listen(BACKLOG)
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
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be encoded
        raise _unbound(f"{settings.host}:{settings.port}", error) from None
    with listener:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        yield listener, f"{scheme}://{host}:{listener.getsockname()[1]}"


def _allow_files(most: int) -> None:
    """Raise the limit on open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most:
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def _check_unused(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ResourceError("another server listens on it")


def _unbound(address: str, error: Exception) -> TilewiseError:
    return ResourceError(
        f"[server.serve] the address must be free and belong to this machine; got {address}: {error}; choose another"
    )


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    """The TLS context, made before anything is loaded."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:
        rule, advice = "--ssl-certfile and --ssl-keyfile must be a certificate and its key", "correct them"
        _validate.invalid("serve", rule, f"{settings.ssl_certfile!r}: {error}", advice)
    return context
