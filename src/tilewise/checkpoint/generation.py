"""generation_config.json: the settings that a model's makers recommend for writing.

Fields have the names and types of transformers' `GenerationConfig`. Settings that Tilewise has are returned, known ones
that do not change the text are left aside, and known ones that would make another text than transformers makes are
refused by name. A field that `GenerationConfig` does not have changes nothing in transformers either: it is left aside
with a warning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

from pydantic import ConfigDict, Field, ValidationError, create_model

from tilewise.core import CheckpointError, Validator
from tilewise.core.log import warn_once
from tilewise.core.reading import Unreadable, first_problem, plain_json, read_whole
from tilewise.core.validation import bare, shown
from tilewise.settings import Sampling, json_type, settings_of

__all__ = ["load_generation_config"]

_MAX_VOCABULARY = 1 << 31
_MOST_NAMED = 8  # fields in one line of the log
_WITHOUT_FILE = "correct the file, or do not use it (generation_config=False in Python)"
_validate = Validator("checkpoint", CheckpointError)
_Count = Annotated[int, Field(ge=0, le=1 << 53)]

# About assistants, caches, scores of beams, what is returned: they do not change the text that one model writes.
_UNUSED = """
_from_model_config _commit_hash transformers_version pad_token_id decoder_start_token_id use_cache
cache_implementation cache_config max_cache_len early_stopping length_penalty diversity_penalty
output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
renormalize_logits remove_invalid_values is_assistant num_assistant_tokens num_assistant_tokens_schedule
assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind
assistant_ensemble_weight prompt_lookup_num_tokens max_matching_ngram_size speculation_type use_mtp
compile_config disable_compile continuous_batching_config low_memory prefill_chunk_size
"""
_WITHOUT_EFFECT = frozenset(_UNUSED.split())
# Fields whose other values make another text.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "sequence_bias": (),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "watermarking_config": (),
    "token_healing": (False,),
    "constraints": (),
    "force_words_ids": (),
    "max_time": (),
}


_FIELDS: dict[str, Any] = {
    name: (Optional[json_type(one)], None)  # noqa: UP045
    for name, one in settings_of(Sampling).items()
    if one.in_file in ("always", "sampling") and one.kind in (int, float)
}
_Settings: Any = create_model("_Settings", __config__=ConfigDict(strict=True, extra="forbid"), **_FIELDS)


class _GenerationConfig(_Settings):  # type: ignore[misc]
    """What generation uses of generation_config.json: settings of sampling, and fields with names of their own."""

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    bad_words_ids: list[Annotated[list[int], Field(min_length=1)]] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=1 << 53)] | None = None
    max_length: Annotated[int, Field(ge=1, le=1 << 53)] | None = None
    min_new_tokens: _Count | None = None
    min_length: _Count | None = None
    stop_strings: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = (
        None
    )
    num_return_sequences: Annotated[int, Field(ge=1, le=1 << 20)] | None = None


def load_generation_config(directory: str | Path, vocab_size: int) -> dict[str, Any]:
    """What generation uses of generation_config.json, by the file's names; empty when there is no file.

    Args:
        directory: of the model.
        vocab_size: of the model; token ids lie below it.

    Fields that are unknown are left aside, with one warning in the log for all of them.

    Raises:
        CheckpointError: the file is not a JSON object, a field cannot have such a value, a token lies outside the
            vocabulary, or a setting is not supported.
    """
    path = _validate.path("load_generation_config", "a model directory", directory) / "generation_config.json"
    vocab_size = _validate.integer("load_generation_config", "vocab_size", vocab_size, 1, _MAX_VOCABULARY)
    if not os.path.lexists(path):
        return {}
    try:
        found, unknown = _parse(read_whole(path))
    except Unreadable as error:
        raise CheckpointError(
            f"[checkpoint.load_generation_config] the file must be a JSON object of generation's settings; got "
            f"{str(path)!r}: {error}; {_WITHOUT_FILE}"
        ) from None
    if unknown:
        names = ", ".join(bare(name) for name in unknown[:_MOST_NAMED])
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        rule = "[checkpoint.load_generation_config] unknown fields are ignored"
        warn_once("checkpoint", f"{rule}: {names}{more} ({str(path)!r})")
    for token in _tokens(found):
        if not 0 <= token < vocab_size:
            raise CheckpointError(
                f"[checkpoint.load_generation_config] token ids must lie below config.json's vocab_size {vocab_size}; "
                f"got {token} in {str(path)!r}; {_WITHOUT_FILE}"
            )
    return dict(found.model_dump(exclude_none=True))


def _parse(content: bytes) -> tuple[_GenerationConfig, list[str]]:
    """The settings of a file, and the names of its unknown fields.

    Raises:
        Unreadable: it holds no such settings.
    """
    data = plain_json(content)
    if not isinstance(data, dict):
        raise Unreadable(f"it must hold an object; got {shown(data)}")
    for key, allowed in _ONLY.items():
        value = data.pop(key, None)
        if value is not None and not any(_is_same(value, a) for a in allowed):
            rule = f"must be {' or '.join(shown(a) for a in allowed)}" if allowed else "must be absent"
            raise Unreadable(f"{key} {rule}, others are not supported; got {shown(value)}")
    known = {key: value for key, value in data.items() if key in _GenerationConfig.model_fields}
    try:
        found = _GenerationConfig.model_validate(known)
    except ValidationError as error:
        raise Unreadable(first_problem(error)) from None
    return found, [key for key in data if key not in known and key not in _WITHOUT_EFFECT]


def _is_same(value: object, allowed: object) -> bool:
    """Equal, and not a truth value for a number."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


def _tokens(found: _GenerationConfig) -> Iterator[int]:
    """Every token id of the settings."""
    if found.bos_token_id is not None:
        yield found.bos_token_id
    if isinstance(found.eos_token_id, int):
        yield found.eos_token_id
    yield from found.eos_token_id if isinstance(found.eos_token_id, list) else ()
    for word in found.bad_words_ids or ():
        yield from word
