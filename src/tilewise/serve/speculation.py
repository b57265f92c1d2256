"""Tokens guessed ahead of the model, so that one call of it can confirm several.

The model's own token is drawn for each place as always, from (seed, position) and its own logits; a guess is kept where
it is that very token, and what follows it is then known already. So guesses change how many calls a text takes, and
never a token of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tilewise.core import Border
from tilewise.generate import History

__all__ = ["NgramDrafter", "SpeculativeConfig"]

_METHODS = ("ngram",)
_MOST = 256
_USUAL = 5
_border = Border("serve")


@dataclass(frozen=True)
class SpeculativeConfig:
    """How guesses are made, with vLLM's names and defaults.

    Args:
        num_speculative_tokens: guesses for a call and text, at most.
        method: `ngram`: what followed the last few tokens where they stood before, in prompt or text.
        prompt_lookup_max: so many last tokens are looked for first; None: 5, or as many as `prompt_lookup_min`.
        prompt_lookup_min: so many at least; None: as many as `prompt_lookup_max`.

    Raises:
        ConfigError: a setting has no such value.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        place = "speculative_config"
        _border.choice(place, "method", self.method, _METHODS)
        _border.integer(place, "num_speculative_tokens", self.num_speculative_tokens, 1, _MOST)
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        for name, value in (("prompt_lookup_max", longest), ("prompt_lookup_min", shortest)):
            if value is not None:
                _border.integer(place, name, value, 1, _MOST)
        longest = (shortest or _USUAL) if longest is None else longest
        shortest = longest if shortest is None else shortest
        if shortest > longest:
            got = f"{shortest} and {longest}"
            _border.refuse(place, "prompt_lookup_min must not be above prompt_lookup_max", got, "correct one")
        object.__setattr__(self, "prompt_lookup_max", longest)
        object.__setattr__(self, "prompt_lookup_min", shortest)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """From a dictionary.

        Args:
            given: values by the names above.

        Raises:
            ConfigError: as when made, or a name that is none of them.
        """
        _border.mapping("engine", "speculative_config", given, "settings")
        for name in given:
            _border.choice("speculative_config", "a setting", name, [field.name for field in fields(cls)])
        if "num_speculative_tokens" not in given:
            rule, advice = "num_speculative_tokens must be given", "add it, 5 for example"
            _border.refuse("speculative_config", rule, "none", advice)
        return cls(**given)

    def drafter(self, history: History) -> NgramDrafter:
        """What guesses for a text.

        Args:
            history: of the text.
        """
        assert self.prompt_lookup_max is not None and self.prompt_lookup_min is not None  # set above
        return NgramDrafter(
            history, self.num_speculative_tokens, self.prompt_lookup_max, self.prompt_lookup_min
        )


class NgramDrafter:
    """Guesses that a text goes on as it did where its last tokens stood before.

    Keeps where each run of tokens stood last, so a guess costs no search.

    Args:
        history: of the text; it grows.
        count: guesses at most.
        longest: tokens that are looked for first.
        shortest: tokens that are looked for at least.
    """

    def __init__(self, history: History, count: int, longest: int, shortest: int) -> None:
        self._history = history
        self._count = count
        self._sizes = range(longest, shortest - 1, -1)
        self._behind: dict[tuple[int, ...], int] = {}
        self._known = 0

    def draft(self, most: int) -> list[int]:
        """The next tokens, as they may be; at most so many. Where a repetition is shorter, it is taken to go on.

        Args:
            most: that can be used.
        """
        ids = self._history.ids
        for end in range(max(1, self._known), len(ids)):
            for size in self._sizes:
                if size <= end:
                    self._behind[tuple(ids[end - size : end])] = end
        self._known = len(ids)
        for size in self._sizes:
            place = self._behind.get(tuple(ids[-size:])) if size <= len(ids) else None
            if place is not None:
                period = len(ids) - place
                return [ids[place + index % period] for index in range(min(most, self._count))]
        return []
