"""Tokens guessed ahead of the model, so that one call of it can confirm several.

The model's own token is drawn for each place as always, from (seed, position) and its own logits; a guess is kept where
it is that very token, and what follows it is then known already. So guesses change how many calls a text takes, and
never a token of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.generate import History
from tilewise.models import BLOCK_SIZE
from tilewise.serve.sequence import Drafter, Sequence
from tilewise.settings import SpeculativeConfig

__all__ = ["ModelDrafter", "NgramDrafter", "make_drafter"]


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


def make_drafter(config: SpeculativeConfig, sequence: Sequence) -> Drafter:
    """What guesses the next tokens of a text.

    Args:
        config: how tokens are guessed.
        sequence: the text.
    """
    if config.method == "draft_model":
        return ModelDrafter(sequence)
    assert config.prompt_lookup_max is not None and config.prompt_lookup_min is not None
    return NgramDrafter(
        sequence.history, config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min
    )
