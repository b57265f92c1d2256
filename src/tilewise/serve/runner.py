"""From the scheduler's decision to the decoding graph's inputs, and from its logits back to sequences.

Only rows that are wanted get logits. Where none are, one row is computed for nothing, since no graph has none.

Shapes: T tokens of a call, S sequences of a call, R rows with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.models import BLOCK_SIZE
from tilewise.serve.scheduler import Scheduled
from tilewise.session import GraphInstance

__all__ = ["Runner", "call_inputs"]

Array = NDArray[Any]


def call_inputs(parts: Sequence[Scheduled], max_blocks: int) -> dict[str, NDArray[np.int32]]:
    """The arrays that the decoding graph takes for one step.

    Args:
        parts: of the step.
        max_blocks: columns of the block table.
    """
    named: dict[str, list[int]] = {name: [] for name in ("tokens", "positions", "slots", "sequence", "rows")}
    table = np.zeros((len(parts), max_blocks), np.int32)
    for index, part in enumerate(parts):
        table[index, : len(part.blocks)] = part.blocks
        shift = len(named["tokens"]) - part.start
        named["rows"] += range(part.first_row + shift, part.end + shift)
        named["tokens"] += part.sequence.history.ids[part.start : part.known]
        named["tokens"] += part.drafts
        named["positions"] += range(part.start, part.end)
        named["slots"] += [
            part.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            for place in range(part.start, part.end)
        ]
        named["sequence"] += [index] * (part.end - part.start)
    named["rows"] = named["rows"] or [0]
    return {**{name: np.array(values, np.int32) for name, values in named.items()}, "block_table": table}


class Runner:
    """Calls a decoding graph. One thread at a time.

    Args:
        instance: of the graph.
        max_blocks: columns of its block table.
        output: of the graph, which has the rows: `logits` or `hidden`.
    """

    def __init__(self, instance: GraphInstance, max_blocks: int, output: str = "logits") -> None:
        self._output = output
        self._instance = instance
        self._max_blocks = max_blocks

    def run(self, parts: Sequence[Scheduled]) -> list[Array]:
        """One call; the logits `[rows, V]` of each part, in their order.

        Raises:
            TaskFailed: a kernel failed; what the call wrote to its own positions of the cache is undefined.
        """
        self._instance.forward(**call_inputs(parts, self._max_blocks))
        if all(part.first_row == part.end for part in parts):
            return [np.zeros((0, 0))] * len(parts)
        rows_RX = self._instance.get_tensor(self._output)
        counts = [part.end - part.first_row for part in parts]
        return np.split(rows_RX, np.cumsum(counts)[:-1])
