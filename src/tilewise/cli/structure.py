"""`--json-schema`, `--regex`, `--choice` and `--grammar` of `tilewise generate`: the structure that
a text must follow.

It reads files and compiles grammars before weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewise.core import ConfigError
from tilewise.files.reading import Unreadable, decode_text, read_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tilewise.models import ModelConfig
    from tilewise.serve import StructuredOutputsParams

__all__ = ["CHOICE", "GRAMMAR", "JSON_SCHEMA", "REGEX", "check_structure", "find_structure"]

_STRUCTURE = "What the text follows"
_MOST_BYTES = 1 << 20
JSON_SCHEMA = typer.Option(
    "--json-schema",
    metavar="FILE|TEXT",
    rich_help_panel=_STRUCTURE,
    help="JSON of this schema: a file, or the schema itself where it begins with `{`. `{}` is any JSON.",
    show_default=False,
)
REGEX = typer.Option(
    rich_help_panel=_STRUCTURE,
    help="What this regular expression matches as a whole (Rust's syntax).",
    show_default=False,
)
CHOICE = typer.Option(
    rich_help_panel=_STRUCTURE, help="One of these; given once for each text.", show_default=False
)
GRAMMAR = typer.Option(
    metavar="FILE",
    rich_help_panel=_STRUCTURE,
    help="The grammar of this file, in Lark's syntax: its rule `start`.",
    show_default=False,
)


def find_structure(
    json_schema: str | None, regex: str | None, choice: Sequence[str] | None, grammar: Path | None
) -> StructuredOutputsParams | None:
    """The structure that a command line gives, if any.

    Args:
        json_schema: a schema, or the name of its file.
        regex: a regular expression.
        choice: texts; None or empty if the option is not given.
        grammar: a file.

    Raises:
        ConfigError: a file cannot be read, or its content is invalid.
        BadParameter: several options are given.
    """
    from tilewise.serve import StructuredOutputsParams

    found: dict[str, Any] = {"regex": regex, "choice": choice or None}
    given = [name for name, value in found.items() if value is not None]
    given += [
        name for name, value in (("json-schema", json_schema), ("grammar", grammar)) if value is not None
    ]
    if not given:
        return None
    if len(given) > 1:
        raise typer.BadParameter(f"a text follows one of these: {', '.join(f'--{name}' for name in given)}")
    if json_schema is not None:
        is_text = json_schema.lstrip().startswith("{")
        found["json"] = json_schema if is_text else _read("--json-schema", Path(json_schema))
    if grammar is not None:
        found["grammar"] = _read("--grammar", grammar)
    return StructuredOutputsParams(**found)


def check_structure(
    wanted: StructuredOutputsParams | None, tokenizer: Tokenizer, file: Mapping[str, Any], model: ModelConfig
) -> None:
    """Compile a structure for a model, to report errors early.

    Args:
        wanted: what a text follows; None for nothing.
        tokenizer: tokenizer of the model.
        file: content of generation_config.json.
        model: configuration of the model.

    Raises:
        ConfigError: it is invalid or too large, or no text can follow it; or the model has no end token.
    """
    from tilewise.serve.model import end_ids
    from tilewise.serve.structured import Grammars

    if wanted is not None:
        Grammars(tokenizer, end_ids(dict(file), model)).prepare(wanted)


def _read(option: str, path: Path) -> str:
    try:
        return decode_text(read_whole(path, _MOST_BYTES))
    except Unreadable as error:
        raise ConfigError(
            f"[cli.generate] {option} must name a file of UTF-8 text; got {str(path)!r}: {error}; correct it"
        ) from None
