"""Small seeded Llamas and steps, and faults to plant in their plans: shared by the tests that compare strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

import tilewise as tw
from tilewise.ir.program import Instruction
from tilewise.models import llama
from tilewise.plan import Plan

BATCH, SEQ = 16, 32


def config(**changes: object) -> llama.LlamaConfig:
    """Two layers, eight query heads, four KV heads; every dim is large enough for eight devices."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    return llama.LlamaConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def training_graph(
    model: llama.LlamaConfig, dtype: str, batch: int = BATCH, seq: int = SEQ
) -> tw.ComputeGraph:
    """A training graph with AdamW and clipping."""
    graph = tw.ComputeGraph("llama")
    llama.build_training_graph(graph, model, batch, seq, dtype)
    graph.optimize(tw.optim.AdamW())
    return graph


def batches(
    model: llama.LlamaConfig, steps: int, batch: int = BATCH, seq: int = SEQ
) -> list[Mapping[str, np.ndarray]]:
    """Random tokens; some labels are not counted."""
    generator = np.random.default_rng(7)
    result = []
    for _ in range(steps):
        t = generator.integers(0, model.vocab_size, (batch, seq + 1)).astype(np.int32)
        labels = np.where(generator.random((batch, seq)) < 0.1, -100, t[:, 1:]).astype(np.int32)
        result.append({"tokens": t[:, :-1], "labels": labels})
    return result


def instructions(plan: Plan, device: int, label: str, program: str = "step") -> list:
    """Instructions of a device whose label contains `label`, over a program's templates (shared between programs)."""
    return [i for t in plan.programs[program][device].templates for i in t.instructions if label in i.label]


def change_first(
    label: str, change: Callable, device: int = 0, program: str = "step"
) -> Callable[[Plan], None]:
    """A fault: `change` applied to the first instruction on a device (-1: the last) whose label contains `label`."""

    def apply(plan: Plan) -> None:
        found = instructions(plan, device, label, program)
        assert found, f"no instruction is labelled {label!r}"
        change(found[0])

    return apply


def drop_partial(instruction: Instruction) -> None:
    """The peer's partial is replaced by the device's own."""
    own = next(i for i, o in enumerate(instruction.operands) if i >= 2 and o.team < 0)
    peer = next(i for i, o in enumerate(instruction.operands) if o.team >= 0)
    instruction.operands[peer] = instruction.operands[own]


def swap_partials(instruction: Instruction) -> None:
    """Two partials change places in the tree."""
    instruction.operands[3], instruction.operands[4] = instruction.operands[4], instruction.operands[3]


def merge_chunks(instruction: Instruction) -> None:
    """The first two chunks are summed as one: another order of the same additions."""
    _, terms, chunks, *ranges = instruction.ints
    assert terms == 1 and chunks > 1 and ranges[1] == ranges[2]
    instruction.ints = [
        instruction.ints[0],
        1,
        chunks,
        ranges[0],
        ranges[3],
        ranges[3],
        ranges[3],
        *ranges[4:],
    ]


def halve_leaves(instruction: Instruction) -> None:
    """A leaf is cut in two: the tree over tokens gets another shape."""
    instruction.ints = [instruction.ints[0] // 2, *instruction.ints[1:]]
