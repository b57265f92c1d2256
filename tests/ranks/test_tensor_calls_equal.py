"""Calls on tensors of any shape over meshes: equal to one device to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from small_llama import change_first, halve_batch_splits

import tilewise as tw
from support.tensor_calls import BATCH, CALLS, HEAD, SEQ, WHOLE_BATCH, WIDTH, build
from tilewise.core.errors import PlanError
from tilewise.session import verify_strategy


def data():
    generator = np.random.default_rng(5)
    return {n: generator.standard_normal((BATCH, SEQ, WIDTH)).astype(np.float32) for n in "xt"}


def verify(names, mesh, **options):
    graph = build(names, tw.DimLabel("heads", HEAD))
    graph.optimize(tw.optim.AdamW())
    return verify_strategy(graph, mesh, [data()], **options)


@pytest.mark.parametrize(
    "mesh,options",
    [
        ({"dp": 2}, {"accumulation": 2}),
        ({"tp": 2}, {}),
        ({"fsdp": 2}, {}),
        ({"dp": 2, "tp": 2}, {"recompute": "full"}),
    ],
)
def test_calls_equal_one_device(mesh, options):
    """All calls in one graph, over devices and microbatches."""
    report = verify(list(CALLS), mesh, **options)
    assert report.equal, report.text


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 4}, {"fsdp": 2}, {"tp": 2}])
def test_calls_on_the_whole_batch_equal_one_device(mesh):
    """Losses inside of a model, and products of each element of the batch with all others."""
    report = verify(list(WHOLE_BATCH), mesh)
    assert report.equal, report.text


def test_the_whole_batch_needs_one_microbatch():
    """The error says what to change."""
    with pytest.raises(PlanError, match="accumulation=1"):
        verify(["gather_batch"], {"dp": 2}, accumulation=2)


def test_a_fault_is_detected():
    """The twin: with half as many batch splits on the mesh, bits differ."""
    fault = change_first("", halve_batch_splits, -1, kernel="row_sum_split_f32")
    assert not verify(["a vector", "sum"], {"dp": 2}, change=fault).equal


def test_dropout_equals_one_device():
    """Masks are those of one device on every mesh, for microbatches and recomputed layers; another seed has others."""

    @tw.layer
    def dropped(graph, x):
        h = graph.matmul(x, graph.parameter([WIDTH, WIDTH], name="w", labels=[None, tw.DimLabel("mlp")]))
        return x + graph.dropout(graph.gelu(h), 0.4)

    graph = tw.ComputeGraph("dropout")
    x, t = (graph.input([BATCH, SEQ, WIDTH], name=n, labels=[tw.BATCH, None, None]) for n in "xt")
    for path in ("a", "b"):
        x = dropped(graph, x, path=path)
    graph.loss(graph.mse_loss(x, t))
    graph.optimize(tw.optim.AdamW())
    for mesh, options in (
        ({"dp": 2}, {"accumulation": 2}),
        ({"tp": 2}, {"recompute": "full"}),
        ({"fsdp": 2}, {}),
    ):
        report = verify_strategy(graph, mesh, [data()] * 2, **options)
        assert report.equal, report.text


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 4}, {"fsdp": 2}], ids=str)
def test_results_with_a_number_per_sequence(mesh):
    """An output [batch] has the bits of one device."""
    graph = tw.ComputeGraph("numbers")
    x = graph.input([BATCH, 4], name="x", labels=[tw.BATCH, None])
    y = x @ graph.parameter([4, 4], name="w")
    graph.output(graph.sum(y, 1), "sum")
    graph.output(y[:, 0], "first")
    values = []
    for plan in (graph.plan(), graph.plan(mesh)):
        with graph.instantiate(plan) as model:
            model.initialize(seed=1)
            model.forward(x=data()["x"][:, 0, :4])
            values.append(np.array([model.get_tensor("sum"), model.get_tensor("first")]))
    assert values[0].shape == (2, BATCH) and (values[0] == values[1]).all()
