"""Batches by step number: a pure function of (stream, seed, step).

The stream is divided into windows. Packed windows have context + 1 tokens at a stride of the
context, wherever documents end. Padded windows hold one document each; a longer document takes
several. Every epoch visits all windows once, in an order that Philox generates from (seed, epoch).
Step s takes windows s*batch to (s+1)*batch of this endless sequence. There is no state, so resuming
needs only the step number, and the number of devices has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tilewise.core import ConfigError, Validator, shown

__all__ = ["IGNORED", "Batches", "PaddedBatches"]

IGNORED = -100  # label of positions that the loss ignores
_MOST = (1 << 63) - 1
_MOST_ID = (1 << 31) - 1
_validate = Validator("data")


@dataclass(frozen=True)
class Batches:
    """Training batches of a packed token stream.

    Args:
        stream: ids, `[N]`.
        batch: sequences per step.
        context: tokens per sequence.
        seed: of the order.

    Raises:
        ConfigError: the stream is shorter than one window, or has an id beyond int32.
    """

    stream: NDArray[np.int32]
    batch: int
    context: int
    seed: int = 0

    def __post_init__(self) -> None:
        stream = self.stream
        if stream.ndim != 1 or stream.dtype.kind not in "iu":
            _validate.invalid("batches", "a stream is one row of integers", shown(stream), "flatten it")
        if not np.can_cast(stream.dtype, np.int32) and stream.size:
            for id_ in (stream.min(), stream.max()):
                _validate.integer("batches", "an id of a stream", id_, 0, _MOST_ID)
        for name, low in (("batch", 1), ("context", 1), ("seed", 0)):
            value = _validate.integer("batches", name, getattr(self, name), low, _MOST)
            object.__setattr__(self, name, value)
        if self.num_windows < 1:
            raise ConfigError(
                f"[data.batches] the data must hold at least {self._least}; got {len(self.stream)}; give more text"
            )

    @property
    def _least(self) -> str:
        """The amount of text needed for a window, in words."""
        return f"context + 1 = {self.context + 1} tokens"

    @property
    def num_windows(self) -> int:
        """Windows per epoch."""
        return (len(self.stream) - 1) // self.context

    def at(self, step: int) -> dict[str, NDArray[np.int32]]:
        """Tokens and labels `[batch, context]` of a step; labels are the tokens one place on."""
        rows = self._windows(step)
        both = np.stack([self.stream[w * self.context : (w + 1) * self.context + 1] for w in rows])
        return {
            "tokens": np.ascontiguousarray(both[:, :-1], np.int32),
            "labels": np.ascontiguousarray(both[:, 1:], np.int32),
        }

    def _windows(self, step: int) -> list[int]:
        """The numbers of a step's windows."""
        step = _validate.integer("batches", "a step", step, 0, _MOST // self.batch)
        return [self._window(step * self.batch + i) for i in range(self.batch)]

    def _window(self, index: int) -> int:
        epoch, position = divmod(index, self.num_windows)
        return int(_epoch_order(self.num_windows, self.seed, epoch)[position])


@dataclass(frozen=True)
class PaddedBatches(Batches):
    """Training batches with one document per sequence. A batch is as wide as its longest document;
    shorter ones are padded.

    Every token of a document is predicted once per epoch, the first one from the end mark of the
    previous document.

    Args:
        stream: ids, `[N]`; a mark ends each document.
        batch: sequences per step.
        context: maximum tokens per sequence; longer documents are divided.
        seed: of the order.
        end: the id of the mark. It is also the padding id, with label `IGNORED`.

    Raises:
        ConfigError: the stream is empty.
    """

    end: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "end", _validate.integer("batches", "end", self.end, 0, _MOST_ID))
        super().__post_init__()

    @property
    def _least(self) -> str:
        return "1 token"

    @cached_property
    def _cuts(self) -> NDArray[np.int64]:
        """The beginnings of windows, and the end of the last."""
        behind = np.flatnonzero(self.stream == self.end) + 1
        borders = np.unique([0, *behind, len(self.stream)])
        windows = [np.arange(a, b, self.context) for a, b in pairwise(borders)]
        return np.concatenate([*windows, borders[-1:]]).astype(np.int64)

    @property
    def num_windows(self) -> int:
        """Windows per epoch."""
        return len(self._cuts) - 1

    def at(self, step: int) -> dict[str, NDArray[np.int32]]:
        """Tokens and labels `[batch, longest]` of a step."""
        spans = [(self._cuts[w], self._cuts[w + 1]) for w in self._windows(step)]
        shape = self.batch, max(stop - begin for begin, stop in spans)
        tokens, labels = np.full(shape, self.end, np.int32), np.full(shape, IGNORED, np.int32)
        for row, (begin, stop) in enumerate(spans):
            first = self.stream[begin - 1] if begin else self.end
            tokens[row, : stop - begin] = [first, *self.stream[begin : stop - 1]]
            labels[row, : stop - begin] = self.stream[begin:stop]
        return {"tokens": tokens, "labels": labels}


_ORDERS: dict[tuple[int, int, int], NDArray[np.int64]] = {}


def _epoch_order(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch's windows. The last two are cached, because a batch may span two epochs."""
    key = (num_windows, seed, epoch)
    if key not in _ORDERS:
        while len(_ORDERS) >= 2:
            _ORDERS.pop(next(iter(_ORDERS)))
        generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64)))
        _ORDERS[key] = generator.permutation(num_windows)
    return _ORDERS[key]
