"""`tilewise bench serve`: puts load on any server of OpenAI's API, with the arguments and figures
of `vllm bench serve`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.options import REVISION, Options, Values, make_console
from tilewise.cli.serve import read_keys
from tilewise.core import CheckpointError, ConfigError
from tilewise.files.reading import Unreadable, decode_text, read_whole
from tilewise.settings import SamplingSettings

if TYPE_CHECKING:
    from tilewise.server.load import LoadRequest

__all__ = ["serve"]

_MOST_BYTES, _MOST_TOKENS = 1 << 30, 1 << 20
_BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_SERVER, _PROMPTS, _ARRIVALS, _OUT = "Server", "Prompts", "Arrivals", "Results"


def serve(
    base_url: Annotated[
        str, typer.Option(metavar="URL", rich_help_panel=_SERVER, help="Address of the server.")
    ] = "http://127.0.0.1:8000",
    backend: Annotated[
        str,
        typer.Option(
            rich_help_panel=_SERVER, help="openai: /v1/completions; openai-chat: /v1/chat/completions."
        ),
    ] = "openai",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_SERVER,
            help="Name of the model on the server; default: its first one.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_SERVER,
            help="A file whose first line is an API key of the server.",
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", rich_help_panel=_SERVER, help="A header of every request; may be repeated."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            rich_help_panel=_PROMPTS,
            help="Directory or hub name of the model whose tokenizer makes random prompts; default: --model.",
        ),
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(rich_help_panel=_PROMPTS, help="random, or sharegpt: prompts of a file.")
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_PROMPTS,
            help="Prompts: a ShareGPT file, or lines of JSON with `prompt` and optionally `output_len`.",
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, max=1_000_000, rich_help_panel=_PROMPTS, help="Number of requests.")
    ] = 64,
    random_input_len: Annotated[
        int, typer.Option(min=1, max=_MOST_TOKENS, rich_help_panel=_PROMPTS, help="Tokens of a prompt.")
    ] = 128,
    random_output_len: Annotated[
        int, typer.Option(min=1, max=_MOST_TOKENS, rich_help_panel=_PROMPTS, help="New tokens of a text.")
    ] = 128,
    random_range_ratio: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.999,
            rich_help_panel=_PROMPTS,
            help="Lengths are uniformly random between 1 - this and 1 + this times the given ones.",
        ),
    ] = 0.0,
    random_prefix_len: Annotated[
        int,
        typer.Option(
            min=0,
            max=_MOST_TOKENS,
            rich_help_panel=_PROMPTS,
            help="Tokens at the beginning that all prompts share.",
        ),
    ] = 0,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            rich_help_panel=_PROMPTS,
            help="Generate texts to their full length (not every server supports it); default: for random prompts.",
        ),
    ] = None,
    request_rate: Annotated[
        float, typer.Option(min=0, rich_help_panel=_ARRIVALS, help="Requests per second; inf: all at once.")
    ] = float("inf"),
    burstiness: Annotated[
        float,
        typer.Option(
            min=0.01, rich_help_panel=_ARRIVALS, help="1: Poisson process; less: burstier; more: more even."
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=_ARRIVALS, help="Maximum requests at a time; default: no limit."),
    ] = None,
    num_warmups: Annotated[
        int, typer.Option(min=0, rich_help_panel=_ARRIVALS, help="Requests before the measured ones.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, arrivals and sampling.")] = 0,
    metric_percentiles: Annotated[
        str, typer.Option(metavar="N,N", rich_help_panel=_OUT, help="Percentiles of each metric.")
    ] = "99",
    output_json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=_OUT, help="Write the figures here, as JSON."),
    ] = None,
    revision: Annotated[str | None, REVISION] = None,
    *,
    sampling: Annotated[
        Values,
        Options(SamplingSettings, only=("temperature",), defaults={"temperature": 0.0}, panel=_PROMPTS),
    ],
) -> None:
    """Measure a running server under the load of many clients.

    Prints the time to the first token (TTFT), per token after it (TPOT), between two chunks (ITL)
    and of a whole answer: mean, median and percentiles. Exits with code 1 if a request failed.

    Example: `tilewise bench serve --tokenizer demo/model --num-prompts 32 --request-rate 4`
    """
    from tilewise.checkpoint import check_replaceable, check_writable
    from tilewise.server.load import Load, Target, load_figures, play, require_answer
    from tilewise.train.progress import track_work

    if backend not in _BACKENDS:
        raise typer.BadParameter(f"--backend must be one of {', '.join(_BACKENDS)}; got {backend!r}")
    if dataset_name not in ("random", "sharegpt") or (dataset_name == "sharegpt") != (
        dataset_path is not None
    ):
        raise typer.BadParameter("--dataset-name must be random, or sharegpt with --dataset-path")
    if not request_rate > 0:
        raise typer.BadParameter("--request-rate must be above 0")
    ranks = _ranks(metric_percentiles)
    if output_json is not None:
        check_writable(output_json.parent)
        check_replaceable(output_json, is_directory=False)
    headers = {name.strip(): value.strip() for name, _, value in (one.partition("=") for one in header or ())}
    if api_key_file is not None:
        headers["authorization"] = f"Bearer {read_keys(api_key_file)[0]}"
    target = Target(base_url.rstrip("/"), headers)
    name = asyncio.run(require_answer(target, model))
    count = num_prompts + num_warmups
    if dataset_path is not None:
        requests = _of_file(dataset_path, count, random_output_len)
    else:
        lengths = (random_input_len, random_output_len, random_range_ratio, random_prefix_len)
        requests = _drawn(tokenizer or model or name, revision, count, lengths, seed, backend)
    num_warmups = min(num_warmups, len(requests) - 1)
    load = Load(
        _BACKENDS[backend],
        name,
        request_rate,
        burstiness,
        max_concurrency,
        dataset_path is None if ignore_eos is None else ignore_eos,
        sampling["temperature"],
        seed,
    )

    async def run() -> dict[str, Any]:
        with track_work(make_console(stderr=True), "requests") as bar:
            warm = await play(target, load, requests[:num_warmups])
            if warm and all(one.error for one in warm):
                raise ConfigError(
                    f"[cli.bench] warm-up requests must succeed; got {warm[0].error!r}; check the server"
                )
            num_ended = 0

            def show() -> None:
                nonlocal num_ended
                num_ended += 1
                bar.show(num_ended, len(requests) - num_warmups)

            return load_figures(await play(target, load, requests[num_warmups:], show), ranks)

    figures = asyncio.run(run())
    _print(figures)
    if output_json is not None:
        from tilewise.files.writing import replace_text, writing

        about = {
            "backend": backend,
            "model_id": name,
            "num_prompts": len(requests) - num_warmups,
            "seed": seed,
        }
        about |= {
            "request_rate": request_rate if request_rate != float("inf") else "inf",
            "burstiness": burstiness,
        }
        with writing(output_json):
            output_json.parent.mkdir(parents=True, exist_ok=True)
        replace_text(
            output_json, json.dumps({**about, "max_concurrency": max_concurrency, **figures}, indent=1) + "\n"
        )
    if figures["failed"]:
        raise typer.Exit(1)


def _ranks(text: str) -> list[float]:
    try:
        ranks = [float(part) for part in text.split(",")]
    except ValueError:
        ranks = []
    if not ranks or not all(0 <= rank <= 100 for rank in ranks):
        raise typer.BadParameter(f"--metric-percentiles must be a list such as 50,90,99; got {text!r}")
    return ranks


def _of_file(path: Path, count: int, length: int) -> list[LoadRequest]:
    """Prompts of a file. The server counts their tokens."""
    from tilewise.serve.measure import read_prompts
    from tilewise.server.load import LoadRequest

    try:
        read = read_prompts(decode_text(read_whole(path, _MOST_BYTES)), count)
    except Unreadable as error:
        raise ConfigError(
            f"[cli.bench] --dataset-path must be a JSON file; got {str(path)!r}: {error}; correct it"
        ) from None
    return [LoadRequest(prompt, 0, length if num_new is None else num_new) for prompt, num_new in read]


def _drawn(
    name: str,
    revision: str | None,
    count: int,
    lengths: tuple[int, int, float, int],
    seed: int,
    backend: str,
) -> list[LoadRequest]:
    """Random prompts: token ids if the endpoint accepts them, otherwise their text."""
    import random

    from tilewise import models
    from tilewise.checkpoint import find_model, load_tokenizer
    from tilewise.serve.measure import random_prompts
    from tilewise.server.load import LoadRequest

    place = find_model(name, revision)
    try:
        tokenizer = load_tokenizer(place, _MOST_TOKENS)
    except CheckpointError as error:
        raise ConfigError(
            f"[cli.bench] random prompts need a tokenizer; got {name!r}: {error}; pass --tokenizer MODEL"
        ) from None
    length, num_new, ratio, prefix = lengths
    rng = random.Random(seed)

    def near(middle: int) -> int:
        return max(1, rng.randint(round(middle * (1 - ratio)), round(middle * (1 + ratio))))

    longest = round(length * (1 + ratio))
    vocab_size = tokenizer.get_vocab_size()
    if os.path.lexists(place / "config.json"):  # the tokenizer may have tokens without weights in the model
        size = models.config_content(place).get("vocab_size")
        vocab_size = min(vocab_size, size) if isinstance(size, int) and size > 0 else vocab_size
    ids = random_prompts(count, max(1, longest), vocab_size, seed, prefix)
    cut = [one[: prefix + near(length)] for one in ids]
    is_chat = backend == "openai-chat"
    return [LoadRequest(tokenizer.decode(one) if is_chat else one, len(one), near(num_new)) for one in cut]


def _print(figures: dict[str, Any]) -> None:
    """Print the table of vLLM's benchmark."""
    from tilewise.server.load import METRICS

    rows: Sequence[tuple[str, str, str]] = (
        ("Successful requests", "completed", "d"),
        ("Failed requests", "failed", "d"),
        ("Benchmark duration (s)", "duration", ".2f"),
        ("Total input tokens", "total_input_tokens", "d"),
        ("Total generated tokens", "total_output_tokens", "d"),
        ("Request throughput (req/s)", "request_throughput", ".2f"),
        ("Output token throughput (tok/s)", "output_throughput", ".2f"),
        ("Total token throughput (tok/s)", "total_token_throughput", ".2f"),
        ("Most requests at a time", "max_concurrent_requests", "d"),
    )
    for label, name, form in rows:
        print(f"{label + ':':42}{figures[name]:>12{form}}")
    for metric, title in METRICS.items():
        values = {name: value for name, value in figures.items() if name.endswith(f"_{metric}_ms")}
        if not values:
            continue
        print(f"-- {title}")
        for name, value in values.items():
            statistic = name.removesuffix(f"_{metric}_ms")
            if statistic != "std":
                print(f"{f'{statistic.capitalize()} {metric.upper()} (ms)' + ':':42}{value:>12.2f}")
    for error in figures["errors"]:
        print(f"failed: {error}")
