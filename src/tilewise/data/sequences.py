"""Training sequences of one source: a stream of text in windows, or examples with labels.

Each class numbers its sequences and gives the tokens and labels of one. Labels are shifted here:
`labels[i]` is the token that follows `tokens[i]`, or `IGNORED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tilewise.core import Validator, shown
from tilewise.data.examples import IGNORED, Examples, Ids, pack_lengths

__all__ = ["PackedExamples", "PaddedExamples", "Sequences", "TextDocuments", "TextWindows", "Undivided"]

_MOST = (1 << 63) - 1
_MOST_ID = (1 << 31) - 1
_validate = Validator("data")


class Sequences(Protocol):
    """Numbered sequences."""

    def __len__(self) -> int:
        """Number of sequences."""
        ...

    def row(self, index: int) -> tuple[Ids, Ids]:
        """Tokens and labels of a sequence, equally long."""
        ...

    def starts(self, index: int) -> Sequence[int]:
        """Where the documents of a sequence begin that do not see each other, in ascending order."""
        ...


def _check_stream(stream: NDArray[np.int32], context: int) -> None:
    """Check a stream of ids and the tokens per sequence.

    Raises:
        ConfigError: the stream is not a row of int32 ids, or the context is not positive.
    """
    if stream.ndim != 1 or stream.dtype.kind not in "iu":
        _validate.invalid("batches", "a stream is one row of integers", shown(stream), "flatten it")
    if not np.can_cast(stream.dtype, np.int32) and stream.size:
        for id_ in (stream.min(), stream.max()):
            _validate.integer("batches", "an id of a stream", id_, 0, _MOST_ID)
    _validate.integer("batches", "context", context, 1, _MOST)


class Undivided:
    """Sequences whose tokens see all earlier ones."""

    def starts(self, index: int) -> Sequence[int]:
        """One document."""
        return (0,)


@dataclass(frozen=True)
class TextWindows(Undivided):
    """Windows of a stream at a stride of the context, wherever documents end. Each has `context`
    tokens.

    Args:
        stream: ids, `[N]`.
        context: tokens per sequence.

    Raises:
        ConfigError: the stream is shorter than one window, or has an id beyond int32.
    """

    stream: NDArray[np.int32]
    context: int

    def __post_init__(self) -> None:
        _check_stream(self.stream, self.context)
        if len(self) < 1:
            _validate.invalid(
                "batches",
                f"the data must hold at least context + 1 = {self.context + 1} tokens",
                str(len(self.stream)),
                "give more text",
            )

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.context

    @property
    def num_unused(self) -> int:
        """Tokens at the end that no window predicts."""
        return len(self.stream) - 1 - len(self) * self.context

    def row(self, index: int) -> tuple[Ids, Ids]:
        """Tokens and labels `[context]`; labels are the tokens one place on."""
        window = self.stream[index * self.context : (index + 1) * self.context + 1].astype(np.int32)
        return window[:-1], window[1:]


@dataclass(frozen=True)
class TextDocuments(Undivided):
    """The documents of a stream, one per sequence. Every token of a document is predicted once, the
    first one from the end mark of the previous document.

    Args:
        stream: ids, `[N]`; a mark ends each document.
        context: maximum tokens per sequence; longer documents are divided.
        end: the id of the mark.

    Raises:
        ConfigError: the stream is empty.
    """

    stream: NDArray[np.int32]
    context: int
    end: int = 0

    def __post_init__(self) -> None:
        _validate.integer("batches", "end", self.end, 0, _MOST_ID)
        _check_stream(self.stream, self.context)
        if not len(self.stream):
            _validate.invalid("batches", "the data must hold at least 1 token", "0", "give more text")

    @cached_property
    def _cuts(self) -> NDArray[np.int64]:
        """The beginnings of windows, and the end of the last."""
        behind = np.flatnonzero(self.stream == self.end) + 1
        ends = np.unique([0, *behind, len(self.stream)])
        windows = [np.arange(a, b, self.context) for a, b in pairwise(ends)]
        return np.concatenate([*windows, ends[-1:]]).astype(np.int64)

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def row(self, index: int) -> tuple[Ids, Ids]:
        """Tokens and labels of a document, or of a part of one."""
        begin, stop = int(self._cuts[index]), int(self._cuts[index + 1])
        first = self.stream[begin - 1] if begin else self.end
        tokens = np.array([first, *self.stream[begin : stop - 1]], np.int32)
        return tokens, self.stream[begin:stop].astype(np.int32)


@dataclass(frozen=True)
class PaddedExamples(Undivided):
    """Examples, one per sequence. The last token of an example is only predicted.

    Args:
        examples: each with at least two tokens and a counted label.
    """

    examples: Examples

    def __len__(self) -> int:
        return len(self.examples)

    def row(self, index: int) -> tuple[Ids, Ids]:
        """Tokens and labels of an example, one shorter than the example."""
        tokens, labels = self.examples[index]
        return tokens[:-1], labels[1:]


@dataclass(frozen=True)
class PackedExamples:
    """Several examples per sequence, whole and one after the other. They do not see each other.

    Args:
        examples: each with at most `context` tokens.
        context: maximum tokens per sequence.
        multiple: examples begin at multiples of it, which divides the context. Tokens of id 0, whose
            labels are not counted, fill the space before.
    """

    examples: Examples
    context: int
    multiple: int = 1

    @cached_property
    def _spaces(self) -> NDArray[np.int64]:
        """The tokens that each example takes in a sequence."""
        return -(-np.asarray(self.examples.lengths, np.int64) // self.multiple) * self.multiple

    @cached_property
    def bins(self) -> list[list[int]]:
        """The numbers of the examples in each sequence."""
        return pack_lengths(self._spaces, self.context)

    def starts(self, index: int) -> Sequence[int]:
        """Where the examples of a sequence begin."""
        spaces = self._spaces[self.bins[index]].tolist()
        return [0, *accumulate(spaces[:-1])]

    def __len__(self) -> int:
        return len(self.bins)

    def row(self, index: int) -> tuple[Ids, Ids]:
        """Tokens and labels of the examples in a sequence."""
        numbers, starts = self.bins[index], self.starts(index)
        end = starts[-1] + int(self.examples.lengths[numbers[-1]])
        tokens, labels = np.zeros(end, np.int32), np.full(end, IGNORED, np.int32)
        for number, start in zip(numbers, starts):
            own, own_labels = self.examples[number]
            tokens[start : start + len(own)] = own
            labels[start : start + len(own) - 1] = own_labels[1:]
        return tokens, labels
