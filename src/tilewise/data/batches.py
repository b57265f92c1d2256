"""Batches by step number: a pure function of (sources, seed, step).

Without weights, an epoch visits every sequence of all sources once, in an order that Philox
generates from (seed, epoch). With weights, a number that Philox generates from (seed, n) chooses
the source of the n-th sequence of the run, and each source has epochs of its own. Step s takes the
sequences s*batch to (s+1)*batch of this endless list. There is no state, so resuming needs only the
step number, and the number of devices has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tilewise.core import Validator, shown
from tilewise.data.examples import IGNORED
from tilewise.data.sequences import Sequences

__all__ = ["Batches", "DerivedBatches"]

_MOST = (1 << 63) - 1
_BLOCK = 1 << 16  # sequences whose sources are chosen at once
_CHOICES = 1 << 62  # the second words of Philox keys: epochs, then sources' epochs, then choices
_OF_SOURCE = 1 << 40
_validate = Validator("data")


@dataclass(frozen=True)
class Batches:
    """Training batches of one or several sources.

    Args:
        sources: sequences; each source has at least one.
        batch: sequences per step.
        seed: of the order.
        weights: how often sequences of each source are used, relative to each other. None to use
            every sequence once per epoch.
        width: tokens per sequence; None for the longest sequence of each batch.
        padding: id of the tokens after a sequence's end. Their labels are `IGNORED`.
        has_documents: whether batches say which documents do not see each other.

    Raises:
        ConfigError: a source is empty, or a number is out of range.
    """

    sources: Sequence[Sequences]
    batch: int
    seed: int = 0
    weights: Sequence[float] | None = None
    width: int | None = None
    padding: int = 0
    has_documents: bool = False
    _orders: dict[tuple[int, int], NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _choices: dict[int, NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _totals: list[NDArray[np.int64]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("seed", 0), ("padding", 0)):
            value = _validate.integer("batches", name, getattr(self, name), low, _MOST)
            object.__setattr__(self, name, value)
        empty = next((n for n, source in enumerate(self.sources) if not len(source)), None)
        if empty is not None or not self.sources:
            got = "no source" if empty is None else f"none in source {empty + 1}"
            _validate.invalid("batches", "the data must hold at least one sequence", got, "give more data")
        if self.weights is not None:
            weights = [_validate.number("batches", "a weight", w, 0.0) for w in self.weights]
            if len(weights) != len(self.sources) or not all(weights):
                rule = "weights must be positive, one for each source"
                _validate.invalid("batches", rule, shown(weights), "correct them")

    @property
    def num_windows(self) -> int:
        """Sequences of all sources."""
        return sum(map(len, self.sources))

    def at(self, step: int) -> dict[str, NDArray[np.int32]]:
        """Tokens and labels `[batch, width]` of a step; a label is the next token, or `IGNORED`. With
        `has_documents` also positions, those of tokens in their documents, and first, those of the
        documents' first tokens in the sequence.
        """
        step = _validate.integer("batches", "a step", step, 0, _MOST // self.batch)
        rows = [self.row(step * self.batch + i)[1:] for i in range(self.batch)]
        shape = self.batch, max(len(row) for row, _ in rows) if self.width is None else self.width
        tokens, labels = np.full(shape, self.padding, np.int32), np.full(shape, IGNORED, np.int32)
        for number, (row, row_labels) in enumerate(rows):
            tokens[number, : len(row)] = row
            labels[number, : len(row)] = row_labels
        if not self.has_documents:
            return {"tokens": tokens, "labels": labels}
        first = np.zeros(shape, np.int32)
        for number, (row, _) in enumerate(rows):
            source, index = self.place(step * self.batch + number)
            for start in (*self.sources[source].starts(index), len(row)):
                first[number, start:] = start  # what follows the last document is one of its own
        positions = np.arange(shape[1], dtype=np.int32) - first
        return {"tokens": tokens, "labels": labels, "positions": positions, "first": first}

    def row(self, number: int) -> tuple[int, NDArray[np.int32], NDArray[np.int32]]:
        """The n-th sequence of the run: the number of its source, its tokens and its labels."""
        source, index = self.place(number)
        return source, *self.sources[source].row(index)

    def place(self, number: int) -> tuple[int, int]:
        """The source, and the sequence in it, of the n-th sequence of the run."""
        if self.weights is None:
            epoch, position = divmod(number, self.num_windows)
            index = int(self._order(0, self.num_windows, epoch)[position])
            source = 0
            while index >= len(self.sources[source]):
                index -= len(self.sources[source])
                source += 1
            return source, index
        block, within = divmod(number, _BLOCK)
        while len(self._totals) <= block:
            before = self._totals[-1] if self._totals else np.zeros(len(self.sources), np.int64)
            chosen = self._choice(len(self._totals) - 1) if self._totals else np.empty(0, np.int64)
            self._totals.append(before + np.bincount(chosen, minlength=len(self.sources)))
        chosen = self._choice(block)
        source = int(chosen[within])
        used = int(self._totals[block][source]) + int((chosen[:within] == source).sum())
        epoch, position = divmod(used, len(self.sources[source]))
        key = (source + 1) * _OF_SOURCE
        return source, int(self._order(key, len(self.sources[source]), epoch)[position])

    def _choice(self, block: int) -> NDArray[np.int64]:
        """The sources of a block of sequences. The last two blocks are cached."""
        assert self.weights is not None
        if block not in self._choices:
            while len(self._choices) >= 2:
                del self._choices[next(iter(self._choices))]
            sums = np.array(list(accumulate(self.weights)))
            chance = _generator(self.seed, _CHOICES | block).random(_BLOCK) * sums[-1]
            chosen = np.searchsorted(sums[:-1], chance, "right").astype(np.int64)
            self._choices[block] = chosen
        return self._choices[block]

    def _order(self, key: int, count: int, epoch: int) -> NDArray[np.int64]:
        """The order of an epoch's sequences. The last two of each source are cached, because a batch
        may span two epochs.
        """
        if (key, epoch) not in self._orders:
            own = [entry for entry in self._orders if entry[0] == key]
            for entry in own[: max(0, len(own) - 1)]:
                del self._orders[entry]
            self._orders[key, epoch] = _generator(self.seed, key + epoch).permutation(count)
        return self._orders[key, epoch]


def _generator(seed: int, word: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, word], np.uint64)))


@dataclass(frozen=True)
class DerivedBatches:
    """Base of batches that are made from the sequences of others.

    Args:
        batches: decides the order.
    """

    batches: Batches

    @property
    def batch(self) -> int:
        """Sequences, or pairs, per step."""
        return self.batches.batch

    @property
    def num_windows(self) -> int:
        """Sequences, or pairs, of all sources."""
        return self.batches.num_windows
