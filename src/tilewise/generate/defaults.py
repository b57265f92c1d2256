"""Combines the settings of generation_config.json with the caller's.

`LLM` and the server apply the settings that vLLM applies, `served_settings`. The command line applies all of them,
`combine_settings`.

The file's settings apply as in transformers. Without `do_sample` the most likely token is taken, and settings that only
matter for sampling have no effect. With `do_sample`, settings that the file lacks have transformers' defaults
(temperature 1, top_k 50). The caller's settings override the file's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewise.core import ConfigError, Validator
from tilewise.core.log import warn_once
from tilewise.core.validation import shown
from tilewise.settings import Sampling, SamplingSettings, settings_of

__all__ = ["combine_settings", "served_settings"]

_validate = Validator("generate")
_MOST = 1 << 53
_DEFAULT_TOP_K = 50  # of transformers, for a file with do_sample and without top_k

# Settings that change the text and that vLLM ignores, with the values that change nothing.
_NOT_SERVED: Mapping[str, object] = {
    "typical_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "stop_strings": [],
    "min_new_tokens": 0,
    "min_length": 0,
}


def served_settings(file: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of generation_config.json that `LLM` and the server apply where a request has none: as in vLLM.

    A setting of the file that changes the text and is not applied is one warning in the log.

    Args:
        file: result of `load_generation_config`.

    Returns:
        Settings under the names of `SamplingParams`.
    """
    for name, neutral in _NOT_SERVED.items():
        if name in file and file[name] != neutral:
            rule = f"[generate.served_settings] {name} of generation_config.json is ignored, as in vLLM"
            warn_once("generate", f"{rule}: got {shown(file[name])}; set it in requests")
    served = [name for name, one in settings_of(SamplingSettings).items() if one.is_server_default]
    values = {name: file[name] for name in served if name in file}
    return values | ({"max_tokens": file["max_new_tokens"]} if "max_new_tokens" in file else {})


def combine_settings(
    file: Mapping[str, Any], overrides: Mapping[str, Any], num_prompt: int
) -> tuple[Sampling, dict[str, Any]]:
    """Combine settings.

    Args:
        file: result of `load_generation_config`.
        overrides: the caller's settings, fields of `Sampling` by name; they override the file's.
        num_prompt: number of tokens of the prompt, which the file's `max_length` and `min_length` include.

    Returns:
        The settings, and those of them that come from the file and are not the defaults.

    Raises:
        ConfigError: a name or a value that `Sampling` does not have, or a prompt longer than the file's `max_length`.
    """
    num_prompt = _validate.integer("combine_settings", "num_prompt", num_prompt, 0, _MOST)
    declared = settings_of(Sampling)
    for name in overrides:
        _validate.choice("combine_settings", "a setting", name, [*declared])
    values = {name: file[name] for name in declared if declared[name].in_file == "always" and name in file}
    if overrides.get("temperature", 1.0 if file.get("do_sample") else 0.0):
        values |= _sampling_values(file, has_do_sample=bool(file.get("do_sample")))
    if "stop_strings" in file:
        stops = file["stop_strings"]
        values |= {"stop": (stops,) if isinstance(stops, str) else tuple(stops)}
    values |= _lengths(file, num_prompt, "max_tokens" in overrides)
    from_file = {
        name: value
        for name, value in values.items()
        if name not in overrides and value != declared[name].default
    }
    settings = {**from_file, **overrides}
    min_tokens = settings.get("min_tokens")
    is_open = "max_tokens" not in {*values, *overrides}
    if is_open and type(min_tokens) is int and min_tokens > declared["max_tokens"].default:
        settings["max_tokens"] = min_tokens  # the default of max_tokens would be below min_tokens
    return Sampling(**settings), from_file


def _sampling_values(file: Mapping[str, Any], *, has_do_sample: bool) -> dict[str, Any]:
    """Settings that matter for sampling, with transformers' defaults if the file has `do_sample`."""
    declared = settings_of(Sampling)
    values = {name: file[name] for name in declared if declared[name].in_file == "sampling" and name in file}
    if "num_return_sequences" in file:
        values["n"] = file["num_return_sequences"]
    if has_do_sample:
        values = {"top_k": _DEFAULT_TOP_K, "temperature": file.get("temperature", 1.0), **values}
    return values


def _lengths(file: Mapping[str, Any], num_prompt: int, has_max_tokens: bool) -> dict[str, Any]:
    """The file's limits on the number of new tokens."""
    values: dict[str, Any] = {}
    if "max_new_tokens" in file:
        values["max_tokens"] = file["max_new_tokens"]
    elif "max_length" in file and not has_max_tokens:
        room = file["max_length"] - num_prompt
        if room < 1:
            raise ConfigError(
                f"[generate.combine_settings] a prompt must be shorter than generation_config.json's max_length "
                f"{file['max_length']}; got {num_prompt} tokens; shorten it, or set max_tokens"
            )
        values["max_tokens"] = room
    min_tokens = file.get("min_new_tokens", max(0, file.get("min_length", 0) - num_prompt))
    return {**values, "min_tokens": min_tokens}
