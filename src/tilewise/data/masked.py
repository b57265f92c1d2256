"""Batches for masked language modelling: some tokens are hidden and predicted (Devlin et al. 2018).

Of the chosen tokens, 80% become the mask token, 10% another token, and 10% stay. The choice is a
function of (seed, step), like the order of windows, so resuming needs only the step number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.core import Validator
from tilewise.data.batches import DerivedBatches
from tilewise.data.examples import IGNORED

__all__ = ["MaskedBatches"]

_MOST = (1 << 31) - 1
_validate = Validator("data")


@dataclass(frozen=True)
class MaskedBatches(DerivedBatches):
    """Training batches for an encoder.

    Args:
        batches: windows of text, packed or padded.
        mask: id of the mask token.
        vocab_size: number of tokens from which random ones are drawn.
        percent: share of tokens that are predicted.
    """

    mask: int
    vocab_size: int
    percent: float = 15.0

    def __post_init__(self) -> None:
        vocab_size = _validate.integer("masked", "vocab_size", self.vocab_size, 1, _MOST)
        _validate.integer("masked", "mask", self.mask, 0, vocab_size - 1)
        _validate.number("masked", "percent", self.percent, 0.0, 100.0)

    def at(self, step: int) -> dict[str, NDArray[np.int32]]:
        """Tokens, token_types and labels `[batch, longest]` and lengths `[batch]` of a step."""
        batch = self.batches.at(step)
        tokens, is_text = batch["tokens"], batch["labels"] != IGNORED
        key = np.array([self.batches.seed, 1 << 32 | step], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        chance, fate = generator.random(tokens.shape), generator.random(tokens.shape)
        others = generator.integers(0, self.vocab_size, tokens.shape, np.int32)
        is_chosen = is_text & (chance < self.percent / 100)
        is_chosen[0, 0] |= not is_chosen.any()  # a step counts one token at least
        hidden = np.where(fate < 0.8, np.int32(self.mask), np.where(fate < 0.9, others, tokens))
        return {
            "tokens": np.where(is_chosen, hidden, tokens).astype(np.int32),
            "token_types": np.zeros_like(tokens),
            "labels": np.where(is_chosen, tokens, np.int32(IGNORED)).astype(np.int32),
            "lengths": is_text.sum(1, dtype=np.int32),
        }
