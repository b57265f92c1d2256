"""`tilewise run-batch`: answers a file of requests in OpenAI's batch format and writes another
file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.before_work import before_work
from tilewise.cli.options import MODEL, REVISION, Options, Values, make_console
from tilewise.core import ConfigError
from tilewise.files.reading import Unreadable, decode_text, read_whole
from tilewise.settings import EngineSettings

__all__ = ["run_batch"]

_MOST_BYTES = 1 << 28
_ENGINE = (
    *(
        "tensor_parallel_size",
        "data_parallel_size",
        "speculative_config",
        "dtype",
        "quantization",
        "quantized_matmul",
        "kv_cache_dtype",
        "max_model_len",
        "max_num_seqs",
    ),
    "ignore_config_fields",
)


def run_batch(
    model: Annotated[str, MODEL],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="One request per line, JSON in OpenAI's batch format.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--output-file", "-o", help="File for the answers, one per line.", show_default=False),
    ],
    revision: Annotated[str | None, REVISION] = None,
    *,
    engine: Annotated[Values, Options(EngineSettings, only=_ENGINE)],
) -> None:
    """Answer a file of requests, many at a time.

    Each line of FILE has `custom_id`, `method`, `url` (`/v1/chat/completions` or `/v1/completions`) and `body`. An
    invalid line gets an error as its answer (status code 400); the other lines are answered.

    Example: `tilewise run-batch demo/model requests.jsonl -o answers.jsonl`
    """
    from tilewise.checkpoint import check_replaceable, check_writable, find_model
    from tilewise.files.writing import replace_text, writing
    from tilewise.graph.parallel import ProgressTracker
    from tilewise.serve import Engine
    from tilewise.server import ServerSettings, answer_lines
    from tilewise.server.requests.model_files import ModelFiles

    try:
        lines = decode_text(read_whole(file, _MOST_BYTES)).split(
            "\n"
        )  # JSON strings may contain other line separators
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
        files = ModelFiles(str(place), ServerSettings(), engine)
        writer = Engine(place, **engine, enable_prompt_pacing=False)
    with writer:
        answers = list(answer_lines(writer, files, lines, ProgressTracker()))
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, "".join(json.dumps(answer) + "\n" for answer in answers))
    num_failed = sum(answer["error"] is not None for answer in answers)
    make_console(stderr=True).print(
        f"{len(answers) - num_failed} of {len(answers)} requests answered", highlight=False
    )
