"""`tilewise serve`: a model over HTTP. Options are named as `vllm serve` names them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.options import (
    DTYPE_HELP,
    MODEL,
    REVISION,
    SPECULATIVE_HELP,
    ignore_option,
    json_object,
    known_dtype,
    make_console,
    names_option,
)
from tilewise.core import ConfigError
from tilewise.core.reading import Unreadable, decode_text, read_whole

__all__ = ["read_keys", "serve", "size"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_TEMPLATE, _MOST_KEYS = 1 << 20, 1 << 16
_LISTEN, _ENGINE, _TEXT, _LIMITS = "Where it listens", "Engine", "Conversations", "Limits"
_SIZE = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?([kmgKMGT]?)(?:i?B)?")


def size(text: str | None, option: str) -> int | None:
    """A number that may end in a unit: 2G, 32K, 1.5G; small letters count in thousands.

    Args:
        text: of the option; None: it was not given.
        option: that a usage error names.
    """
    if text is None:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size such as 4096, 32K or 2G", param_hint=option)
    return (
        int(float(f"{match[1]}.{match[2] or 0}") * _UNITS[match[3]])
        if match[2]
        else int(match[1]) * _UNITS[match[3]]
    )


def serve(
    model: Annotated[str, MODEL],
    host: Annotated[
        str,
        typer.Option(
            rich_help_panel=_LISTEN,
            help="The address; 127.0.0.1 is this machine alone, 0.0.0.0 all networks.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, rich_help_panel=_LISTEN, help="0: one that is free.")
    ] = 8000,
    uds: Annotated[
        Path | None,
        typer.Option(metavar="PATH", rich_help_panel=_LISTEN, help="A Unix socket instead of an address."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            rich_help_panel=_LISTEN,
            help="A key that every request must bring; may be given several times. Other users of this machine can "
            "read it in the list of processes: prefer --api-key-file.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=_LISTEN, help="A file of keys, one a line."),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-hosts",
            metavar="NAME",
            rich_help_panel=_LISTEN,
            help="A name that clients may call this server, besides its addresses; may be given several times.",
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origins",
            metavar="ORIGIN",
            rich_help_panel=_LISTEN,
            help="A site whose pages may ask (CORS); may be given several times. Default: none.",
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=_LISTEN, help="Of the certificate.")
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=_LISTEN, help="A certificate: speak TLS.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_TEXT,
            help="What clients call the model; may be given several times. Default: MODEL.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=_TEXT, help="A template instead of the model's own."),
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            rich_help_panel=_TEXT,
            help="Requests may bring a template of their own.",
        ),
    ] = False,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_TEXT,
            help="How calls of tools are written: hermes, llama3_json, mistral, phi4_mini_json, pythonic or none. "
            "Default: as the model's family does.",
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_TEXT,
            help="How thoughts are written: qwen3, deepseek_r1 or none. Default: as the template has them.",
        ),
    ] = None,
    stream_interval: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel=_TEXT, help="Tokens of a chunk of a stream.")
    ] = 1,
    tp: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size",
            "--tp",
            "-tp",
            metavar="N",
            min=1,
            rich_help_panel=_ENGINE,
            help="Devices that share every layer (1, 2, 4, ...).",
        ),
    ] = 1,
    dp: Annotated[
        int,
        typer.Option(
            "--data-parallel-size",
            "--dp",
            "-dp",
            metavar="N",
            min=1,
            rich_help_panel=_ENGINE,
            help="Copies of the model that share the requests.",
        ),
    ] = 1,
    dtype: Annotated[
        str,
        typer.Option(callback=known_dtype, metavar="TYPE", rich_help_panel=_ENGINE, help=DTYPE_HELP),
    ] = "auto",
    load_format: Annotated[
        str,
        typer.Option(
            rich_help_panel=_ENGINE,
            help="auto: the model's weights; dummy: random ones, from config.json and the tokenizer alone.",
        ),
    ] = "auto",
    max_model_len: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", rich_help_panel=_ENGINE, help="The context; default: as config.json says."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            rich_help_panel=_ENGINE,
            help="Texts that are written at a time, or read by an encoder. Default: 64, of an encoder 16.",
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(metavar="N", min=1, rich_help_panel=_ENGINE, help="Tokens of one call of the model."),
    ] = 256,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-memory",
            "--kv-cache-memory-bytes",
            metavar="SIZE",
            rich_help_panel=_ENGINE,
            help="For keys and values, for example 2G. Default: as much as is needed, 1G at most.",
        ),
    ] = None,
    workers_per_device: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            rich_help_panel=_ENGINE,
            help="Threads of each device; default: as many as there is room for.",
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            rich_help_panel=_ENGINE,
            help="Find what prompts have in common in the cache.",
        ),
    ] = True,
    generation_config: Annotated[
        str,
        typer.Option(
            rich_help_panel=_ENGINE,
            help="auto: generation_config.json says what a request does not; vllm: it is not looked at.",
        ),
    ] = "auto",
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON", rich_help_panel=_ENGINE, help=SPECULATIVE_HELP)
    ] = None,
    runner: Annotated[
        str,
        typer.Option(
            rich_help_panel=_ENGINE,
            help="generate: the model writes; pooling: it makes vectors (encoders always do).",
        ),
    ] = "generate",
    max_logprobs: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, rich_help_panel=_LIMITS, help="Likeliest tokens that are told at each place."
        ),
    ] = 20,
    max_num_waiting: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            rich_help_panel=_LIMITS,
            help="Texts that may wait for others; more are refused for now (429).",
        ),
    ] = 256,
    max_request_bytes: Annotated[
        str, typer.Option(metavar="SIZE", rich_help_panel=_LIMITS, help="Of a body.")
    ] = "8M",
    max_connections: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel=_LIMITS, help="Clients at a time.")
    ] = 1024,
    header_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            rich_help_panel=_LIMITS,
            help="Seconds for all of a request's headers.",
        ),
    ] = 10,
    body_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.1, rich_help_panel=_LIMITS, help="Seconds for all of its body."
        ),
    ] = 30,
    send_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            rich_help_panel=_LIMITS,
            help="Seconds for a client that has stopped reading.",
        ),
    ] = 60,
    request_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, rich_help_panel=_LIMITS, help="Seconds for an answer."),
    ] = 3600,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            rich_help_panel=_LIMITS,
            help="Seconds for what is being answered when SIGTERM or Ctrl-C comes.",
        ),
    ] = 30,
    disable_log_requests: Annotated[
        bool,
        typer.Option(
            "--disable-log-requests", help="No line per request in the log (shown with TILEWISE_LOG=info)."
        ),
    ] = False,
    revision: Annotated[str | None, REVISION] = None,
    ignore_config_field: Annotated[list[str] | None, ignore_option(_ENGINE)] = None,
) -> None:
    """Serve a model over HTTP, for clients of OpenAI's API.

    Listens on this machine alone unless `--host` says otherwise. The paths are `/v1/chat/completions`,
    `/v1/completions`, `/v1/responses`, `/v1/embeddings`, `/v1/models`, `/tokenize`, `/detokenize`, `/health`,
    `/metrics`, `/version` and `/openapi.json`; `/` and `/status` are pages for a browser.

    Example: `tilewise serve demo/model --port 8000 --api-key-file keys.txt`
    """
    from tilewise.server.link.spawn import spawn_engine

    spawned = spawn_engine()  # it loads its modules while those below are loaded
    from tilewise.checkpoint import find_model
    from tilewise.server import ServerSettings
    from tilewise.server import serve as run

    if generation_config not in ("auto", "vllm"):
        raise typer.BadParameter(
            f"{generation_config!r} is not one of auto, vllm", param_hint="--generation-config"
        )
    keys = [*(api_key or ()), *read_keys(api_key_file)]
    settings = ServerSettings(
        host=host,
        port=port,
        uds=None if uds is None else str(uds),
        served_model_names=served_model_name or (),
        api_keys=keys,
        allowed_hosts=allowed_hosts or (),
        allowed_origins=allowed_origins or (),
        chat_template=None
        if chat_template is None
        else _text(chat_template, "--chat-template", _MOST_TEMPLATE),
        trust_request_chat_template=trust_request_chat_template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        stream_interval=stream_interval,
        max_logprobs=max_logprobs,
        max_num_waiting=max_num_waiting,
        max_request_bytes=size(max_request_bytes, "--max-request-bytes") or 0,
        max_connections=max_connections,
        header_timeout_s=header_timeout,
        body_timeout_s=body_timeout,
        send_timeout_s=send_timeout,
        request_timeout_s=request_timeout,
        shutdown_timeout_s=shutdown_timeout,
        ssl_keyfile=None if ssl_keyfile is None else str(ssl_keyfile),
        ssl_certfile=None if ssl_certfile is None else str(ssl_certfile),
        log_requests=not disable_log_requests,
    )
    engine = {
        "tensor_parallel_size": tp,
        "data_parallel_size": dp,
        "dtype": dtype,
        "load_format": load_format,
        "max_model_len": size(max_model_len, "--max-model-len"),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_memory_bytes": size(kv_cache_memory, "--kv-cache-memory"),
        "workers_per_device": workers_per_device,
        "enable_prefix_caching": enable_prefix_caching,
        "generation_config": generation_config == "auto",
        "speculative_config": json_object(speculative_config),
        "runner": runner,
        "ignore_config_fields": ignore_config_field,
    }
    engine = {name: value for name, value in engine.items() if value is not None}
    console = make_console(stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    place = find_model(model, revision)
    open_to = "this machine alone" if host in ("127.0.0.1", "::1", "localhost") else "the network"
    guard = (
        ""
        if keys or uds is not None or open_to == "this machine alone"
        else ", which needs no key: see --api-key"
    )
    with names_option("--generation-config vllm"):
        run(
            place,
            settings,
            engine,
            name=model,
            spawned=spawned,
            on_listening=lambda address: say(
                f"listening on {address}" + ("" if uds is not None else f", open to {open_to}{guard}")
            ),
            on_ready=lambda address: say(f"ready: {model}"),
        )


def _text(path: Path, option: str, most: int) -> str:
    try:
        return decode_text(read_whole(path, most))
    except Unreadable as error:
        raise ConfigError(
            f"[cli.serve] {option} must be a file of text; got {str(path)!r}: {error}; correct it"
        ) from None


def read_keys(path: Path | None) -> list[str]:
    """The keys of a file, a line each.

    Args:
        path: of it; None: there are none.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    if path is None:
        return []
    found = [line.strip() for line in _text(path, "--api-key-file", _MOST_KEYS).splitlines() if line.strip()]
    if not found:
        raise ConfigError(f"[cli.serve] --api-key-file must have a key; got none in {str(path)!r}; add one")
    return found
