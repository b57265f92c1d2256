"""What several commands' arguments share: their help, their checks, where they talk to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from tilewise.core import MODEL_DTYPES, CheckpointError, ConfigError, choose_dtype

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "DTYPE_HELP",
    "IGNORE",
    "MODEL",
    "REVISION",
    "SPECULATIVE_HELP",
    "ignore_option",
    "json_object",
    "known_dtype",
    "make_console",
    "names_option",
]

MODEL = typer.Argument(
    metavar="MODEL",
    help="A Hugging Face directory (config.json, weights, tokenizer.json), or owner/name on the hub.",
    show_default=False,
)
REVISION = typer.Option(help="Of a model on the hub: a branch, tag or commit.", show_default=False)


def ignore_option(panel: str | None = None) -> Any:
    """`--ignore-config-field`, in a panel of a command's help."""
    return typer.Option(
        "--ignore-config-field",
        metavar="NAME",
        rich_help_panel=panel,
        help="Ignore this field of config.json, where it is refused although it decides nothing of what the model "
        "computes; may be given several times.",
        show_default=False,
    )


IGNORE = ignore_option()
DTYPE_HELP = (
    "Of weights and activations: bf16 or bfloat16; f32, float32 or fp32; auto: as config.json says, bf16 when that is "
    "another type."
)


_SPECULATIVE = "--speculative-config"
SPECULATIVE_HELP = (
    "How next tokens are guessed, as JSON, for example "
    '{"num_speculative_tokens": 4, "prompt_lookup_max": 3}. No text depends on it.'
)


def json_object(text: str | None) -> dict[str, Any] | None:
    """`--speculative-config`, which is a JSON object, or a usage error."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"it must be JSON: {error}", param_hint=_SPECULATIVE) from None
    if not isinstance(found, dict):
        raise typer.BadParameter("it must be a JSON object", param_hint=_SPECULATIVE)
    return found


def known_dtype(name: str) -> str:
    """An element type's name, or a usage error."""
    try:
        choose_dtype(name, None)
    except ConfigError:
        raise typer.BadParameter(f"{name!r} is not one of auto, {', '.join(MODEL_DTYPES)}") from None
    return name


@contextmanager
def names_option(option: str) -> Iterator[None]:
    """Wraps what reads generation_config.json: its errors name the option of this command that leaves it out.

    Args:
        option: as it is written.
    """
    try:
        yield
    except CheckpointError as error:
        if "[checkpoint.load_generation_config]" in str(error):
            text = str(error).replace("(generation_config=False in Python)", f"({option})")
            raise CheckpointError(text) from None
        raise


def make_console(stderr: bool) -> Console:
    """Where a command talks to a person."""
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True)
