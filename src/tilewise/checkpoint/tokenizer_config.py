"""Reads tokenizer_config.json and chat template files: special tokens, and the template that
renders a conversation.

This module only reads these files. The package `generate` renders templates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tilewise.core import CheckpointError, Validator, shown
from tilewise.files.reading import Unreadable, decode_text, read_json, read_whole

__all__ = ["AddedTokenFile", "TokenizerConfig", "load_tokenizer_config"]

_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_CONFIG_BYTES = 64 << 20
_MOST_TOKENS = 1 << 20
_validate = Validator("checkpoint", CheckpointError)
_Text = Annotated[str, Field(min_length=1, max_length=1 << 12)]


class AddedTokenFile(BaseModel):
    """A token with its properties, in the files' notation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    content: _Text
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    single_word: bool = False
    special: bool = False


def _none_of_empty(token: object) -> object:
    """None for an empty string. In the first conversions of Llama 1, an empty string means that
    there is no such token.
    """
    content = token.get("content") if isinstance(token, dict) else token
    return None if content == "" else token


_Role = Annotated[_Text | AddedTokenFile | None, BeforeValidator(_none_of_empty)]


class _Template(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: _Text
    template: str


class _File(BaseModel):
    """The used fields of tokenizer_config.json."""

    model_config = ConfigDict(strict=True, extra="ignore")

    bos_token: _Role = None
    eos_token: _Role = None
    unk_token: _Role = None
    pad_token: _Role = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    tokenizer_class: str | None = None
    chat_template: str | list[_Template] | None = None
    added_tokens_decoder: Annotated[dict[str, AddedTokenFile], Field(max_length=_MOST_TOKENS)] = Field(
        default_factory=dict
    )


@dataclass(frozen=True)
class TokenizerConfig:
    """The content of tokenizer_config.json and of the template files.

    Attributes:
        special_tokens: texts of `bos_token`, `eos_token`, `unk_token` and `pad_token`, if they
            exist.
        add_bos_token: whether texts begin with `bos_token`. Used only if there is no
            tokenizer.json.
        add_eos_token: whether texts end with `eos_token`. Used only if there is no tokenizer.json.
        add_prefix_space: whether texts are encoded as if a space preceded them.
        tokenizer_class: name of the class in transformers.
        added_tokens: added tokens by id.
        chat_templates: chat templates by name; a template without a name is `default`.
    """

    special_tokens: Mapping[str, str]
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_prefix_space: bool
    tokenizer_class: str | None
    added_tokens: Mapping[int, AddedTokenFile]
    chat_templates: Mapping[str, str]


def load_tokenizer_config(directory: str | Path) -> TokenizerConfig:
    """The content of tokenizer_config.json and of chat_template.jinja. If both have a template,
    chat_template.jinja takes precedence. Empty if there are no such files.

    Raises:
        CheckpointError: a file cannot be read, or a field has the wrong type.
    """
    place = _validate.path("load_tokenizer_config", "a model directory", directory)
    path = place / "tokenizer_config.json"
    try:
        settings = read_json(path, _File, _MAX_CONFIG_BYTES) if os.path.lexists(path) else _File()
        added = {_id(key): token for key, token in settings.added_tokens_decoder.items()}
        templates = _named(settings.chat_template)
    except Unreadable as error:
        raise _unreadable(path, error) from None
    for name, file in _template_files(place).items():
        try:
            templates[name] = decode_text(read_whole(file, _MAX_TEMPLATE_BYTES))
        except Unreadable as error:
            raise _unreadable(file, error) from None
    roles = {name: getattr(settings, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return TokenizerConfig(
        {k: v.content if isinstance(v, AddedTokenFile) else v for k, v in roles.items() if v is not None},
        settings.add_bos_token,
        settings.add_eos_token,
        bool(settings.add_prefix_space),
        settings.tokenizer_class,
        added,
        templates,
    )


def _unreadable(path: Path, error: Unreadable) -> CheckpointError:
    return CheckpointError(
        f"[checkpoint.load_tokenizer_config] {path.name} must be as transformers writes it; got {str(path)!r}: {error}"
        "; repair it, or download it again"
    )


def _id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise Unreadable(f"added_tokens_decoder must have ids as keys; got {shown(key)}")
    return int(key)


def _named(chat_template: str | list[_Template] | None) -> dict[str, str]:
    """Templates by name."""
    entries = (
        [("default", chat_template)]
        if isinstance(chat_template, str)
        else [(t.name, t.template) for t in chat_template or ()]
    )
    templates: dict[str, str] = {}
    for name, template in entries:
        if name in templates:
            raise Unreadable(f"chat_template must name each template once; got {shown(name)} twice")
        if len(template) > _MAX_TEMPLATE_BYTES:
            raise Unreadable(f"chat_template must have at most {_MAX_TEMPLATE_BYTES} characters")
        templates[name] = template
    return templates


def _template_files(place: Path) -> dict[str, Path]:
    """The files of templates, by name."""
    files = {"default": place / "chat_template.jinja"}
    folder = place / "additional_chat_templates"
    if folder.is_dir():
        files |= {path.stem: path for path in sorted(folder.glob("*.jinja"))[:100]}
    return {name: path for name, path in files.items() if os.path.lexists(path)}
