"""Reads tokenizer_config.json and chat template files: special tokens, and the template that
renders a conversation.

This module only reads these files. The package `generate` renders templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tilewise.checkpoint.companions import Companions, open_companions
from tilewise.core import CheckpointError, Validator, shown
from tilewise.files.reading import Unreadable, decode_text, parse_json

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
    chat_template.jinja takes precedence. Empty if there are no such files. Of a GGUF file, the same
    from its metadata.

    Raises:
        CheckpointError: a file cannot be read, or a field has the wrong type.
    """
    files = open_companions(_validate.path("load_tokenizer_config", "a model directory", directory))
    name = "tokenizer_config.json"
    try:
        has_file = files.has(name)
        settings = parse_json(files.read(name, _MAX_CONFIG_BYTES), _File) if has_file else _File()
        added = {_id(key): token for key, token in settings.added_tokens_decoder.items()}
        templates = _named(settings.chat_template)
    except Unreadable as error:
        raise _unreadable(files, name, error) from None
    for called, name in _template_files(files).items():
        try:
            templates[called] = decode_text(files.read(name, _MAX_TEMPLATE_BYTES))
        except Unreadable as error:
            raise _unreadable(files, name, error) from None
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


def _unreadable(files: Companions, name: str, error: Unreadable) -> CheckpointError:
    base = name.rpartition("/")[2]
    return CheckpointError(
        f"[checkpoint.load_tokenizer_config] {base} must be as transformers writes it; got {files.called(name)}: "
        f"{error}; repair it, or download it again"
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


def _template_files(files: Companions) -> dict[str, str]:
    """The files of templates, by the templates' names."""
    default = "chat_template.jinja"
    names = {"default": default} if files.has(default) else {}
    more = files.matching("additional_chat_templates/*.jinja")
    return names | {Path(name).stem: name for name in more}
