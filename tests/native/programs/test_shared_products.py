"""Decoding in which the workers of a device share every product: column tiles, their order, and the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_mutations import with_instructions

import tilewise as tw
from support.task_order import validate_order
from tilewise import models
from tilewise.core.errors import InternalError
from tilewise.ir.program import Access, Mode
from tilewise.models import BLOCK_SIZE, llama
from tilewise.session.assemble import native_program

MOST, CONTEXT, VOCAB = 300, 320, 272
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 384,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "max_position_embeddings": CONTEXT,
}
COUNTS = (1, 5, 33, MOST)


def planned(workers: int, dtype: str = "f32", **axes: int) -> tuple[tw.ComputeGraph, tw.Plan]:
    graph = tw.ComputeGraph("llama")
    blocks = -(-CONTEXT // BLOCK_SIZE)
    models.build_decoding_graph(
        graph, llama.LlamaConfig(**SHAPE), MOST, 1, blocks, dtype, context=CONTEXT, max_rows=MOST
    )
    return graph, graph.plan(axes, workers_per_device=workers)


def by_columns(plan: tw.Plan) -> list[tuple[int, int]]:
    """Instructions that write column tiles: template and index."""
    return [
        (t, i)
        for t, template in enumerate(plan.program.classes[0].templates)
        for i, instruction in enumerate(template.instructions)
        if any(o.mode == Mode.COL and o.access & Access.OUT for o in instruction.operands)
    ]


def logits_of(plan: tw.Plan, graph: tw.ComputeGraph, count: int) -> bytes:
    places = np.arange(count, dtype=np.int32)
    with graph.instantiate(plan) as model:
        model.initialize(3)
        model.forward(
            tokens=(places * 7 % VOCAB).astype(np.int32),
            positions=places,
            slots=places,
            sequence=np.zeros(count, np.int32),
            block_table=np.arange(-(-CONTEXT // BLOCK_SIZE), dtype=np.int32)[None],
            rows=places,
        )
        return np.asarray(model.get_tensor("logits")).tobytes()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_workers_share_products_with_the_same_bits(dtype):
    """Two and three workers, two devices of two, and one row up to more than two tiles of rows."""
    graph, alone = planned(1, dtype)
    assert not by_columns(alone)
    shared = [planned(2, dtype)[1], planned(3, dtype)[1], planned(2, dtype, tp=2)[1]]
    for plan in shared:
        kernels = {plan.program.classes[0].templates[t].instructions[i].kernel for t, i in by_columns(plan)}
        assert {f"matmul_{dtype}", f"silu_gate_{dtype}"} <= kernels
    assert any(
        i.kernel == f"attention_paged_{dtype}" and i.operands[0].mode == Mode.COL
        for t in shared[0].program.classes[0].templates
        for i in t.instructions
    )
    for count in COUNTS:
        expected = logits_of(alone, graph, count)
        for plan in shared:
            assert logits_of(plan, graph, count) == expected, (count, plan.settings.workers_per_device)


def test_another_order_of_sums_is_detected():
    """The twin: a single column tile with another order of sums."""
    graph, alone = planned(1)
    _, shared = planned(2)
    expected = logits_of(alone, graph, 5)
    template, place = next(at for at in by_columns(shared) if "down_proj" in instruction_at(shared, at).label)
    instructions = list(shared.program.classes[0].templates[template].instructions)
    is_f32, terms, k_splits, *cuts = (int(n) for n in instructions[place].ints)
    joined = [0, cuts[3], *([cuts[3]] * 2), *cuts[4:]]
    instructions[place] = replace(instructions[place], ints=(is_f32, terms, k_splits, *joined))
    program = with_instructions(shared.program, 0, template, tuple(instructions))
    assert logits_of(replace(shared, program=program), graph, 5) != expected


def instruction_at(plan: tw.Plan, at: tuple[int, int]):
    return plan.program.classes[0].templates[at[0]].instructions[at[1]]


def order_of(plan: tw.Plan, program, count: int) -> None:
    """Every two uses of the same bytes are ordered, for this many tokens."""
    native = native_program(program, plan.symbol_bounds)
    sizes = {"tokens": count, "sequences": 1, "rows": count}
    symbols = [sizes[s.name] for s in plan.shapes.symbols]
    validate_order([native.tasks(d, symbols, "forward") for d in range(plan.mesh.num_devices)])


@pytest.mark.parametrize("axes", [{}, {"tp": 2}], ids=str)
def test_tiles_of_columns_are_ordered(axes):
    """Also if columns of one tensor reuse bytes of another's rows."""
    _, plan = planned(3, **axes)
    for count in (1, 130):
        order_of(plan, plan.program, count)


def test_a_missing_access_is_found():
    """Without the access of any operand of a shared product, some pair is not ordered."""
    _, plan = planned(2)
    count = 0
    for at in by_columns(plan):
        instruction = instruction_at(plan, at)
        for number, operand in enumerate(instruction.operands):
            if operand.null or plan.program.classes[0].templates[at[0]].slots[operand.slot].kind == "temp":
                continue
            role = operand.access or Access.IN
            operands = list(instruction.operands)
            operands[number] = operand._replace(access=Access.NONE, role=role)
            instructions = list(plan.program.classes[0].templates[at[0]].instructions)
            instructions[at[1]] = replace(instruction, operands=tuple(operands))
            try:
                order_of(plan, with_instructions(plan.program, 0, at[0], tuple(instructions)), 1)
            except InternalError as error:
                assert "two uses of the same bytes" in str(error)
                count += 1
                break
    assert count == len(by_columns(plan))
