"""`[data]`, `[[data]]` and `[sequences]`: the sources of training data, and how they become sequences.

A source has a type, a path and the names of its fields. What concerns all sources (the context, and
whether documents are packed) is in `[sequences]`, because TOML has no place for it in a list. A
single `[data]` table may have these keys too. This module reads no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tilewise.train.section import FilePath, Section, WrongValue

__all__ = ["SEQUENCE_KEYS", "STDLIB", "DataSection", "DataSource", "merge_sequences"]

STDLIB = "stdlib"
_OF_TYPE: Mapping[str, Sequence[str]] = {
    "text": ("field_text",),
    "chat": (
        "field_messages",
        "field_tools",
        "message_property_mappings",
        "roles",
        "train_on_inputs",
        "mask_history",
    ),
    "prompt_completion": ("field_prompt", "field_completion", "train_on_inputs"),
    "pretokenized": ("field_input_ids", "field_labels"),
    "preference": ("field_prompt", "field_chosen", "field_rejected"),
}
_SPLIT = ("text", "pretokenized")  # types whose long documents are divided by default


class DataSource(Section):
    """One source of training data.

    Attributes:
        type: `text` (plain text, or a field of records), `chat` (conversations, rendered by the
            model's chat template), `prompt_completion` (pairs), `pretokenized` (ids), or
            `preference` (a prompt with a chosen and a rejected completion).
        path: a file, a directory, a pattern of file names, or `stdlib` for this Python's own
            sources (text only).
        weight: how often sequences of this source are used, relative to the weights of the others.
            Without weights, every sequence of every source is used once per epoch.
        held_out_percent: share of files, or of records, that is held out for evaluation.
        validation_path: data for evaluation, instead of a share of `path`.
        excess_length_strategy: what happens to a document that is longer than the context: it is
            divided (`split`, the default of text and ids), cut at its end (`truncate`, the default
            of conversations and pairs), or not used (`drop`).
        field_text, field_messages, field_tools, field_prompt, field_completion, field_chosen,
            field_rejected, field_input_ids, field_labels: names of fields.
        message_property_mappings: names of a message's `role` and `content`.
        roles: for `user`, `assistant`, `system` and `tool`, the names that the file has for them.
        train_on_inputs: count the labels of all tokens, not only of answers or completions.
        mask_history: count the labels of each conversation's last answer only.
    """

    type: Literal["text", "chat", "prompt_completion", "pretokenized", "preference"] = "text"
    path: FilePath = STDLIB
    weight: float | None = Field(default=None, gt=0, le=1e9)
    held_out_percent: float = Field(default=5.0, ge=0, lt=100)
    validation_path: FilePath | None = None
    excess_length_strategy: Literal["split", "truncate", "drop"] = "split"
    field_text: str = Field(default="text", min_length=1)
    field_messages: str = Field(default="messages", min_length=1)
    field_tools: str = Field(default="tools", min_length=1)
    field_prompt: str = Field(default="prompt", min_length=1)
    field_completion: str = Field(default="completion", min_length=1)
    field_chosen: str = Field(default="chosen", min_length=1)
    field_rejected: str = Field(default="rejected", min_length=1)
    field_input_ids: str = Field(default="input_ids", min_length=1)
    field_labels: str = Field(default="labels", min_length=1)
    message_property_mappings: dict[Literal["role", "content"], str] = Field(default_factory=dict)
    roles: dict[Literal["user", "assistant", "system", "tool"], tuple[str, ...]] = Field(default_factory=dict)
    train_on_inputs: bool = False
    mask_history: bool = False

    @field_validator("roles", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        """Converts TOML's lists to tuples."""
        if not isinstance(value, dict):
            return value
        return {role: tuple(names) if isinstance(names, list) else names for role, names in value.items()}

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_type(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        default = "split" if values.get("type", "text") in _SPLIT else "truncate"
        return {"excess_length_strategy": default, **values}

    @model_validator(mode="after")
    def _keys_belong_to_type(self) -> DataSource:
        usual = DataSource.model_construct()
        for kind, names in _OF_TYPE.items():
            others = [name for name in names if name not in _OF_TYPE[self.type]]
            odd = next((name for name in others if getattr(self, name) != getattr(usual, name)), None)
            if odd is not None:
                rule = f"{odd} needs type = {kind!r}, got {self.type!r}"
                raise WrongValue(rule, f"remove {odd}, or correct type")
        if self.type != "text" and self.path == STDLIB:
            raise ValueError(f"path must be set for type = {self.type!r}, got nothing")
        if self.type not in _SPLIT and self.excess_length_strategy == "split":
            rule = f"excess_length_strategy of type = {self.type!r} must be 'truncate' or 'drop', got 'split'"
            raise WrongValue(rule, "choose one of them")
        if self.validation_path is not None and self.held_out_percent != usual.held_out_percent:
            raise WrongValue("validation_path excludes held_out_percent, got both", "remove one of them")
        return self

    @property
    def has_held_out(self) -> bool:
        """Whether some data is for evaluation only."""
        return self.validation_path is not None or self.held_out_percent > 0


class DataSection(Section):
    """All sources, and how their documents become sequences.

    Attributes:
        sources: at least one. A `[data]` table with the keys of a source is a single source.
        context: tokens per sequence.
        documents: `packed` puts documents one after the other: text becomes one stream, cut into
            sequences of `context` tokens; other examples stay whole, and each sequence has as many
            as fit. `padded` gives each document a sequence of its own; the sequences of a batch are
            as long as its longest document. The default is `padded` if a source has conversations
            or pairs, otherwise `packed`. Packed examples do not see each other.
        pad_to_multiple_of: packed examples begin at multiples of it.
        masked_percent: share of the tokens that an encoder learns to predict.
    """

    sources: tuple[DataSource, ...] = Field(default=(DataSource(),), min_length=1, max_length=1024)
    context: int = Field(default=256, ge=8, le=1 << 17)
    documents: Literal["packed", "padded"] = "packed"
    pad_to_multiple_of: int = Field(default=1, ge=1, le=1 << 17)
    masked_percent: float = Field(default=15.0, gt=0, lt=100)

    @model_validator(mode="before")
    @classmethod
    def _one_table(cls, values: object) -> object:
        """Makes the keys of a single source the first source, and sets the default of `documents`."""
        if not isinstance(values, dict):
            return values
        shared = {name: value for name, value in values.items() if name in {*SEQUENCE_KEYS, "sources"}}
        own = {name: value for name, value in values.items() if name not in shared}
        sources = shared.get("sources", (own,))
        if isinstance(sources, list):
            sources = tuple(sources)
        if "sources" in shared and own:
            raise WrongValue(
                f"data.sources excludes keys of a single source, got {min(own)} too", "move it into a source"
            )
        types = [s.get("type") if isinstance(s, dict) else getattr(s, "type", None) for s in _tuple(sources)]
        padded = {"chat", "prompt_completion", "preference"}
        default = "padded" if padded.intersection(map(str, types)) else "packed"
        return {"documents": default, **shared, "sources": sources}

    @model_validator(mode="after")
    def _all_are_pairs(self) -> DataSection:
        kinds = {source.type for source in self.sources}
        if "preference" in kinds and len(kinds) > 1:
            other = min(kinds - {"preference"})
            raise WrongValue(f"type = 'preference' excludes other types, got {other!r} too", "remove one")
        if "preference" in kinds and self.documents == "packed":
            raise WrongValue("type = 'preference' excludes documents = 'packed'", "remove documents")
        return self

    @property
    def is_preference(self) -> bool:
        """Whether the data are pairs of a chosen and a rejected sequence."""
        return self.sources[0].type == "preference"

    @model_validator(mode="after")
    def _all_have_weights(self) -> DataSection:
        without = [n for n, source in enumerate(self.sources) if source.weight is None]
        if without and len(without) < len(self.sources):
            raise WrongValue(
                f"weight must be set for all sources or for no source, got no weight for source {without[0] + 1}",
                "add the missing weights",
            )
        return self

    @model_validator(mode="after")
    def _multiple_divides_context(self) -> DataSection:
        if self.context % self.pad_to_multiple_of:
            raise WrongValue(
                f"pad_to_multiple_of must divide the context of {self.context}, got {self.pad_to_multiple_of}",
                "correct one",
            )
        return self

    @property
    def is_padded(self) -> bool:
        """Whether sequences have different lengths."""
        return self.documents == "padded"

    @property
    def separates_documents(self) -> bool:
        """Whether sequences have several documents that do not see each other."""
        return not self.is_padded and any(source.type != "text" for source in self.sources)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The weights of the sources; None to use every sequence once per epoch."""
        weights = [source.weight for source in self.sources if source.weight is not None]
        return tuple(weights) if len(weights) > 1 else None

    @property
    def has_held_out(self) -> bool:
        """Whether some data is for evaluation only."""
        return any(source.has_held_out for source in self.sources)

    def what_must_match(self) -> dict[str, Any]:
        """The settings that determine the result of a run, except what decides the tokens and labels,
        which are compared by content.
        """
        shares = [source.held_out_percent for source in self.sources]
        settings = self.model_dump(exclude={"sources"})
        if self.pad_to_multiple_of == 1:  # as before this setting existed
            del settings["pad_to_multiple_of"]
        settings["held_out_percent"] = shares[0] if len(shares) == 1 else shares
        return settings if self.weights is None else {**settings, "weight": list(self.weights)}

    def with_paths_from(self, directory: Path) -> DataSection:
        """The section with relative paths joined to a directory. Absolute paths do not change."""
        return self.model_copy(update={"sources": tuple(_with_paths(s, directory) for s in self.sources)})


SEQUENCE_KEYS = ("context", "documents", "pad_to_multiple_of", "masked_percent")


def _tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


def _with_paths(source: DataSource, directory: Path) -> DataSource:
    paths = {"path": source.path, "validation_path": source.validation_path}
    joined = {n: str(directory / p) for n, p in paths.items() if p is not None and p != STDLIB}
    return source.model_copy(update=joined)


def merge_sequences(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sections of a configuration with `[sequences]` inside of `data`, and a list of sources as
    `data.sources`.

    Raises:
        ValueError: a key is in both sections, or unknown.
    """
    data = content.get("data", {})
    if isinstance(data, (list, tuple)):
        data = {"sources": tuple(data)}
    if "sequences" not in content:
        return {**content, "data": data} if "data" in content else content
    sequences = content["sequences"]
    if not isinstance(sequences, Mapping) or not isinstance(data, Mapping):
        raise WrongValue("sequences and data must be tables, got other values", "write [sequences]")
    for key in sequences:
        if key not in SEQUENCE_KEYS:
            raise WrongValue(
                f"sequences.{key} must be a known key; got an unknown one",
                f"sequences has {', '.join(SEQUENCE_KEYS)}",
            )
        if key in data:
            raise WrongValue(f"data.{key} and sequences.{key} are the same setting, got both", "remove one")
    rest = {name: value for name, value in content.items() if name != "sequences"}
    return {**rest, "data": {**data, **sequences}}
