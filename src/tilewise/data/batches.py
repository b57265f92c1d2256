"""Batches by step number: a pure function of (stream, seed, step).

The stream is cut into windows of context + 1 tokens at a stride of the context; every epoch visits all
windows once, in an order that Philox draws from (seed, epoch). Step s takes windows s*batch to (s+1)*batch of
that endless sequence. Nothing is remembered between calls, so resuming needs the step number only, and
devices play no role.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.core import Border, ConfigError, shown

__all__ = ["Batches"]

_MOST = (1 << 63) - 1
_border = Border("data")


@dataclass(frozen=True)
class Batches:
    """Training batches of a packed token stream.

    Args:
        stream: ids, `[N]`.
        batch: sequences per step.
        context: tokens per sequence.
        seed: of the order.

    Raises:
        ConfigError: the stream is shorter than one window.
    """

    stream: NDArray[np.int32]
    batch: int
    context: int
    seed: int = 0

    def __post_init__(self) -> None:
        stream = _border.instance("batches", "a stream", self.stream, np.ndarray, "pass an array of ids")
        if stream.ndim != 1 or stream.dtype.kind not in "iu":
            _border.refuse("batches", "a stream is one row of integers", shown(stream), "flatten it")
        for name, low in (("batch", 1), ("context", 1), ("seed", 0)):
            value = _border.integer("batches", name, getattr(self, name), low, _MOST)
            object.__setattr__(self, name, value)
        if self.num_windows < 1:
            raise ConfigError(
                f"[data.batches] the data must hold at least context + 1 = {self.context + 1} tokens; "
                f"got {len(self.stream)}; give more text"
            )

    @property
    def num_windows(self) -> int:
        """Windows per epoch."""
        return (len(self.stream) - 1) // self.context

    def at(self, step: int) -> dict[str, NDArray[np.int32]]:
        """Tokens and labels `[batch, context]` of a step; labels are the tokens one place on."""
        step = _border.integer("batches", "a step", step, 0, _MOST // self.batch)
        rows = [self._window(step * self.batch + i) for i in range(self.batch)]
        both = np.stack([self.stream[w * self.context : (w + 1) * self.context + 1] for w in rows])
        return {
            "tokens": np.ascontiguousarray(both[:, :-1]),
            "labels": np.ascontiguousarray(both[:, 1:]),
        }

    def _window(self, index: int) -> int:
        epoch, position = divmod(index, self.num_windows)
        return int(_epoch_order(self.num_windows, self.seed, epoch)[position])


_ORDERS: dict[tuple[int, int, int], NDArray[np.int64]] = {}


def _epoch_order(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch's windows; the last two are kept, for a batch may straddle epochs."""
    key = (num_windows, seed, epoch)
    if key not in _ORDERS:
        while len(_ORDERS) >= 2:
            _ORDERS.pop(next(iter(_ORDERS)))
        generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64)))
        _ORDERS[key] = generator.permutation(num_windows)
    return _ORDERS[key]
