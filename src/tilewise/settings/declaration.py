"""How a setting is declared: a dataclass field whose metadata is a `Setting`.

A group of settings is a frozen dataclass. Interfaces call `settings_of(group)` and derive their options, fields, checks
and tables from what it returns.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from textwrap import fill
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tilewise.core import Validator

__all__ = ["Setting", "check_settings", "documented", "json_type", "narrowed", "setting", "settings_of"]

T = TypeVar("T")
_KEY, _CHANGES = "setting", "changes"
_LARGEST_BOUND = 1 << 16


@dataclass(frozen=True)
class Setting:
    """What the interfaces know of one setting.

    Attributes:
        help: one or two sentences, for `--help`, docstrings, HTTP's description and the tables of the documentation.
        low: smallest value; None for no bound.
        high: largest value; None for no bound.
        is_low_excluded: whether the value must be above `low`.
        choices: names that the value must be one of; empty for any.
        options: names on the command line; empty for the name with hyphens.
        on_command_line: whether commands have an option for it.
        is_switched_off: whether the option stands for False.
        panel: title above the option in `--help`.
        metavar: what `--help` shows in the place of the value.
        reader: how an option's text is read: as a plain value, a size such as 2G, JSON, or the text of a file.
        default_text: description of the default, if it is not a plain value.
        in_body: whether requests of `/v1/completions` and `/v1/chat/completions` have a field of this name.
        in_response_body: the same for `/v1/responses`.
        in_file: whether generation_config.json may have it: `always` applies; `sampling` applies if tokens are
            sampled; `combined` has another name there, or depends on others (`generate.combine_settings`).
        is_server_default: whether `LLM` and the server take it from that file if a request does not set it.
        name: of the field.
        kind: type of the field without `None`.
        is_optional: whether the value may be None.
        default: of the field.
    """

    help: str
    low: float | None = None
    high: float | None = None
    is_low_excluded: bool = False
    choices: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    on_command_line: bool = True
    is_switched_off: bool = False
    panel: str | None = None
    metavar: str | None = None
    reader: Literal["value", "size", "json", "file"] = "value"
    default_text: str = ""
    in_body: bool = False
    in_response_body: bool = False
    in_file: Literal["", "always", "sampling", "combined"] = ""
    is_server_default: bool = False
    name: str = ""
    kind: Any = None
    is_optional: bool = False
    default: Any = None

    @property
    def is_list(self) -> bool:
        """Whether the value is a sequence; one text is a sequence of one."""
        kinds = get_args(self.kind) if _is_union(self.kind) else (self.kind,)
        return any(get_origin(kind) in (Sequence, tuple) for kind in kinds)

    @property
    def item_kind(self) -> Any:
        """Type of a sequence's items."""
        kinds = get_args(self.kind) if _is_union(self.kind) else (self.kind,)
        return next(get_args(kind)[0] for kind in kinds if get_origin(kind) in (Sequence, tuple))

    @property
    def option_names(self) -> tuple[str, ...]:
        """Names on the command line."""
        return self.options or (f"--{self.name.replace('_', '-')}",)

    @property
    def shown_bounds(self) -> tuple[float | None, float | None]:
        """The bounds to show; None for those that only keep native integers from overflowing."""
        low = None if self.low is None or self.low < -_LARGEST_BOUND else self.low
        return low, None if self.high is None or self.high > _LARGEST_BOUND else self.high

    @property
    def range_text(self) -> str:
        """The range in words; empty if no bound is shown."""
        if self.choices:
            return ", ".join(self.choices)
        low, high = (None if bound is None else f"{bound:g}" for bound in self.shown_bounds)
        if self.is_low_excluded:
            return f"above {low}" + (f", at most {high}" if high else "")
        if low and high:
            return f"{low} to {high}"
        return f"at least {low}" if low else f"at most {high}" if high else ""

    @property
    def written_default(self) -> str:
        """The default in words; empty if it need not be shown."""
        if self.default_text or self.default is None or self.default is False or self.default == ():
            return self.default_text
        if self.default is True:
            return "on"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def setting(default: T, help: str, **more: Any) -> T:
    """A dataclass field that declares a setting.

    Args:
        default: of the field.
        help: one or two sentences.
        **more: further attributes of `Setting` by name.
    """
    return field(default=default, metadata={_KEY: Setting(help, **more)})


