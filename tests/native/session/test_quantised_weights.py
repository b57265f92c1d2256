"""Quantised weights in a graph of one's own: declaration, planning, loading, and what is not possible with them."""

from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from support.blocks import random_blocks
from tilewise.checkpoint import QuantisedTensor
from tilewise.checkpoint.open_file import OpenFile
from tilewise.core.errors import CheckpointError, PlanError, ShapeError, TilewiseError
from tilewise.formats import FORMATS
from tilewise.graph import layer

N, K = 96, 512


@layer
def product(graph, x):
    """A weight in a layer."""
    return graph.matmul(x, graph.parameter([K, K], "bf16", name="w", labels=[None, None]), trans_b=True)


def build(formats, labels=(None, None), how="exact"):
    """Two layers, and a product with a head."""
    graph = tw.ComputeGraph("own", formats=formats, quantized_matmul=how)
    x = graph.input([8, K], "bf16", name="x", labels=[None, labels[1]])
    for number in range(2):
        x = product(graph, x, path=f"layers.{number}")
    head = graph.parameter([N, K], "bf16", name="head", labels=labels)
    graph.output(graph.matmul(x, head, trans_b=True), "y")
    return graph


@pytest.fixture
def file():
    """A file, which the blocks below stand for."""
    with Path(__file__).open("rb") as stream:
        yield OpenFile(Path(__file__), stream)


def stored(file, name, rows, form):
    """Random blocks as a tensor of a file."""
    blocks = random_blocks(FORMATS[form], rows, K, len(name))
    return QuantisedTensor(file, name, FORMATS[form], (rows, K), lambda first, n: blocks[first : first + n])


def test_layers_with_weights_in_different_formats(file):
    """A template per set of formats; results and weights are those of bf16."""
    formats = {"layers.0.w": "q8_0", "layers.1.w": "q4_k", "head": "q6_k"}
    weights = {name: stored(file, name, N if name == "head" else K, form) for name, form in formats.items()}
    x = np.random.default_rng(0).standard_normal((8, K)).astype(np.float32)
    results = []
    for chosen in (formats, {}):
        graph = build(chosen)
        assert len({op.attrs["template"] for op in graph.freeze().ops if op.op == "call"}) == (
            2 if chosen else 1
        )
        with graph.instantiate() as model:
            model.load_parameters(weights)
            model.forward(x=x)
            results.append(np.array(model.get_tensor("y")).view(np.uint16))
            for name, weight in weights.items():
                np.testing.assert_array_equal(model.get_tensor(name), weight.read())
    np.testing.assert_array_equal(*results)
    assert results[0].std() > 0


def test_grouped_products_in_a_graph():
    """Those of weights of 4 bits, in layers too; they have no gradient."""
    formats = {"layers.0.w": "q8_0", "layers.1.w": "q4_k", "head": "q4_0"}
    graph = build(formats, how="grouped").freeze()
    ops = [op for part in (graph, *(t.graph for t in graph.templates.values())) for op in part.ops]
    assert sorted(op.op for op in ops if op.op != "call") == ["linear", "linear_grouped", "linear_grouped"]
    images = tw.ComputeGraph("images", formats={"w": "q4_0"}, quantized_matmul="grouped")
    filters = images.parameter([8, 32], "bf16", name="w")
    images.conv2d(images.input([1, 32, 4, 4], "bf16", name="x"), filters, kernel_size=1)
    assert "linear_grouped" in [op.op for op in images.draft.ops]
    with pytest.raises(ShapeError, match="quantized_matmul must be one of exact, grouped"):
        build(formats, how="fast")
    graph = tw.ComputeGraph("own", formats={"w": "q4_0"}, quantized_matmul="grouped")
    x = graph.matmul(
        graph.input([8, K], "bf16", name="x"), graph.parameter([K, K], "bf16", name="first"), trans_b=True
    )
    weight = graph.parameter([N, K], "bf16", name="w", trainable=False)
    graph.loss(graph.mean(graph.cast(graph.matmul(x, weight, trans_b=True), "f32")))
    graph.optimize(tw.optim.AdamW())
    with pytest.raises(ShapeError, match="a grouped product has no gradient"):
        graph.plan()
    with pytest.raises(ShapeError, match="weights must have codes of 4 bits"):
        graph.op("linear_grouped", [x, graph.find("first"), None, None], transpose=True)


def test_arrays_do_not_become_quantised(file):
    """A planned format accepts blocks of this format only."""
    with build({"head": "q4_0"}).instantiate() as model:
        with pytest.raises(TilewiseError, match="must be loaded from blocks"):
            model.set_tensor("head", np.zeros((N, K), np.float32))
        wrong = {name: np.zeros((K, K), np.float32) for name in ("layers.0.w", "layers.1.w")}
        with pytest.raises(CheckpointError, match="planned in the format q4_0"):
            model.load_parameters({**wrong, "head": stored(file, "head", N, "q8_0")})


@pytest.mark.parametrize("shape,dtype", [([N, 48], "bf16"), ([N, K], "f32"), ([K], "bf16")])
def test_parameters_that_no_format_fits(shape, dtype):
    """Other dtypes, vectors, and rows that are not whole blocks."""
    with pytest.raises(ShapeError, match=r"must be bf16 \[n, k\] with k in blocks of 32"):
        tw.ComputeGraph("own", formats={"w": "q4_0"}).parameter(shape, dtype, name="w")
    with pytest.raises(TilewiseError, match="a format of weights must be one of"):
        tw.ComputeGraph("own", formats={"w": "q9"}).parameter([N, K], "bf16", name="w")


def test_quantised_weights_are_only_multiplied_or_looked_up():
    """Not combined with others, not shared within a block, not trained."""
    graph = tw.ComputeGraph("own", formats={"w": "q4_k"})
    weight = graph.parameter([N, K], "bf16", name="w")
    with pytest.raises(ShapeError, match="can only be multiplied or looked up"):
        graph.mul(weight, weight)
    shared = build({"head": "q4_k"}, labels=(None, tw.DimLabel("mlp", atom=2)))
    shared.set_distribution(tw.DistributionStrategy.tensor_parallel(4))
    with pytest.raises(PlanError, match=r"whole blocks of a quantised weight; got 128 of 512"):
        shared.plan()
    loss = graph.mean(graph.matmul(graph.input([8, K], "bf16", name="x"), weight, trans_b=True))
    graph.loss(graph.cast(loss, "f32") if loss.spec.dtype.name != "f32" else loss)
    graph.optimize(tw.optim.AdamW())
    with pytest.raises(TilewiseError, match="can only be multiplied or looked up"):
        graph.plan()
