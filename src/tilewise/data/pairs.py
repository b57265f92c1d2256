"""Batches of pairs of a chosen and a rejected sequence, for preference losses.

The order of pairs is that of `Batches`. Pairs have numbers, in the order of the sources, so that the
log-probabilities that a reference model gives them can be computed once and looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.data.batches import DerivedBatches
from tilewise.data.examples import IGNORED, Examples, Ids
from tilewise.data.sequences import Undivided

__all__ = ["PairBatches", "PairedExamples"]

Row = tuple[Ids, Ids]


@dataclass(frozen=True)
class PairedExamples(Undivided):
    """Pairs of examples.

    Args:
        examples: examples 2i and 2i + 1 are the chosen and the rejected one of pair i. Each has at
            least two tokens and a counted label.
    """

    examples: Examples

    def __len__(self) -> int:
        return len(self.examples) // 2

    def row(self, index: int) -> Row:
        """Tokens and labels of the chosen sequence of a pair."""
        return self.pair(index)[0]

    def pair(self, index: int) -> tuple[Row, Row]:
        """Tokens and labels of both sequences; a label is the next token, or `IGNORED`."""
        (chosen, chosen_labels), (rejected, rejected_labels) = (
            self.examples[2 * index + i] for i in range(2)
        )
        return (chosen[:-1], chosen_labels[1:]), (rejected[:-1], rejected_labels[1:])


@dataclass(frozen=True)
class PairBatches(DerivedBatches):
    """Training batches of pairs.

    Args:
        batches: decides the order. Its sources are `PairedExamples`.
        has_lengths: whether batches have the input `inverse_lengths`.
        reference: log-probabilities `[number of pairs, 2]` that the reference model gives the
            sequences; None for zeros, as long as they are not known.
    """

    has_lengths: bool = False
    reference: NDArray[np.float32] | None = None

    def at(self, step: int) -> dict[str, NDArray[Any]]:
        """The batch of a step; see `batch_of`."""
        return self.batch_of([self._number(step * self.batch + i) for i in range(self.batch)])

    def place(self, number: int) -> tuple[int, tuple[Row, Row]]:
        """The source of the n-th pair of the run, and its sequences."""
        source, index = self.batches.place(number)
        return source, self._source(source).pair(index)

    def batch_of(self, pairs: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Inputs of the sequences of some pairs.

        Args:
            pairs: numbers of `batch` pairs.

        Returns:
            tokens and labels `[2 * batch, longest]` i32, reference_log_probs `[2 * batch]` f32, and
            inverse_lengths `[2 * batch]` f32, which is 1 / number of counted labels, if `has_lengths`.
        """
        rows = [row for number in pairs for row in self._pair(number)]
        shape = len(rows), max(len(tokens) for tokens, _ in rows)
        tokens, labels = np.full(shape, self.batches.padding, np.int32), np.full(shape, IGNORED, np.int32)
        for number, (row, row_labels) in enumerate(rows):
            tokens[number, : len(row)], labels[number, : len(row)] = row, row_labels
        reference = np.zeros((len(pairs), 2), np.float32)
        if self.reference is not None:
            reference = self.reference[list(pairs)]
        batch = {"tokens": tokens, "labels": labels, "reference_log_probs": reference.reshape(-1)}
        if self.has_lengths:
            batch["inverse_lengths"] = (1.0 / (labels != IGNORED).sum(1)).astype(np.float32)
        return batch

    def _number(self, place: int) -> int:
        """The number of the n-th pair of the run."""
        source, index = self.batches.place(place)
        return index + sum(len(self.batches.sources[i]) for i in range(source))

    def _pair(self, number: int) -> tuple[Row, Row]:
        for source in range(len(self.batches.sources)):
            if number < len(self.batches.sources[source]):
                return self._source(source).pair(number)
            number -= len(self.batches.sources[source])
        raise IndexError(number)

    def _source(self, number: int) -> PairedExamples:
        source = self.batches.sources[number]
        assert isinstance(source, PairedExamples)
        return source