def narrowed(default: T, **changes: Any) -> T:
    """A field of a subclass that has another default or type than the declaration in its base class.

    Args:
        default: of the field.
        **changes: attributes of `Setting` that differ, by name.
    """
    return field(default=default, metadata={_CHANGES: changes})


@cache
def settings_of(group: type) -> Mapping[str, Setting]:
    """The settings of a group by name, in the order of its fields.

    Args:
        group: a dataclass; its fields that are not declared as settings are left out.
    """
    hints = get_type_hints(group)
    declared: dict[str, Setting] = {}
    for one in fields(group):
        declaration = None
        for base in reversed(group.__mro__):
            own = base.__dict__.get("__dataclass_fields__", {}).get(one.name)
            if own is not None and _KEY in own.metadata:
                declaration = own.metadata[_KEY]
        if declaration is not None:
            kind, is_optional = _without_none(hints[one.name])
            more = {"name": one.name, "kind": kind, "is_optional": is_optional, "default": one.default}
            declared[one.name] = replace(declaration, **{**more, **one.metadata.get(_CHANGES, {})})
    return declared


def documented(group: type[T]) -> type[T]:
    """A class decorator: lists the settings' help texts in the docstring, as `Args`.

    Args:
        group: a dataclass whose docstring has a line `Args:`.
    """
    lines = []
    hashable: Any = group
    for name, one in settings_of(hashable).items():
        text = f"{name}: {one.help}"
        lines.append(fill(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12))
    head, mark, tail = (group.__doc__ or "").partition("    Args:\n")
    group.__doc__ = head + mark + "\n".join(lines) + "\n" + tail
    return group


def check_settings(values: object, group: type, validator: Validator, call: str) -> None:
    """Check the numbers, truth values and names of a frozen dataclass against their declarations.

    Args:
        values: an object of a dataclass. Whole numbers of other types than `int` become `int`.
        group: the class whose declarations count.
        validator: makes the error.
        call: the function that the error names.

    Raises:
        ConfigError: a value has the wrong type or lies outside its range.
    """
    for name, one in settings_of(group).items():
        value = getattr(values, name)
        if value is None and one.is_optional:
            continue
        if one.choices:
            validator.choice(call, name, value, one.choices)
        elif one.kind is bool:
            validator.truth(call, name, value)
        elif one.kind is int:
            assert one.low is not None and one.high is not None
            object.__setattr__(
                values, name, validator.integer(call, name, value, int(one.low), int(one.high))
            )
        elif one.kind is float:
            low = -float("inf") if one.low is None else one.low
            validator.number(call, name, value, low, float("inf") if one.high is None else one.high)
            if one.is_low_excluded and value == one.low:
                advice = f"pass {one.default} to disable it"
                validator.invalid(call, f"{name} must be above {one.low:g}", str(value), advice)


def json_type(one: Setting, **bounds: float) -> Any:
    """The type of a JSON field for pydantic: a number within its range, or a truth value.

    Args:
        one: a setting whose value is a number or a truth value.
        **bounds: `ge`, `gt`, `le` or `lt`, which come before the declared range.
    """
    from pydantic import Field

    declared: dict[str, Any] = {}
    if one.low is not None:
        declared["gt" if one.is_low_excluded else "ge"] = one.low
    if one.high is not None:
        declared["le"] = one.high
    if one.kind is float:
        declared["allow_inf_nan"] = False
    return Annotated[one.kind, Field(**{**declared, **bounds}, description=one.help)]


def _without_none(kind: Any) -> tuple[Any, bool]:
    if not _is_union(kind):
        return kind, False
    kinds = tuple(one for one in get_args(kind) if one is not types.NoneType)
    return Union[kinds], len(kinds) < len(get_args(kind))  # noqa: UP007


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)
