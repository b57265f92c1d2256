"""`--json-schema`, `--regex`, `--choice` and `--grammar` of `tilewise generate`: the structure that
a text must follow.

Files are read and grammars are compiled before weights are read, so that mistakes are reported
early.
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

_STRUCTURE = "Structure of the text"
_MOST_BYTES = 1 << 20
JSON_SCHEMA = typer.Option(
    "--json-schema",
    metavar="FILE|TEXT",
    rich_help_panel=_STRUCTURE,
    help="JSON of this schema: a file, or the schema itself if it begins with `{`. `{}` is any JSON.",
    show_default=False,
)
REGEX = typer.Option(
    rich_help_panel=_STRUCTURE,
    help="Text that this regular expression matches as a whole (Rust's syntax).",
    show_default=False,
)
CHOICE = typer.Option(
    rich_help_panel=_STRUCTURE, help="One of these texts; repeat the option for each.", show_default=False
)
GRAMMAR = typer.Option(
    metavar="FILE",
    rich_help_panel=_STRUCTURE,
    help="Text of the grammar in this file, in Lark's syntax: its rule `start`.",
    show_default=False,
)


def find_structure(
    json_schema: str | None, regex: str | None, choice: Sequence[str] | None, grammar: Path | None
) -> StructuredOutputsParams | None:
    """The structure that a command line asks for; None if it asks for none.

    Args:
        json_schema: a JSON schema, or the name of its file.
        regex: a regular expression.
        choice: the allowed texts; None or empty if the option is not set.
        grammar: name of a file with a grammar.

    Raises:
        ConfigError: a file cannot be read, or its content is invalid.
        BadParameter: several options are set.
    """
    from tilewise.serve import StructuredOutputsParams

    values: dict[str, Any] = {"regex": regex, "choice": choice or None}
    names = [name for name, value in values.items() if value is not None]
    names += [
        name for name, value in (("json-schema", json_schema), ("grammar", grammar)) if value is not None
    ]
    if not names:
        return None
    if len(names) > 1:
        raise typer.BadParameter(f"only one of these is possible: {', '.join(f'--{name}' for name in names)}")
    if json_schema is not None:
        is_text = json_schema.lstrip().startswith("{")
        values["json"] = json_schema if is_text else _read("--json-schema", Path(json_schema))
    if grammar is not None:
        values["grammar"] = _read("--grammar", grammar)
    return StructuredOutputsParams(**values)


def check_structure(
    structure: StructuredOutputsParams | None,
    tokenizer: Tokenizer,
    file: Mapping[str, Any],
    model: ModelConfig,
) -> None:
    """Compile a structure for a model, to report errors early.

    Args:
        structure: the structure; None if texts may be any text.
        tokenizer: tokenizer of the model.
        file: content of generation_config.json.
        model: configuration of the model.

    Raises:
        ConfigError: the structure is invalid or too large, or no text can follow it. Or the model
            has no end token.
    """
    from tilewise.serve.model import end_ids
    from tilewise.serve.structured import Grammars

    if structure is not None:
        Grammars(tokenizer, end_ids(dict(file), model)).prepare(structure)


def _read(option: str, path: Path) -> str:
    try:
        return decode_text(read_whole(path, _MOST_BYTES))
    except Unreadable as error:
        raise ConfigError(
            f"[cli.generate] {option} must name a UTF-8 text file; got {str(path)!r}: {error}; correct it"
        ) from None
