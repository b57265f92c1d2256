"""`tilewise bench latency` and `tilewise bench throughput`, with vLLM's arguments and figures.

This module has the arguments, help texts and output. `serve.measure` makes and times the requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.before_work import before_work
from tilewise.cli.bench.serve import serve
from tilewise.cli.help import App
from tilewise.cli.options import MODEL, REVISION, Options, Values, make_console
from tilewise.core import ConfigError
from tilewise.files.reading import Unreadable, decode_text, read_whole
from tilewise.settings import EngineSettings

if TYPE_CHECKING:
    from tilewise.serve import LLM, SamplingParams
    from tilewise.serve.measure import Times

__all__ = ["bench"]

bench = App(name="bench", help="Measure how fast a model generates, with vLLM's arguments and figures.")

_MOST_BYTES = 1 << 30
_OUT = "Results"
_ENGINE = (
    *("enable_prefix_caching", "tensor_parallel_size", "data_parallel_size", "speculative_config", "dtype"),
    "quantization",
    *("load_format", "max_num_batched_tokens", "workers_per_device", "ignore_config_fields"),
)
_JSON = typer.Option(rich_help_panel=_OUT, metavar="FILE", help="Write the figures here, as JSON.")
_PICTURE = typer.Option(
    rich_help_panel=_OUT, metavar="FILE", help="Draw the figures into this file (.png or .svg)."
)
_SEED = typer.Option(min=0, help="Seed of prompts and sampling.")


@bench.command()
def latency(
    model: Annotated[str, MODEL],
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="New tokens of a text.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Prompts at a time.")] = 8,
    n: Annotated[int, typer.Option("--n", min=1, max=4096, help="Texts of a prompt.")] = 1,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Rounds before the measured ones.")] = 10,
    num_iters: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 30,
    seed: Annotated[int, _SEED] = 0,
    output_json: Annotated[Path | None, _JSON] = None,
    picture: Annotated[Path | None, _PICTURE] = None,
    revision: Annotated[str | None, REVISION] = None,
    *,
    engine: Annotated[
        Values, Options(EngineSettings, only=_ENGINE, defaults={"enable_prefix_caching": False})
    ],
) -> None:
    """Time one batch of equal prompts from start to end, several times.

    Prints the average and percentiles of seconds per batch, and milliseconds to a first token (TTFT) and between two
    tokens (ITL).

    Example: `tilewise bench latency demo/model --batch-size 1 --num-iters 5 --output-json latency.json`
    """
    from tilewise.checkpoint import find_model
    from tilewise.serve.measure import latency_figures, measure, random_prompts
    from tilewise.train.progress import track_work

    _check_files(output_json, picture)
    llm = _load(
        find_model(model, revision),
        **engine,
        max_context=input_len + output_len,
        max_num_seqs=batch_size * n,
    )
    with llm, track_work(make_console(stderr=True), "rounds") as bar:
        vocab_size = llm.engine.model.config.vocab_size
        prompts = random_prompts(batch_size, input_len, vocab_size, seed)
        total = num_iters_warmup + num_iters
        rounds: list[list[Times]] = []
        for number in range(total):
            times = measure(llm.engine, prompts, _params(output_len, n, seed))
            if number >= num_iters_warmup:
                rounds.append(times)
            bar.show(number + 1, total)
        figures = latency_figures(rounds)
    print(f"Avg latency: {figures['avg_latency']:.4f} seconds")
    for rank, value in figures["percentiles"].items():
        print(f"{rank}% percentile latency: {value:.4f} seconds")
    _finish(figures, rounds[-1], output_json, picture, f"{batch_size} prompts of {input_len} tokens")


@bench.command()
def throughput(
    model: Annotated[str, MODEL],
    dataset_name: Annotated[
        str, typer.Option(help="random, or sharegpt: prompts of a file in either format.")
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts: a ShareGPT file, or lines of JSON with `prompt` and optionally `output_len`.",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of prompts.")] = 64,
    random_input_len: Annotated[
        int, typer.Option("--random-input-len", "--input-len", min=1, help="Tokens of a prompt.")
    ] = 128,
    random_output_len: Annotated[
        int, typer.Option("--random-output-len", "--output-len", min=1, help="New tokens of a text.")
    ] = 128,
    random_prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens before these that all prompts share.")
    ] = 0,
    n: Annotated[int, typer.Option("--n", min=1, max=4096, help="Texts of a prompt.")] = 1,
    seed: Annotated[int, _SEED] = 0,
    output_json: Annotated[Path | None, _JSON] = None,
    picture: Annotated[Path | None, _PICTURE] = None,
    revision: Annotated[str | None, REVISION] = None,
    *,
    engine: Annotated[Values, Options(EngineSettings, only=(*_ENGINE, "max_model_len", "max_num_seqs"))],
) -> None:
    """Generate many texts at once, and print requests and tokens per second.

    Texts are generated to their full length, past end tokens. Prompts of a file without `output_len` get as many new
    tokens as `--random-output-len`.

    Example: `tilewise bench throughput demo/model --num-prompts 16 --output-json throughput.json --picture t.png`
    """
    from tilewise.checkpoint import find_model
    from tilewise.serve.measure import measure, random_prompts, read_prompts, throughput_figures
    from tilewise.train.progress import track_work

    if dataset_name not in ("random", "sharegpt"):
        raise typer.BadParameter(f"{dataset_name!r} is not one of random, sharegpt")
    if (dataset_name == "sharegpt") != (dataset_path is not None):
        raise typer.BadParameter("--dataset-path needs --dataset-name sharegpt")
    read: list[tuple[str, int | None]] = []
    if dataset_path is not None:
        try:
            read = read_prompts(decode_text(read_whole(dataset_path, _MOST_BYTES)), num_prompts)
        except Unreadable as error:
            raise ConfigError(
                f"[cli.bench] --dataset-path must be a JSON file; got {str(dataset_path)!r}: {error}; correct it"
            ) from None
    _check_files(output_json, picture)
    is_random = dataset_path is None
    llm = _load(
        find_model(model, revision),
        **engine,
        max_context=random_prefix_len + random_input_len + random_output_len if is_random else None,
    )
    prompts: Sequence[Any] = [prompt for prompt, _ in read]
    lengths = [random_output_len if wanted is None else wanted for _, wanted in read]
    with llm, track_work(make_console(stderr=True), "requests") as bar:
        if is_random:
            vocab_size = llm.engine.model.config.vocab_size
            prompts = random_prompts(num_prompts, random_input_len, vocab_size, seed, random_prefix_len)
            lengths = [random_output_len] * num_prompts
        num_ended = 0

        def show() -> None:
            nonlocal num_ended
            num_ended += 1
            bar.show(num_ended, len(prompts))

        times = measure(llm.engine, prompts, [_params(length, n, seed) for length in lengths], show)
        figures = throughput_figures(times)
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total "
        f"tokens/s, {figures['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens: {figures['num_prompt_tokens']}")
    print(f"Total num output tokens: {figures['num_output_tokens']}")
    _finish(figures, times, output_json, picture, f"{len(prompts)} requests at once")


bench.command()(serve)


def _params(length: int, n: int, seed: int) -> SamplingParams:
    """Settings of sampled texts of a given length."""
    from tilewise.serve import SamplingParams

    return SamplingParams(n=n, max_tokens=length, ignore_eos=True, seed=seed)


def _load(directory: Path, **settings: Any) -> LLM:
    from tilewise.serve import LLM

    with before_work():
        return LLM(directory, **settings)


def _check_files(output_json: Path | None, picture: Path | None) -> None:
    """Check that the output files can be written."""
    from tilewise.checkpoint import check_replaceable, check_writable

    if picture is not None and picture.suffix.lower() not in (".png", ".svg"):
        raise typer.BadParameter(f"--picture must end in .png or .svg; got {str(picture)!r}")
    for file in (output_json, picture):
        if file is not None:
            check_writable(file.parent)
            check_replaceable(file, is_directory=False)


def _finish(
    figures: dict[str, Any],
    times: Sequence[Times],
    output_json: Path | None,
    picture: Path | None,
    title: str,
) -> None:
    """Print the times per token, and write the files that were asked for."""
    from tilewise.files.writing import replace_text, writing

    for name, words in (("ttft_ms", "Time to first token"), ("itl_ms", "Inter-token latency")):
        if name in figures:
            p50, p90, p99 = (figures[name]["percentiles"][rank] for rank in ("50", "90", "99"))
            print(f"{words}: median {p50:.1f} ms, 90% {p90:.1f} ms, 99% {p99:.1f} ms")
    for file in (output_json, picture):
        if file is not None:
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
    if output_json is not None:
        replace_text(output_json, json.dumps(figures, indent=1) + "\n")
    if picture is not None:
        _draw(picture, times, title)


def _draw(path: Path, times: Sequence[Times], title: str) -> None:
    """Draw tokens per second over time, and the distributions of times per token."""
    import matplotlib
    import numpy as np

    from tilewise.files.writing import replace_file

    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin = min(one.submitted for one in times)
    texts = [(one.submitted, text) for one in times for text in one.texts]
    token_times = np.array([token - begin for _, text in texts for token in text])
    first = [1e3 * (text[0] - submitted) for submitted, text in texts if text]
    between = np.concatenate([np.diff(text) for _, text in texts]) * 1e3
    figure, (over_time, to_first, gaps) = pyplot.subplots(1, 3, figsize=(13, 4), dpi=120)
    counts, edges = np.histogram(token_times, bins=40)
    over_time.stairs(counts / np.diff(edges), edges, fill=True, color="#9ecae1")
    over_time.set(xlabel="seconds", ylabel="output tokens per second", title=title)
    to_first.ecdf(first, color="#08519c")
    to_first.set(xlabel="milliseconds", ylabel="share of texts", title="time to first token")
    if len(between):
        gaps.ecdf(between, color="#08519c")
    gaps.set(xlabel="milliseconds", ylabel="share of tokens", title="time between two tokens")
    for axes in (over_time, to_first, gaps):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    try:
        replace_file(path, lambda temporary: figure.savefig(temporary, format=path.suffix[1:].lower()))
    finally:
        pyplot.close(figure)
