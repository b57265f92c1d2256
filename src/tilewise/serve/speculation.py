"""Speculative decoding: guessed tokens (draft tokens), several of which one model call can confirm.

The model's token is sampled at each position as usual, from (seed, position) and its own logits. A
draft token is confirmed if it equals the sampled token. Then the logits of the next position are
valid, too. So draft tokens change the number of model calls, but never a token of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.generate import History
from tilewise.models import BLOCK_SIZE
from tilewise.serve.sequence import Drafter, Sequence
from tilewise.settings import SpeculativeConfig

__all__ = ["ModelDrafter", "NgramDrafter", "make_drafter"]


class NgramDrafter:
    """Draft tokens by prompt lookup: what followed the last tokens at their previous occurrence.

    Stores the last position of each n-gram, so that a lookup does not search the text.

    Args:
        history: tokens of prompt and text.
        count: largest number of draft tokens.
        longest: length of the n-gram that is looked up first.
        shortest: length of the shortest n-gram.
    """

    def __init__(self, history: History, count: int, longest: int, shortest: int) -> None:
        self._history = history
        self._count = count
        self._sizes = range(longest, shortest - 1, -1)
        self._next_positions: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def draft(self, most: int) -> list[int]:
        """The draft tokens. A repetition that is shorter than `most` is continued periodically.

        Args:
            most: largest number of draft tokens that can be used.
        """
        ids = self._history.ids
        for end in range(max(1, self._num_indexed), len(ids)):
            for size in self._sizes:
                if size <= end:
                    self._next_positions[tuple(ids[end - size : end])] = end
        self._num_indexed = len(ids)
        for size in self._sizes:
            position = self._next_positions.get(tuple(ids[-size:])) if size <= len(ids) else None
            if position is not None:
                period = len(ids) - position
                return [ids[position + index % period] for index in range(min(most, self._count))]
        return []


@dataclass
class ModelDrafter:
    """State of the draft model for one sequence.

    Attributes:
        sequence: the sequence.
        blocks: the blocks in which the draft model's cache was filled.
        done: number of positions in the draft model's cache.
        guesses: draft tokens after `length`.
        length: length of the sequence when the draft tokens were made.
    """

    sequence: Sequence
    blocks: list[int] = field(default_factory=list)
    done: int = 0
    guesses: list[int] = field(default_factory=list)
    length: int = 0

    def draft(self, most: int) -> list[int]:
        """The draft tokens; empty if they were not made for the current length.

        Args:
            most: largest number of draft tokens that can be used.
        """
        return self.guesses[:most] if self.length == len(self.sequence) else []

    def resume(self) -> int:
        """Number of valid positions in the draft model's cache. It decreases if blocks were
        released or a draft token was rejected.
        """
        blocks = self.sequence.blocks
        same = 0
        while same < min(len(blocks), len(self.blocks)) and blocks[same] == self.blocks[same]:
            same += 1
        self.done = min(self.done, same * BLOCK_SIZE, len(self.sequence) - 1)
        self.blocks = list(blocks)
        return self.done


def make_drafter(config: SpeculativeConfig, sequence: Sequence) -> Drafter:
    """The drafter of a sequence.

    Args:
        config: settings of speculative decoding.
        sequence: the sequence.
    """
    if config.method == "draft_model":
        return ModelDrafter(sequence)
    assert config.prompt_lookup_max is not None and config.prompt_lookup_min is not None
    return NgramDrafter(
        sequence.history, config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min
    )
