"""A tile program is the lowering of an op: trained, planned, saved, with the bits of the planner's own
operator.
"""

from collections.abc import Sequence

import numpy as np
import pytest

import tilewise as tw
from tilewise import comm
from tilewise.core.errors import InternalError
from tilewise.graph.ops.common import incoming
from tilewise.graph.ops.linear import LinearTerm, LinearWeightGradient
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Partial, operand, register, result
from tilewise.ir.tape import Tape
from tilewise.plan.collectives import check_collective
from tilewise.tiles import NewSignals

BATCH, WIDTH, INNER = 16, 24, 64
FAULT = []


@tw.tile_program
def reduced_product(x, w, part, out, ready, done, rows, k_splits):
    """`out`, the sum over devices of x · wᵀ: the owner of a tile adds the parts and puts the sum."""
    me, n = comm.rank(), comm.num_ranks()
    tiles = x.shape[0] // rows // n  # per device
    for step in range(1, n + 1):
        owner = (me + step) % n
        for t in comm.tiles(tiles):
            row = owner * tiles + t
            comm.matmul(part.tile(row, rows=rows), x.tile(row, rows=rows), w, k_splits=k_splits)
            comm.notify(ready[row], owner)
    for t in comm.tiles(tiles):
        row = me * tiles + t
        parts = comm.consume_token(part, comm.wait(ready[row], n)).tile(row, rows=rows)
        order = [*range(FAULT[0] if FAULT else 0, n), *range(FAULT[0] if FAULT else 0)]
        every = [comm.symm_at(parts, device) for device in order]
        comm.kernel("tree_add", out=out.tile(row, rows=rows), x=every)
    for step in range(1, n):
        for t in comm.tiles(tiles):
            tile = out.tile(me * tiles + t, rows=rows)
            comm.put_signal(comm.symm_at(tile, (me + step) % n), tile, done[0])
    comm.wait(done[0], tiles * (n - 1))


@register
class ProgramProduct(Op):
    """`x · wᵀ`, completed over devices by a tile program."""

    name = "program_product"
    partial_values = (Partial("product", "k", "out", cut_by="w"),)
    x: int = operand("... k*")
    w: int = operand("n k*", storage="packed")
    out: int = result("... n")

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        dy, x, w = incoming(self, grads), tape.use(self.x), tape.use(self.w)
        dw = tape.later(LinearWeightGradient(w=w, rows=dy, cols=x))
        return {"x": LinearTerm(dy, w, False), "w": dw}

    def lower(self, low: Lowering) -> None:
        x, w, out = low.tensor(self.x), low.tensor(self.w), low.tensor(self.out)
        spec, pending = low.spec(self.w), low.pending_reduction("product")
        splits = low.contraction_splits([(spec, spec.labels[1], 1)], pending)
        if pending is None:
            ranges = [v for split in splits for r in split for v in r]
            tiles = {"out": low.row(out), "a": [low.row(x)], "w": [low.whole(w)]}
            ints = {"num_k_splits": len(splits), "range": ranges}
            low.emit("matmul", over=out, dtype=out.dtype, tiles=tiles, ints=ints)
            return
        part = low.temp_like(out, dtype="f32", name="partial", pending=pending)
        rows = out.tile_rows
        ready, done = NewSignals(x.extent.constant // rows), NewSignals(1)
        arguments = x, w, part, out, ready, done, rows, len(splits)
        reduced_product.lower(low, *arguments, axes=pending.group, completes=pending)


def graph_with(product):
    """Two products, the second one over a sharded dim, and a loss."""
    mlp = tw.DimLabel("mlp")
    graph = tw.ComputeGraph("products", k_splits=4)
    x = graph.input([BATCH, WIDTH], name="x", labels=[tw.BATCH, None])
    up = graph.parameter([INNER, WIDTH], "f32", name="up", labels=[mlp, None])
    down = graph.parameter([WIDTH, INNER], "f32", name="down", labels=[None, mlp])
    for _ in range(2):
        hidden = graph.silu(graph.matmul(x, up, trans_b=True))
        x = product(graph, hidden, down)
    graph.output(x, "y")
    graph.loss(graph.mean(x))
    graph.optimize(tw.optim.SGD())
    return graph


def planned(graph, hidden, w):
    return graph.matmul(hidden, w, trans_b=True)


def programmed(graph, hidden, w):
    (y,) = graph.op("program_product", [hidden, w])
    return y


def train(product, mesh, **options):
    """Results and weights after two steps."""
    graph = graph_with(product)
    plan = graph.plan(mesh, workers_per_device=1, batch_splits=4, rows_per_tile=4, **options)
    x = np.random.default_rng(0).standard_normal((BATCH, WIDTH), np.float32)
    with graph.instantiate(plan) as model:
        model.initialize(seed=1, scale=0.3)
        model.reset_transfers()
        losses = [model.step({"x": x}, lr=0.1).loss for _ in range(2)]
        moved = sum(map(sum, model.transfers().values()))
        assert moved == 2 * sum(map(sum, plan.traffic().values())), "planned and counted transfers differ"
        return losses, [model.get_tensor(name) for name in ("y", "up", "down")]


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_a_program_in_a_graph_has_the_bits_of_the_planned_operator(mesh):
    """Training with the program equals training with the planner's operator, and one device."""
    results = [train(programmed, mesh), train(planned, mesh), train(programmed, {"tp": 1})]
    for losses, tensors in results[1:]:
        assert losses == results[0][0]
        for a, b in zip(tensors, results[0][1], strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_program_that_adds_in_another_order_is_noticed():
    """The comparison above can fail."""
    right = train(programmed, {"tp": 4})[1]
    FAULT.append(1)
    try:
        wrong = train(programmed, {"tp": 4})[1]
    finally:
        FAULT.clear()
    assert any((a != b).any() for a, b in zip(right, wrong, strict=True))


def test_changed_records_of_programs_are_found():
    """The plan's record of a program: devices, pending reduction and tensors."""
    plan = graph_with(programmed).plan({"tp": 2}, workers_per_device=1)
    number, record = next(
        (n, c)
        for n, template in enumerate(plan.class_of(0).templates)
        for c in template.collectives
        if c.kind == "tile_program"
    )
    slots = plan.class_of(0).templates[number].slots
    check_collective(record, plan.layouts[number], slots, ())
    for change in ({"axes": ()}, {"partial": "other"}, {"number": 1}, {"uses": ()}):
        with pytest.raises(InternalError, match="tile_program"):
            check_collective(record._replace(**change), plan.layouts[number], slots, ())


def test_a_plan_with_a_program_is_saved_and_loaded(tmp_path):
    """A plan's file names the op; loading traces the program again, and gives the same plan."""
    plan = graph_with(programmed).plan({"tp": 2}, workers_per_device=1)
    plan.save(tmp_path / "plan")
    assert tw.Plan.load(tmp_path / "plan").digest() == plan.digest()
