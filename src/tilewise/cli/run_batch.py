"""`tilewise run-batch`: a file of requests in OpenAI's format for batches, answered into another file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.options import (
    DTYPE_HELP,
    IGNORE,
    MODEL,
    REVISION,
    SPECULATIVE_HELP,
    json_object,
    known_dtype,
    make_console,
)
from tilewise.cli.refuse import before_work
from tilewise.core import ConfigError
from tilewise.core.reading import Unreadable, decode_text, read_whole

__all__ = ["run_batch"]

_MOST_BYTES = 1 << 28


def run_batch(
    model: Annotated[str, MODEL],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Lines of JSON, a request each; OpenAI's format.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--output-file", "-o", help="Where the answers go, a line each.", show_default=False),
    ],
    tp: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size", "--tp", min=1, help="Devices that share every layer (1, 2, 4, ...)."
        ),
    ] = 1,
    dp: Annotated[
        int,
        typer.Option(
            "--data-parallel-size", "--dp", min=1, help="Copies of the model that share the requests."
        ),
    ] = 1,
    speculative_config: Annotated[str | None, typer.Option(metavar="JSON", help=SPECULATIVE_HELP)] = None,
    dtype: Annotated[str, typer.Option(callback=known_dtype, metavar="TYPE", help=DTYPE_HELP)] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="The model's context; default: as config.json says.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Texts that are written at a time.")] = 64,
    revision: Annotated[str | None, REVISION] = None,
    ignore_config_field: Annotated[list[str] | None, IGNORE] = None,
) -> None:
    """Answer a file of requests, many at a time.

    Each line of FILE has `custom_id`, `method`, `url` (`/v1/chat/completions` or `/v1/completions`) and `body`. A line
    that is wrong gets an answer that says so (status code 400); the others are answered.

    Example: `tilewise run-batch demo/model requests.jsonl -o answers.jsonl`
    """
    from tilewise.checkpoint import check_replaceable, check_writable, find_model
    from tilewise.core.writing import replace_text, writing
    from tilewise.graph.parallel import ProgressTracker
    from tilewise.serve import Engine
    from tilewise.server import ServerSettings, answer_lines
    from tilewise.server.requests.model_files import ModelFiles

    guessing = json_object(speculative_config)
    try:
        lines = decode_text(read_whole(file, _MOST_BYTES)).split("\n")  # JSON's texts may hold other ends
    except Unreadable as error:
        raise ConfigError(
            f"[cli.run_batch] FILE must be lines of JSON; got {str(file)!r}: {error}; correct it"
        ) from None
    if out.exists() and out.samefile(file):
        raise ConfigError(
            f"[cli.run_batch] the answers must not replace the requests; got {str(out)!r} for both; choose another file"
        )
    check_writable(out.parent)
    check_replaceable(out, is_directory=False)
    with before_work():
        place = find_model(model, revision)
        ignore = ignore_config_field or []
        files = ModelFiles(str(place), ServerSettings(), {"ignore_config_fields": ignore})
        engine = Engine(
            place,
            tensor_parallel_size=tp,
            data_parallel_size=dp,
            speculative_config=guessing,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            enable_prompt_pacing=False,
            ignore_config_fields=ignore,
        )
    with engine:
        answers = list(answer_lines(engine, files, lines, ProgressTracker()))
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, "".join(json.dumps(answer) + "\n" for answer in answers))
    num_failed = sum(answer["error"] is not None for answer in answers)
    make_console(stderr=True).print(
        f"{len(answers) - num_failed} of {len(answers)} requests answered", highlight=False
    )
