"""Help texts of the command line that show every option's name in full, at any width of the
terminal.

typer's own help is a table made by the library rich, which truncates long names in narrow
terminals. Here the help text of a long option starts on the next line, and no line ends within a
name. Options are listed under the titles of their `rich_help_panel`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tilewise.cli.options import expand_options

__all__ = ["App"]

_MOST_WIDTH = 120  # characters of a line
_OPTION = re.compile(r"--[a-z][a-z-]*")
_HYPHEN = "\N{NON-BREAKING HYPHEN}"  # of an option's name, while lines are wrapped


class App(typer.Typer):
    """A group of commands.

    Args:
        name: name of the group.
        help: description of the group.
    """

    def __init__(self, name: str, help: str) -> None:
        super().__init__(
            name=name,
            help=help,
            cls=_Group,
            add_completion=False,
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"max_content_width": _MOST_WIDTH},
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        """Decorator that makes a function a command of this group."""
        register = super().command(name, cls=_Command, **settings)
        return lambda function: register(expand_options(function))


class _Command(TyperCommand):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.help = _unbroken(self.help)

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_HYPHEN, "-")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class _Group(TyperGroup):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.help = _unbroken(self.help)

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_HYPHEN, "-")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Format the options, then the commands with the first paragraph of their help."""
        _write_options(self, ctx, formatter)
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            paragraphs = inspect.cleandoc((command and command.help) or "").split("\n\n")
            rows.append((name, " ".join(paragraphs[0].split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _unbroken(text: str | None) -> str:
    """A text in which the names of options have non-breaking hyphens."""
    return _OPTION.sub(lambda option: option[0].replace("-", _HYPHEN), text or "")


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        row = param.get_help_record(ctx)
        if row is not None:
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            title = getattr(param, "rich_help_panel", None) or usual
            sections.setdefault(title, []).append((row[0], _unbroken(row[1])))
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
