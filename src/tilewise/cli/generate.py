"""`tilewise generate`: its arguments. What it does stands in write.py and converse.py."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.options import (
    DTYPE_HELP,
    MODEL,
    REVISION,
    ignore_option,
    known_dtype,
    make_console,
    names_option,
)
from tilewise.cli.structure import CHOICE, GRAMMAR, JSON_SCHEMA, REGEX, find_structure

__all__ = ["generate"]

_LENGTH, _CHOICE, _AVOID, _MODEL = "Length", "Choice of tokens", "What is avoided", "Model"
_FROM_FILE = "Default: as generation_config.json says, else"


def _known_load_format(name: str) -> str:
    if name not in ("auto", "dummy"):
        raise typer.BadParameter(f"{name!r} is not one of auto, dummy")
    return name


def generate(
    model: Annotated[str, MODEL],
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue; `-` reads it from standard input. With `--chat` the first message.",
            show_default=False,
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Continue the text of this file, every byte of it.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Converse, with the model's chat template: a line is a message, `/reset` begins anew, `/exit` or "
            "Ctrl-D ends, Ctrl-C stops an answer.",
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With `--chat`: what the model is told before the conversation.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=_LENGTH,
            help="Stop after so many new tokens; refused when prompt and these do not fit the model's context, since a "
            f"shorter text than asked for would be cut without a word. {_FROM_FILE} 128 (with --chat what there is "
            "room for), or what the context has room for.",
        ),
    ] = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            rich_help_panel=_LENGTH,
            help="No end token and no stop string ends the text before so many.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", rich_help_panel=_LENGTH, help="Write on after end tokens.")
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_LENGTH,
            help="End before this text; may be given several times.",
            show_default=False,
        ),
    ] = None,
    include_stop: Annotated[
        bool, typer.Option("--include-stop", rich_help_panel=_LENGTH, help="End behind a stop text instead.")
    ] = False,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=_LENGTH,
            help="The model's context: tokens of prompt and text together at most. Where RoPE is scaled as `dynamic` "
            "or `longrope` it chooses the frequencies, too: the text depends on it, and never on --max-tokens. "
            "Default: as config.json says; a conversation ends at 4096 unless this is given.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            rich_help_panel=_CHOICE,
            help=f"0 takes the likeliest token each time; more draws, the wilder the higher. {_FROM_FILE} 0.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=0, rich_help_panel=_CHOICE, help="Draw from the k likeliest tokens; 0: from all."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_CHOICE, help="Draw from the likeliest tokens of this total probability."
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_CHOICE, help="Draw from tokens at least this share as likely as the likeliest."
        ),
    ] = None,
    typical_p: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_CHOICE,
            help="Draw from the tokens whose surprise is nearest to the expected one, of this total probability.",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=-1, rich_help_panel=_CHOICE, help="Equal seeds write equal text; -1: a random one."),
    ] = 0,
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            min=1,
            rich_help_panel=_CHOICE,
            help="So many texts, each below a line `--- 1 of N ---`. Text i does not depend on how many there are.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_AVOID,
            help="Above 1: makes tokens of prompt and text less likely (transformers).",
        ),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_AVOID, help="Taken from the logits of tokens that were written (vLLM)."
        ),
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(rich_help_panel=_AVOID, help="The same, for every time that they were.")
    ] = None,
    no_repeat_ngram_size: Annotated[
        int | None,
        typer.Option(
            min=0, rich_help_panel=_AVOID, help="No so many tokens in a row twice; 0: no such rule."
        ),
    ] = None,
    bad_words: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_AVOID,
            help="A text not to write; may be given several times.",
            show_default=False,
        ),
    ] = None,
    json_schema: Annotated[str | None, JSON_SCHEMA] = None,
    regex: Annotated[str | None, REGEX] = None,
    choice: Annotated[list[str] | None, CHOICE] = None,
    grammar: Annotated[Path | None, GRAMMAR] = None,
    generation_config: Annotated[
        bool,
        typer.Option(
            "--generation-config/--no-generation-config",
            rich_help_panel=_MODEL,
            help="Take what is not said here from the model's generation_config.json.",
        ),
    ] = True,
    load_format: Annotated[
        str,
        typer.Option(
            callback=_known_load_format,
            metavar="FORMAT",
            rich_help_panel=_MODEL,
            help="auto: the model's weights; dummy: random ones, from config.json and the tokenizer alone.",
        ),
    ] = "auto",
    tp: Annotated[
        int,
        typer.Option(min=1, rich_help_panel=_MODEL, help="Devices that share every layer (1, 2, 4, ...)."),
    ] = 1,
    dtype: Annotated[
        str, typer.Option(callback=known_dtype, metavar="TYPE", rich_help_panel=_MODEL, help=DTYPE_HELP)
    ] = "bf16",
    revision: Annotated[str | None, REVISION] = None,
    ignore_config_field: Annotated[list[str] | None, ignore_option(_MODEL)] = None,
) -> None:
    """Continue a prompt with a model, as it is written, or converse with it.

    Text goes to standard output, everything else to standard error. What is not said here, the model's
    generation_config.json decides. The text does not depend on `--tp`.

    Example: `tilewise generate demo/model "def read_lines(path):" --tp 2 --temperature 0.8 --top-p 0.95`
    """
    from tilewise.checkpoint import find_model
    from tilewise.cli.converse import converse
    from tilewise.cli.write import Request, read_prompt, write_text

    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos or None,
        "stop": stop or None,
        "include_stop": include_stop or None,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "seed": secrets.randbits(63) if seed == -1 else seed,
        "n": 1 if chat else n,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "bad_words": bad_words or None,
    }
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("give a prompt or --prompt-file, not both")
    if prompt is None and prompt_file is None and not chat:
        raise typer.BadParameter("Missing argument 'PROMPT' (or --prompt-file, or --chat)")
    if system is not None and not chat:
        raise typer.BadParameter("--system is for --chat")
    if chat and (prompt == "-" or (n or 1) > 1):
        raise typer.BadParameter("--chat takes messages from standard input, and answers each once")
    structure = find_structure(json_schema, regex, choice, grammar)
    if structure is not None and chat:
        raise typer.BadParameter(
            "--chat writes freely: leave --json-schema, --regex, --choice and --grammar out"
        )
    request = Request(
        find_model(model, revision),
        {name: value for name, value in given.items() if value is not None},
        tp=tp,
        dtype=dtype,
        max_model_len=max_model_len,
        load_format=load_format,
        use_file=generation_config,
        console=make_console(stderr=True),
        structure=structure,
        ignore=tuple(ignore_config_field or ()),
    )
    text = None if prompt is None and prompt_file is None else read_prompt(prompt, prompt_file)
    with names_option("--no-generation-config"):
        if chat:
            converse(request, text, system)
        else:
            write_text(request, text or "")
