"""`tilewise serve`: a model over HTTP. Options have the names of `vllm serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.options import MODEL, REVISION, Options, Values, make_console, names_option, read_text
from tilewise.core import ConfigError
from tilewise.server.settings import ServerSettings
from tilewise.settings import EngineSettings

__all__ = ["read_keys", "serve"]

_MAX_KEYS_BYTES = 1 << 16


def serve(
    model: Annotated[str, MODEL],
    server: Annotated[Values, Options(ServerSettings)],
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel="Network", help="A file of API keys, one per line."),
    ] = None,
    *,
    engine: Annotated[Values, Options(EngineSettings, but=("generation_config",))],
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="[auto|vllm]",
            rich_help_panel="Engine",
            help="auto: generation_config.json has the defaults of requests; vllm: it is not read.",
        ),
    ] = "auto",
    revision: Annotated[str | None, REVISION] = None,
) -> None:
    """Serve a model over HTTP, for clients of OpenAI's API.

    Accepts only this machine unless `--host` is set. The paths are `/v1/chat/completions`,
    `/v1/completions`, `/v1/responses`, `/v1/embeddings`, `/v1/models`, `/tokenize`, `/detokenize`, `/health`,
    `/metrics`, `/version` and `/openapi.json`; `/` and `/status` are pages for a browser.

    Example: `tilewise serve demo/model --port 8000 --api-key-file keys.txt`
    """
    from tilewise.server.link.spawn import spawn_engine

    spawned = spawn_engine()  # it imports its modules while those below are imported
    from tilewise.checkpoint import find_model
    from tilewise.server import serve as run

    if generation_config not in ("auto", "vllm"):
        raise typer.BadParameter(
            f"{generation_config!r} is not one of auto, vllm", param_hint="--generation-config"
        )
    keys = [*server.pop("api_keys", ()), *read_keys(api_key_file)]
    settings = ServerSettings(**server, api_keys=keys)
    if generation_config == "vllm":
        engine["generation_config"] = False
    console = make_console(stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    directory = find_model(model, revision)
    with names_option("--generation-config vllm"):
        run(
            directory,
            settings,
            engine,
            name=model,
            spawned=spawned,
            on_listening=lambda address: say(f"listening on {address}{_audience(settings)}"),
            on_ready=lambda address: say(f"ready: {model}"),
        )


def _audience(settings: ServerSettings) -> str:
    """Who can reach the server, as part of a line."""
    if settings.uds is not None:
        return ""
    if settings.host in ("127.0.0.1", "::1", "localhost"):
        return ", open to this machine only"
    return ", open to the network" + ("" if settings.api_keys else ", without an API key: see --api-key")


def read_keys(path: Path | None) -> list[str]:
    """The API keys of a file, one per line.

    Args:
        path: path of the file; None for no keys.

    Raises:
        ConfigError: the file cannot be read, or contains no key.
    """
    if path is None:
        return []
    lines = read_text(path, "--api-key-file", _MAX_KEYS_BYTES).splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"[cli.serve] --api-key-file must have a key; got none in {str(path)!r}; add one")
    return keys
