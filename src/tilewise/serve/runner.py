"""From the scheduler's decision to the decoding graph's inputs, and from its logits back to sequences.

Only rows that are wanted get logits. Where none are, one row is computed for nothing, since no graph has none.

Shapes: T tokens of a call, S sequences of a call, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.models import BLOCK_SIZE
from tilewise.runtime import populate
from tilewise.serve.outputs import StepTimes
from tilewise.serve.scheduler import Limits, Scheduled, num_blocks_for
from tilewise.session import GraphInstance

__all__ = ["Runner", "call_inputs"]

Array = NDArray[Any]
_KEPT_STEPS = 128


def call_inputs(parts: Sequence[Scheduled], max_blocks: int) -> dict[str, NDArray[np.int32]]:
    """The arrays that the decoding graph takes for one step.

    Args:
        parts: of the step.
        max_blocks: columns of the block table.
    """
    num_tokens = sum([part.end - part.start for part in parts])
    if num_tokens == len(parts):  # all of them write
        tokens = [p.drafts[0] if p.drafts else p.sequence.history.ids[p.start] for p in parts]
        return _inputs_of_writing(parts, tokens, max_blocks)
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


def _inputs_of_writing(
    parts: Sequence[Scheduled], tokens: list[int], max_blocks: int
) -> dict[str, NDArray[np.int32]]:
    """The same where each part has one token: most steps, and those that may take no time."""
    count, width = len(parts), max([len(part.blocks) for part in parts])
    none = (0,) * width
    table = np.zeros((count, max_blocks), np.int32)
    table[:, :width] = [(part.blocks + none)[:width] for part in parts]
    positions = np.array([part.start for part in parts], np.int32)
    one_each = np.arange(count, dtype=np.int32)
    rows = one_each
    if any(part.first_row == part.end for part in parts):
        rows = np.flatnonzero([part.first_row < part.end for part in parts]).astype(np.int32)
    return {
        "tokens": np.array(tokens, np.int32),
        "positions": positions,
        "slots": table[one_each, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        "sequence": one_each,
        "rows": rows if len(rows) else one_each[:1],
        "block_table": table,
    }


class Runner:
    """Calls a decoding graph. One thread at a time.

    The pages of the KV cache are allocated ahead of the blocks that calls write, as many as one call can fill, while
    the devices compute. So no worker waits for the system to find memory, and what no text has filled is not taken.

    Args:
        instance: of the graph.
        limits: of a step and of the cache.
        output: of the graph, which has the rows: `logits` or `hidden`.
    """

    def __init__(self, instance: GraphInstance, limits: Limits, output: str = "logits") -> None:
        self._output = output
        self._instance = instance
        self._max_blocks = num_blocks_for(limits.max_context)
        self._num_blocks = limits.num_blocks
        self._blocks_of_a_call = num_blocks_for(limits.max_num_batched_tokens) + limits.max_num_seqs
        self._cache = instance.state_memory()
        self._num_allocated = 0  # blocks whose pages are there
        self._allocate(self._blocks_of_a_call)
        self._prepared: tuple[list[Scheduled], dict[str, NDArray[np.int32]]] = [], {}
        self._steps: deque[StepTimes] = deque(maxlen=_KEPT_STEPS)

    def close(self) -> None:
        """Let go of the cache's memory, before the instance is closed."""
        self._cache = []

    @property
    def steps(self) -> tuple[StepTimes, ...]:
        """The last calls, oldest first. May be asked for by any thread."""
        return tuple(self._steps.copy())

    def prepare(self, parts: list[Scheduled]) -> None:
        """Parts that the next call may have, of one token each that is not known yet.

        Args:
            parts: of it.
        """
        tokens = [0] * len(parts)
        self._prepared = parts, _inputs_of_writing(parts, tokens, self._max_blocks)

    def run(
        self,
        parts: list[Scheduled],
        meanwhile: Callable[[], object] | None = None,
        tokens: list[int] | None = None,
    ) -> Array:
        """One call; the logits `[R, V]` that parts want, in their order, to be read before the next call.

        Args:
            parts: of the step.
            meanwhile: called while the devices compute.
            tokens: of the parts, where these were prepared.

        Raises:
            TaskFailed: a kernel failed; what the call wrote to its own positions of the cache is undefined.
        """
        if tokens is None:
            inputs = call_inputs(parts, self._max_blocks)
        else:
            prepared, inputs = self._prepared
            assert prepared is parts
            inputs["tokens"][:] = tokens
        ahead = int(inputs["slots"].max()) // BLOCK_SIZE + 1 + self._blocks_of_a_call

        def during() -> None:
            self._allocate(ahead)
            if meanwhile is not None:
                meanwhile()

        begin = time.monotonic()
        self._instance.forward(during, **inputs)
        seconds = time.monotonic() - begin
        rows_RX = self._instance.get_tensor(self._output, copy=False)
        if tokens is None:
            rows_RX = rows_RX[: sum([part.end - part.first_row for part in parts])]
        num_rows = len(rows_RX)
        self._steps.append(StepTimes(begin, seconds, len(inputs["tokens"]) - num_rows, num_rows))
        return rows_RX

    def _allocate(self, num_blocks: int) -> None:
        """Have the system provide the pages of the first blocks of every layer's cache."""
        first, last = self._num_allocated, min(num_blocks, self._num_blocks)
        if last <= first:
            return
        for memory in self._cache:
            size = len(memory) // self._num_blocks
            populate(memory[first * size : last * size])
        self._num_allocated = last
