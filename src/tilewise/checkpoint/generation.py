"""generation_config.json: the settings that a model's authors recommend for generation.

Fields have the names and types of transformers' `GenerationConfig`. The file's settings that are
supported are returned. Known settings that do not change the text are ignored. Known settings that
change the text and are not supported are ignored with one warning each, which names the setting.
Fields that `GenerationConfig` does not have are ignored with one warning for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

from pydantic import ConfigDict, Field, ValidationError, create_model

from tilewise.checkpoint.companions import GENERATION, open_companions
from tilewise.core import CheckpointError, Validator
from tilewise.core.log import warn_once
from tilewise.core.validation import bare, shown
from tilewise.files.reading import Unreadable, first_problem, plain_json
from tilewise.settings import Sampling, json_type, settings_of

__all__ = ["load_generation_config"]

_MAX_VOCABULARY = 1 << 31
_MOST_NAMED = 8  # fields in one line of the log
_WITHOUT_FILE = "correct the file, or do not use it (generation_config=False in Python)"
_validate = Validator("checkpoint", CheckpointError)
_Token = Annotated[int, Field(ge=0)]
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
# Fields that change the text and are not supported, with the values that change nothing. null always changes nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
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
    """The used fields of generation_config.json: settings of sampling, and others."""

    bos_token_id: _Token | None = None
    eos_token_id: _Token | list[_Token] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    bad_words_ids: list[Annotated[list[_Token], Field(min_length=1)]] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=1 << 53)] | None = None
    max_length: Annotated[int, Field(ge=1, le=1 << 53)] | None = None
    min_new_tokens: _Count | None = None
    min_length: _Count | None = None
    stop_strings: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = (
        None
    )
    num_return_sequences: Annotated[int, Field(ge=1, le=1 << 20)] | None = None


def load_generation_config(directory: str | Path, vocab_size: int) -> dict[str, Any]:
    """The settings of generation_config.json, by the names in the file. Empty if there is no file.

    One warning is logged for each setting that changes the text and is not supported, one for all
    unknown fields, and one for token ids that the model does not have. Each warning is logged once,
    although the file is read several times.

    Args:
        directory: directory of the model, or its GGUF file.
        vocab_size: vocabulary size of the model. Token ids at or beyond it are never generated.
            They are removed from `bos_token_id` and `eos_token_id`, and words that contain such an
            id are removed from `bad_words_ids`.

    Raises:
        CheckpointError: the file is not a JSON object, a field cannot have such a value, or a token
            id is negative.
    """
    files = open_companions(_validate.path("load_generation_config", "a model directory", directory))
    vocab_size = _validate.integer("load_generation_config", "vocab_size", vocab_size, 1, _MAX_VOCABULARY)
    if not files.has(GENERATION):
        return {}
    try:
        settings, warnings = _parse(files.read(GENERATION))
    except Unreadable as error:
        raise CheckpointError(
            f"[checkpoint.load_generation_config] the file must be a JSON object of generation's settings; got "
            f"{files.called(GENERATION)}: {error}; {_WITHOUT_FILE}"
        ) from None
    settings_of_model, absent = _within_vocabulary(settings.model_dump(exclude_none=True), vocab_size)
    if absent:
        ids = ", ".join(map(str, absent[:_MOST_NAMED]))
        warnings.append(f"token ids at or beyond the model's vocab_size {vocab_size} are ignored: {ids}")
    for text in warnings:
        warn_once("checkpoint", f"[checkpoint.load_generation_config] {text} ({files.called(GENERATION)})")
    return settings_of_model


def _parse(content: bytes) -> tuple[_GenerationConfig, list[str]]:
    """The supported settings of a file, and a warning for each setting that is not supported.

    Raises:
        Unreadable: the content is not a generation configuration.
    """
    data = plain_json(content)
    if not isinstance(data, dict):
        raise Unreadable(f"it must hold an object; got {shown(data)}")
    fields = {key: value for key, value in data.items() if key in _GenerationConfig.model_fields}
    try:
        settings = _GenerationConfig.model_validate(fields)
    except ValidationError as error:
        raise Unreadable(first_problem(error)) from None
    warnings = [
        f"{key} is not supported and is ignored: got {shown(data[key])}; texts may differ from transformers'"
        for key, neutral in _NEUTRAL.items()
        if data.get(key) is not None and not any(_is_same(data[key], value) for value in neutral)
    ]
    unknown = [bare(key) for key in data if key not in {*fields, *_WITHOUT_EFFECT, *_NEUTRAL}]
    if unknown:
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        warnings.append(f"unknown fields are ignored: {', '.join(unknown[:_MOST_NAMED])}{more}")
    return settings, warnings


def _is_same(value: object, allowed: object) -> bool:
    """Whether values are equal and have the same kind. True does not equal 1 here."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


def _within_vocabulary(settings: dict[str, Any], vocab_size: int) -> tuple[dict[str, Any], list[int]]:
    """Settings without token ids that the model does not have, and those ids."""
    values, absent = dict(settings), set[int]()

    def are_present(ids: list[int]) -> bool:
        absent.update(token for token in ids if token >= vocab_size)
        return max(ids, default=0) < vocab_size

    if not are_present([values.get("bos_token_id", 0)]):
        del values["bos_token_id"]
    if "eos_token_id" in values:
        ends = values["eos_token_id"]
        present = [token for token in ([ends] if isinstance(ends, int) else ends) if are_present([token])]
        values["eos_token_id"] = ends if present == [ends] else present
    if "bad_words_ids" in values:
        values["bad_words_ids"] = [word for word in values["bad_words_ids"] if are_present(word)]
    return values, sorted(absent)
