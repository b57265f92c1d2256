"""The arguments of `tilewise generate`. write.py and converse.py do the work."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.options import MODEL, REVISION, Options, Values, make_console, names_option
from tilewise.cli.structure import CHOICE, GRAMMAR, JSON_SCHEMA, REGEX, find_structure
from tilewise.settings import EngineSettings, Sampling

__all__ = ["generate"]

_ENGINE = (
    "tensor_parallel_size",
    "dtype",
    "quantization",
    "quantized_matmul",
    "kv_cache_dtype",
    "max_model_len",
    "load_format",
    "lora_modules",
    "generation_config",
    "ignore_config_fields",
)


def generate(
    model: Annotated[str, MODEL],
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue; `-` reads it from standard input. With `--chat` the first message.",
            show_default=False,
        ),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Continue the exact text of this file.")] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Converse, with the model's chat template: one message per line, `/reset` starts again, `/exit` or "
            "Ctrl-D ends, Ctrl-C stops an answer.",
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With `--chat`: the system message, before the conversation.")
    ] = None,
    *,
    sampling: Annotated[Values, Options(Sampling, decided_by="model")],
    json_schema: Annotated[str | None, JSON_SCHEMA] = None,
    regex: Annotated[str | None, REGEX] = None,
    choice: Annotated[list[str] | None, CHOICE] = None,
    grammar: Annotated[Path | None, GRAMMAR] = None,
    engine: Annotated[Values, Options(EngineSettings, only=_ENGINE, defaults={"dtype": "bf16"})],
    revision: Annotated[str | None, REVISION] = None,
) -> None:
    """Continue a prompt with a model, or converse with it.

    Text goes to standard output while it is generated, everything else to standard error. Settings
    without an option here come from the model's generation_config.json. The text does not depend on
    `--tp`. With `--n`, a line `--- 1 of N ---` precedes each text. A prompt that leaves no room
    in the context for `--max-tokens` is an error. Without that option a text ends at the end of the
    context at the latest; a conversation ends after 4096 tokens unless `--max-model-len` is given.

    Example: `tilewise generate demo/model "def read_lines(path):" --tp 2 --temperature 0.8 --top-p
    0.95`
    """
    from tilewise.checkpoint import find_model
    from tilewise.cli.converse import converse
    from tilewise.cli.write import Request, read_prompt, write_text

    if sampling.get("seed") == -1:
        sampling["seed"] = secrets.randbits(63)
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("give a prompt or --prompt-file, not both")
    if prompt is None and prompt_file is None and not chat:
        raise typer.BadParameter("Missing argument 'PROMPT' (or --prompt-file, or --chat)")
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    if chat and (prompt == "-" or sampling.setdefault("n", 1) > 1):
        raise typer.BadParameter("--chat reads messages from standard input and gives one answer to each")
    if len(engine.get("lora_modules", ())) > 1:
        raise typer.BadParameter("--lora must be given once: one text has one adapter")
    structure = find_structure(json_schema, regex, choice, grammar)
    if structure is not None and chat:
        raise typer.BadParameter("--chat does not support --json-schema, --regex, --choice and --grammar")
    request = Request(
        find_model(model, revision),
        sampling,
        EngineSettings(**engine),
        console=make_console(stderr=True),
        structure=structure,
    )
    text = None if prompt is None and prompt_file is None else read_prompt(prompt, prompt_file)
    with names_option("--no-generation-config"):
        if chat:
            converse(request, text, system)
        else:
            write_text(request, text or "")
