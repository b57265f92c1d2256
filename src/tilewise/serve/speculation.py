"""Tokens guessed ahead of the model, so that one call of it can confirm several.

The model's own token is drawn for each place as always, from (seed, position) and its own logits; a guess is kept where
it is that very token, and what follows it is then known already. So guesses change how many calls a text takes, and
never a token of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tilewise.core import Border
from tilewise.generate import History
from tilewise.models import BLOCK_SIZE
from tilewise.serve.sequence import Drafter, Sequence

__all__ = ["ModelDrafter", "NgramDrafter", "SpeculativeConfig"]

_METHODS = ("ngram", "draft_model")
_MOST = 256
_USUAL = 5
_border = Border("serve")


@dataclass(frozen=True)
class SpeculativeConfig:
    """How guesses are made, with vLLM's names and defaults.

    Args:
        num_speculative_tokens: guesses for a call and text, at most.
        method: `ngram`: what followed the last few tokens where they stood before, in prompt or text; `draft_model`:
            what a smaller model says. By default the second where `model` is given, else the first.
        model: a Hugging Face directory of the smaller model, of the same vocabulary.
        prompt_lookup_max: so many last tokens are looked for first; None: 5, or as many as `prompt_lookup_min`.
        prompt_lookup_min: so many at least; None: as many as `prompt_lookup_max`.

    Raises:
        ConfigError: a setting has no such value.
    """

    num_speculative_tokens: int
    method: str | None = None
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        place = "speculative_config"
        if self.model is not None:
            object.__setattr__(self, "model", str(_border.path(place, "model", self.model)))
        usual = "ngram" if self.model is None else "draft_model"
        object.__setattr__(self, "method", usual if self.method is None else self.method)
        _border.choice(place, "method", self.method, _METHODS)
        if (self.method == "draft_model") != (self.model is not None):
            got = f"{self.method} {'without' if self.model is None else 'with'} a model"
            _border.refuse(place, "method draft_model goes with model", got, "correct one")
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
            _border.choice("speculative_config", "a setting", name, [one.name for one in fields(cls)])
        if "num_speculative_tokens" not in given:
            rule, advice = "num_speculative_tokens must be given", "add it, 5 for example"
            _border.refuse("speculative_config", rule, "none", advice)
        return cls(**given)

    def drafter(self, sequence: Sequence) -> Drafter:
        """What guesses for a text.

        Args:
            sequence: the text.
        """
        if self.method == "draft_model":
            return ModelDrafter(sequence)
        history = sequence.history
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


@dataclass
class ModelDrafter:
    """What the smaller model knows of one text.

    Attributes:
        sequence: the text.
        blocks: that its cache was filled in.
        done: positions in its cache.
        guesses: of the tokens behind `length`.
        length: of the text when they were made.
    """

    sequence: Sequence
    blocks: list[int] = field(default_factory=list)
    done: int = 0
    guesses: list[int] = field(default_factory=list)
    length: int = 0

    def draft(self, most: int) -> list[int]:
        """The guesses, where they are of the text as it stands; at most so many.

        Args:
            most: that can be used.
        """
        return self.guesses[:most] if self.length == len(self.sequence) else []

    def resume(self) -> int:
        """How far the text as it stands is in the cache; less than before where blocks were given up or a guess was
        wrong."""
        held = self.sequence.blocks
        same = 0
        while same < min(len(held), len(self.blocks)) and held[same] == self.blocks[same]:
            same += 1
        self.done = min(self.done, same * BLOCK_SIZE, len(self.sequence) - 1)
        self.blocks = list(held)
        return self.done
