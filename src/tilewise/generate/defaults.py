"""From generation_config.json's settings and a caller's to `Sampling`: who decides what.

The file's settings apply as transformers applies them: without `do_sample` the likeliest token is taken, and what only
concerns draws has no effect; with it, what the file leaves open is transformers' default (temperature 1, the 50
likeliest tokens). What the caller gives comes before the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewise.core import Border, ConfigError
from tilewise.settings import Sampling, settings_of

__all__ = ["combine_settings"]

_border = Border("generate")
_MOST = 1 << 53
_DEFAULT_TOP_K = 50  # of transformers, for a file that samples and does not say


def combine_settings(
    file: Mapping[str, Any], given: Mapping[str, Any], num_prompt: int
) -> tuple[Sampling, dict[str, Any]]:
    """How to write a text.

    Args:
        file: what `load_generation_config` returned.
        given: settings of `Sampling` by name, which come before the file's.
        num_prompt: tokens of the prompt, which the file's `max_length` and `min_length` count too.

    Returns:
        The settings, and those of them that the file has decided and that are no defaults.

    Raises:
        ConfigError: a name or a value that `Sampling` does not have, or a prompt longer than the file's `max_length`.
    """
    file = _border.mapping("combine_settings", "file", file, "settings")
    given = _border.mapping("combine_settings", "given", given, "settings of Sampling")
    num_prompt = _border.integer("combine_settings", "num_prompt", num_prompt, 0, _MOST)
    declared = settings_of(Sampling)
    for name in given:
        _border.choice("combine_settings", "a setting", name, [*declared])
    found = {name: file[name] for name in declared if declared[name].in_file == "always" and name in file}
    if given.get("temperature", 1.0 if file.get("do_sample") else 0.0):
        found |= _draws(file, asks_itself=bool(file.get("do_sample")))
    if "stop_strings" in file:
        stops = file["stop_strings"]
        found |= {"stop": (stops,) if isinstance(stops, str) else tuple(stops)}
    found |= _lengths(file, num_prompt, "max_tokens" in given)
    taken = {
        name: value for name, value in found.items() if name not in given and value != declared[name].default
    }
    settings = {**taken, **given}
    fewest = settings.get("min_tokens")
    is_open = "max_tokens" not in {*found, *given}
    if is_open and type(fewest) is int and fewest > declared["max_tokens"].default:
        settings["max_tokens"] = fewest  # only the fewest are said, and they are more than is usual
    return Sampling(**settings), taken


def _draws(file: Mapping[str, Any], *, asks_itself: bool) -> dict[str, Any]:
    """What concerns draws; transformers' defaults where it is the file that asks for draws."""
    declared = settings_of(Sampling)
    found = {name: file[name] for name in declared if declared[name].in_file == "sampling" and name in file}
    if "num_return_sequences" in file:
        found["n"] = file["num_return_sequences"]
    if asks_itself:
        found = {"top_k": _DEFAULT_TOP_K, "temperature": file.get("temperature", 1.0), **found}
    return found


def _lengths(file: Mapping[str, Any], num_prompt: int, is_given: bool) -> dict[str, Any]:
    """The most and the fewest new tokens."""
    found: dict[str, Any] = {}
    if "max_new_tokens" in file:
        found["max_tokens"] = file["max_new_tokens"]
    elif "max_length" in file and not is_given:
        room = file["max_length"] - num_prompt
        if room < 1:
            raise ConfigError(
                f"[generate.combine_settings] a prompt must be shorter than generation_config.json's max_length "
                f"{file['max_length']}; got {num_prompt} tokens; shorten it, or say how many tokens to write"
            )
        found["max_tokens"] = room
    fewest = file.get("min_new_tokens", max(0, file.get("min_length", 0) - num_prompt))
    return {**found, "min_tokens": fewest}
