"""Options that several commands share: declarations, help texts and parsing.

`Options` in a command's signature stands for all options of a group of settings. `expand_options`
replaces it by options derived from the declarations in `tilewise.settings`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, get_type_hints

import typer

from tilewise.core import CheckpointError, ConfigError
from tilewise.files.reading import Unreadable, decode_text, read_whole
from tilewise.settings import Setting, settings_of

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "MODEL",
    "REVISION",
    "Options",
    "Values",
    "expand_options",
    "make_console",
    "names_option",
    "read_text",
    "size",
]

Values = dict[str, Any]
"""Settings of a command line, by name."""
MODEL = typer.Argument(
    metavar="MODEL",
    help="A Hugging Face directory (config.json, weights, tokenizer.json), a GGUF file, or owner/name or "
    "owner/name:Q4_K_M on the hub.",
    show_default=False,
)
REVISION = typer.Option(help="Of a model on the hub: a branch, tag or commit.", show_default=False)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?([kmgKMGT]?)(?:i?B)?")
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Options:
    """The options of a group of settings, as the annotation of one parameter: `Annotated[Values,
    Options(...)]`.

    The command gets a dictionary of the settings that the command line gives, and of `defaults`.

    Args:
        group: a dataclass whose fields are declared as settings.
        only: names of the settings that the command has; empty for all settings of the group.
        but: names of settings that the command does not have.
        defaults: default values that differ from the declared defaults, by name.
        panel: title above the options; None for the declared titles.
        decided_by: what decides a setting if its option is not given: its `default`,
            generation_config.json of the `model`, or the `server` that the command connects to.
    """

    group: type
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    panel: str | None = None
    decided_by: Literal["default", "model", "server"] = "default"

    def settings(self) -> list[Setting]:
        """The settings for which the command has an option."""
        declared = settings_of(self.group)
        names = self.only or tuple(name for name, one in declared.items() if one.on_command_line)
        return [declared[name] for name in names if name not in self.but]

    def parameters(self) -> list[inspect.Parameter]:
        """An option for each setting. Options have no defaults, so that the dictionary has only
        options that were given.
        """
        return [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=self._annotation(one)
            )
            for one in self.settings()
        ]

    def take(self, values: Values) -> Values:
        """Remove this group's values from those of a command line, and return those that are set.

        Args:
            values: values by name. None and empty lists count as not set.
        """
        chosen: Values = {}
        for one in self.settings():
            value = values.pop(one.name)
            if value is not None and value != []:
                chosen[one.name] = value is not one.is_switched_off if one.kind is bool else value
        return {**self.defaults, **chosen}

    def _annotation(self, one: Setting) -> Any:
        kind: Any = one.kind if one.kind in (bool, int, float) else str
        more: dict[str, Any] = {"metavar": one.metavar or ("N" if kind in (int, float) else None)}
        if one.choices:
            more = {"metavar": one.metavar or f"[{'|'.join(one.choices)}]", "callback": _require_choice(one)}
        elif one.reader != "value":
            kind, more = str, {"parser": _reader(one), "metavar": one.metavar or one.reader.upper()}
        elif kind in (int, float):
            more["min"] = one.shown_bounds[0]
        if one.is_list:
            kind = list[str]
        option = typer.Option(
            *one.option_names,
            help=self._help(one),
            rich_help_panel=self.panel or one.panel,
            show_default=False,
            **more,
        )
        return Annotated[Optional[kind], option]  # noqa: UP045

    def _help(self, one: Setting) -> str:
        if one.name in self.defaults:
            one = replace(one, default=self.defaults[one.name], default_text="")
        text = f"{one.help} May be given several times." if one.is_list else one.help
        if one.shown_bounds[1] is not None and not one.choices:
            text += f" Range: {one.range_text}."
        default = one.written_default
        if self.decided_by == "model" and one.in_file:
            default = f"generation_config.json's, else {default}" if default else "generation_config.json's"
        return f"{text} Default: {default}." if default and self.decided_by != "server" else text


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command for typer, in which each parameter annotated with `Options` is replaced by the
    options of its group.

    Args:
        function: a command, annotated for typer.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Options] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        marks = getattr(hints[name], "__metadata__", ())
        group = next((mark for mark in marks if isinstance(mark, Options)), None)
        if group is None:
            kind = inspect.Parameter.KEYWORD_ONLY  # so that options may precede arguments
            parameters.append(parameter.replace(annotation=hints[name], kind=kind))
        else:
            groups[name] = group
            parameters += group.parameters()

    def command(**values: Any) -> None:
        settings = {name: group.take(values) for name, group in groups.items()}
        function(**values, **settings)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _require_choice(one: Setting) -> Callable[[Any], Any]:
    def check(value: str | None) -> str | None:
        if value is not None and value not in one.choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(one.choices)}")
        return value

    return check


def _reader(one: Setting) -> Callable[[str], Any]:
    """The parser of an option's text."""
    option = one.option_names[0]
    if one.reader == "size":
        return lambda text: size(text, option)
    if one.reader == "json":
        return lambda text: _json_object(text, option)
    return lambda text: read_text(Path(text), option, _MAX_FILE_BYTES)


def size(text: str | None, option: str) -> int | None:
    """Parse a number that may end in a unit: 2G, 32K, 1.5G. Lower-case units are powers of 1000,
    upper-case units powers of 1024.

    Args:
        text: value of the option; None if it is not set.
        option: name of the option, for a usage error.
    """
    if text is None:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 4096, 32K or 2G", param_hint=option)
    return (
        int(float(f"{match[1]}.{match[2] or 0}") * _UNITS[match[3]])
        if match[2]
        else int(match[1]) * _UNITS[match[3]]
    )


def read_text(path: Path, option: str, max_bytes: int) -> str:
    """The text of a file that an option names.

    Args:
        path: path of the file.
        option: name of the option, for the error.
        max_bytes: largest size of the file.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not text.
    """
    try:
        return decode_text(read_whole(path, max_bytes))
    except Unreadable as error:
        raise ConfigError(
            f"[cli.serve] {option} must be a text file; got {str(path)!r}: {error}; correct it"
        ) from None


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"it must be JSON: {error}", param_hint=option) from None
    if not isinstance(value, dict):
        raise typer.BadParameter("it must be a JSON object", param_hint=option)
    return value


@contextmanager
def names_option(option: str) -> Iterator[None]:
    """A `with` block that reads generation_config.json. Its errors name the option of this command
    that ignores the file.

    Args:
        option: the option as a user types it.
    """
    try:
        yield
    except CheckpointError as error:
        if "[checkpoint.load_generation_config]" in str(error):
            text = str(error).replace("(generation_config=False in Python)", f"({option})")
            raise CheckpointError(text) from None
        raise


def make_console(stderr: bool) -> Console:
    """The console for messages to people."""
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True)
