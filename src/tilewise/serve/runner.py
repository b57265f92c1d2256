"""Runs the decoding graph: makes its inputs from the scheduled parts, and returns the logits.

Logits are computed only for the rows that are needed. If no row is needed, one unused row is
computed, because the graph computes at least one.

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
_NUM_STEPS = 128


def call_inputs(parts: Sequence[Scheduled], max_blocks: int) -> dict[str, NDArray[np.int32]]:
    """The arrays that the decoding graph takes for one step.

    Args:
        parts: parts of the step.
        max_blocks: columns of the block table.
    """
    num_tokens = sum([part.end - part.start for part in parts])
    if num_tokens == len(parts):  # all are in decode
        tokens = [p.drafts[0] if p.drafts else p.sequence.history.ids[p.start] for p in parts]
        return _decode_inputs(parts, tokens, max_blocks)
    named: dict[str, list[int]] = {name: [] for name in ("tokens", "positions", "slots", "sequence", "rows")}
    table = np.zeros((len(parts), max_blocks), np.int32)
    for index, part in enumerate(parts):
        table[index, : len(part.blocks)] = part.blocks
        shift = len(named["tokens"]) - part.start
        named["rows"] += range(part.first_row + shift, part.end + shift)
        named["tokens"] += part.sequence.history.ids[part.start : part.confirmed_end]
        named["tokens"] += part.drafts
        named["positions"] += range(part.start, part.end)
        named["slots"] += [
            part.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            for place in range(part.start, part.end)
        ]
        named["sequence"] += [index] * (part.end - part.start)
    named["rows"] = named["rows"] or [0]
    return {**{name: np.array(values, np.int32) for name, values in named.items()}, "block_table": table}


def _decode_inputs(
    parts: Sequence[Scheduled], tokens: list[int], max_blocks: int
) -> dict[str, NDArray[np.int32]]:
    """The inputs for a step whose parts have one token each. Most steps are of this form, so this
    function is vectorized.
    """
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
    """Calls a decoding graph. Not thread-safe.

    While the devices compute, this class allocates the memory pages of the KV-cache blocks that the
    next call can fill. So no worker waits for a page fault, and blocks that were never used take no
    memory.

    Args:
        instance: instance of the graph.
        limits: sizes of a step and of the cache.
        output: the output of the graph that has the rows: `logits` or `hidden`.
        has_adapters: whether the graph has the input `adapter`.
    """

    def __init__(
        self, instance: GraphInstance, limits: Limits, output: str = "logits", *, has_adapters: bool = False
    ) -> None:
        self._output, self._has_adapters = output, has_adapters
        self._instance = instance
        self._max_blocks = num_blocks_for(limits.max_context)
        self._num_blocks = limits.num_blocks
        self._blocks_of_a_call = num_blocks_for(limits.max_num_batched_tokens) + limits.max_num_seqs
        self._cache = instance.state_memory()
        self._num_allocated = 0  # blocks whose pages are allocated
        self._allocate(self._blocks_of_a_call)
        self._prepared: tuple[list[Scheduled], dict[str, NDArray[np.int32]]] = [], {}
        self._steps: deque[StepTimes] = deque(maxlen=_NUM_STEPS)

    def close(self) -> None:
        """Drop the views of the cache's memory. Call before the instance is closed."""
        self._cache = []

    @property
    def steps(self) -> tuple[StepTimes, ...]:
        """Times of the last calls, oldest first. Any thread may read them."""
        return tuple(self._steps.copy())

    def prepare(self, parts: list[Scheduled]) -> None:
        """Make the inputs of a call whose parts have one token each, before the tokens are known.

        Args:
            parts: parts of the call.
        """
        tokens = [0] * len(parts)
        self._prepared = parts, _decode_inputs(parts, tokens, self._max_blocks)

    def run(
        self,
        parts: list[Scheduled],
        meanwhile: Callable[[], object] | None = None,
        tokens: list[int] | None = None,
    ) -> Array:
        """Run one call. Returns its rows `[R, V]` in the order of the parts. They are valid until
        the next call.

        Args:
            parts: parts of the step.
            meanwhile: called while the devices compute.
            tokens: tokens of the parts, if `prepare` was called for the parts; otherwise None.

        Raises:
            TaskFailed: a kernel failed. The content of the parts' positions in the cache is then
                undefined.
        """
        if tokens is None:
            inputs = call_inputs(parts, self._max_blocks)
        else:
            prepared, inputs = self._prepared
            assert prepared is parts
            inputs["tokens"][:] = tokens
        if self._has_adapters:
            numbers = [part.sequence.request.adapter for part in parts]
            inputs = {
                **inputs,
                "adapter": np.repeat(numbers, [p.end - p.start for p in parts]).astype(np.int32),
            }
        num_blocks = int(inputs["slots"].max()) // BLOCK_SIZE + 1 + self._blocks_of_a_call

        def during() -> None:
            self._allocate(num_blocks)
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
        """Allocate the memory pages of the first `num_blocks` blocks in every layer's cache."""
        first, last = self._num_allocated, min(num_blocks, self._num_blocks)
        if last <= first:
            return
        for memory in self._cache:
            size = len(memory) // self._num_blocks
            populate(memory[first * size : last * size])
        self._num_allocated = last
