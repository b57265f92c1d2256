"""Training on few long sequences, in which the workers of a device share every product: the bits of one worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_mutations import with_instructions
from test_shared_products import by_columns, instruction_at

import tilewise as tw
from support.task_order import validate_order
from tilewise import models
from tilewise.ir.program import Mode
from tilewise.models import llama
from tilewise.session.assemble import native_program

BATCH, SEQ, VOCAB = 2, 40, 272
CONFIG = llama.LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=384,
    intermediate_size=800,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
)


def planned(
    workers: int, dtype: str = "f32", *, lengths: bool = False, batch: int = BATCH, **options
) -> tuple:
    """A training step with this many workers per device, and one or two row tiles."""
    graph = tw.ComputeGraph("steps")
    seq = tw.Dim("seq", 1, SEQ) if lengths else SEQ
    models.build_training_graph(graph, CONFIG, batch, seq, dtype)
    graph.optimize(tw.optim.AdamW())
    return graph, graph.plan(**{"workers_per_device": workers, "batch_splits": BATCH, **options})


def train(graph: tw.ComputeGraph, plan: tw.Plan, length: int = SEQ) -> bytes:
    with graph.instantiate(plan) as model:
        model.initialize(seed=1)
        for step in range(2):
            ids = np.random.default_rng(step).integers(0, VOCAB, (BATCH, length + 1), dtype=np.int32)
            model.step({"tokens": ids[:, :-1], "labels": ids[:, 1:]}, lr=1e-2)
        return b"".join(np.ascontiguousarray(p).tobytes() for p in model.parameters().values())


WAYS = {
    "f32": [{}, {"mesh": {"tp": 2}}, {"accumulation": 2, "recompute": "full"}],
    "bf16": [{"mesh": {"dp": 2}}, {"mesh": {"fsdp": 2}}, {"offload": "optimizer"}],
}


@pytest.mark.parametrize("dtype", WAYS)
def test_workers_share_a_step_with_the_same_bits(dtype):
    """One device and two, sums over microbatches, recomputation and states in files."""
    expected = train(*planned(1, dtype))
    for way in WAYS[dtype]:
        graph, plan = planned(3, dtype, **way)
        kernels = {instruction_at(plan, at).kernel for at in by_columns(plan)}
        assert {f"{k}_{dtype}" for k in ("matmul", "matmul_dx", "silu_gate", "silu_gate_backward")} <= kernels
        shares = {"attention", "attention_backward"} & {
            kernel.removesuffix(f"_{dtype}") for kernel in kernels
        }
        assert len(shares) == (0 if "tp" in way.get("mesh", {}) else 2)  # two devices' heads are too few
        assert train(graph, plan) == expected, way


def test_input_gradients_read_columns_of_panels():
    """The twin: as columns of plain rows, other weights are read, and the bits differ."""
    graph, plan = planned(3)
    expected = train(graph, plan)
    at = next(at for at in by_columns(plan) if instruction_at(plan, at).kernel == "matmul_dx_f32")
    instruction = instruction_at(plan, at)
    *operands, weight = instruction.operands
    assert weight.mode == Mode.PANELCOLS
    changed = replace(instruction, operands=(*operands, weight._replace(mode=Mode.COL)))
    instructions = list(plan.program.classes[0].templates[at[0]].instructions)
    instructions[at[1]] = changed
    program = with_instructions(plan.program, 0, at[0], tuple(instructions))
    assert train(graph, replace(plan, program=program)) != expected


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"dp": 2}], ids=str)
def test_tiles_of_columns_are_ordered(axes):
    """Every two uses of the same bytes, forward and backward."""
    _, plan = planned(3, mesh=axes)
    native = native_program(plan.program, plan.symbol_bounds)
    validate_order([native.tasks(d, [], "step") for d in range(plan.mesh.num_devices)])


def test_enough_row_tiles_prevent_column_tiles():
    """Whole rows, which norms and attention need, are preferred where they keep all workers busy."""
    assert not by_columns(planned(2)[1])
    assert not by_columns(planned(16, batch=8, batch_splits=8)[1])
    assert by_columns(planned(2, batch_splits=1)[1])
    assert not by_columns(planned(2, batch_splits=1, rows_per_tile=SEQ)[1])


def test_sequences_of_any_length_are_shared():
    """Rows, and rows per tile, depend on the batch."""
    (graph, plan), alone = planned(3, lengths=True), planned(1, lengths=True)
    assert by_columns(plan)
    for length in (1, 33):
        assert train(graph, plan, length) == train(*alone, length), length


@pytest.mark.parametrize("label", [None, tw.DimLabel("x", 1)], ids=["unlabelled", "of single elements"])
@pytest.mark.parametrize("width", [8, 300])
def test_softmax_has_whole_rows(width, label):
    """Workers that share rows by columns compute a softmax and its gradient on whole rows."""

    def results(workers):
        graph = tw.ComputeGraph("rows")
        x = graph.input([1, 4], name="x", labels=[tw.BATCH, None])
        y = graph.softmax(tw.nn.linear(graph, x, "w", width, out_label=label))
        graph.output(y, "y")
        graph.loss(graph.sum(graph.mul(y, y)))
        with graph.instantiate(graph.plan(workers_per_device=workers)) as model:
            model.initialize(seed=0, scale=0.5)
            model.forward(x=np.ones((1, 4), np.float32))
            model.backward()
            return [model.get_tensor(name) for name in ("w", "y", "w.grad")]

    weight, y, gradient = results(1)
    exact = np.exp(weight.astype(np.float64).sum(1))
    exact /= exact.sum()
    assert np.abs(y[0] - exact).max() < 1e-6
    slope = 2 * exact * (exact - (exact * exact).sum())
    assert np.abs(gradient - slope[:, None]).max() < 1e-6
    for workers in (2, 16):
        for one, other in zip((weight, y, gradient), results(workers)):
            np.testing.assert_array_equal(one, other)
