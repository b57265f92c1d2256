"""Examples of fine-tuning: token ids with a label each, and their division into packed sequences.

A label is the token itself, or `IGNORED` where the loss does not count it. Labels are not shifted:
`labels[i]` belongs to `tokens[i]`, as in files of pre-tokenized data, and the first label of an
example is never predicted. Examples that do not fit a sequence are truncated, split or dropped, and
counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

__all__ = ["IGNORED", "ExampleCounts", "ExampleList", "Examples", "pack_lengths"]

IGNORED = -100  # label of positions that the loss ignores
Ids = NDArray[np.int32]


@dataclass
class ExampleCounts:
    """Figures about the examples of a source.

    Attributes:
        examples: number of examples that are used.
        tokens: their tokens.
        counted: their labels that the loss counts.
        truncated: examples that were truncated to the context.
        split: examples that were divided into several.
        dropped: examples that were dropped because they are longer than the context.
        unlabelled: examples that were dropped because the loss counts none of their labels.
    """

    examples: int = 0
    tokens: int = 0
    counted: int = 0
    truncated: int = 0
    split: int = 0
    dropped: int = 0
    unlabelled: int = 0


@dataclass(frozen=True)
class Examples:
    """Examples one after the other.

    Attributes:
        tokens: ids, `[N]`.
        labels: a token or `IGNORED` each, `[N]`.
        ends: the end of each example, `[number of examples]`.
    """

    tokens: Ids
    labels: Ids
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[Ids, Ids]:
        begin = int(self.ends[index - 1]) if index else 0
        place = slice(begin, int(self.ends[index]))
        return self.tokens[place], self.labels[place]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example."""
        return np.diff(self.ends, prepend=0)


@dataclass
class ExampleList:
    """Collects examples that fit sequences.

    Args:
        most: maximum number of tokens of an example.
        strategy: what happens to longer ones: `truncate`, `split` or `drop`.

    Attributes:
        counts: figures so far.
    """

    most: int
    strategy: str
    counts: ExampleCounts = field(default_factory=ExampleCounts)
    _tokens: list[Ids] = field(default_factory=list)
    _labels: list[Ids] = field(default_factory=list)

    def add(self, tokens: Ids, labels: Ids) -> None:
        """Add an example. A label is that of the token at the same position."""
        is_long = len(tokens) > self.most
        if is_long and self.strategy == "drop":
            self.counts.dropped += 1
            return
        pieces = list(self._pieces(tokens, labels))
        counted = [int((part[1:] != IGNORED).sum()) for _, part in pieces]
        if not any(counted):
            self.counts.unlabelled += 1
            return
        self.counts.truncated += is_long and self.strategy == "truncate"
        self.counts.split += is_long and self.strategy == "split"
        for (part, part_labels), number in zip(pieces, counted):
            if number:
                self.counts.examples += 1
                self.counts.tokens += len(part)
                self.counts.counted += number
                self._tokens.append(part)
                self._labels.append(part_labels)

    def _pieces(self, tokens: Ids, labels: Ids) -> Iterator[tuple[Ids, Ids]]:
        if self.strategy != "split":
            yield tokens[: self.most], labels[: self.most]
            return
        # the last token of a piece is only predicted; the next piece begins with it
        stride = max(1, self.most - 1)
        for begin in range(0, max(1, len(tokens) - 1), stride):
            yield tokens[begin : begin + self.most], labels[begin : begin + self.most]

    def finish(self) -> Examples:
        """The examples so far."""
        ends = np.fromiter(accumulate(map(len, self._tokens)), np.int64, len(self._tokens))
        empty = np.empty(0, np.int32)
        return Examples(np.concatenate([empty, *self._tokens]), np.concatenate([empty, *self._labels]), ends)


def pack_lengths(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Divide examples among sequences so that few sequences are needed: best fit, the longest first.

    Args:
        lengths: tokens of each example, at most `capacity`.
        capacity: tokens of a sequence.

    Returns:
        The numbers of the examples in each sequence. Equal lengths keep their order.
    """
    bins: list[list[int]] = []
    by_space: dict[int, list[int]] = {}
    spaces = 0  # bit s is set if a sequence has s tokens of space left
    for index in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = int(lengths[index])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            place = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, place = capacity, len(bins)
            bins.append([])
        bins[place].append(index)
        rest = space - length
        by_space.setdefault(rest, []).append(place)
        spaces |= 1 << rest
    return bins
