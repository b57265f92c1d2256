"""Operators of tensors, hints in specs, and layers as classes: each is the call that it stands for."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import tilewise
from tilewise import nn
from tilewise.core.dims import BATCH
from tilewise.core.errors import LayoutError, ShapeError
from tilewise.graph import GraphBuilder
from tilewise.ir.digest import digest_graph
from tilewise.ir.graph import TensorSpec


def digest_of(make):
    graph = GraphBuilder("g")
    x = graph.input([4, 6, 8], name="x", labels=[BATCH, None, None])
    graph.output(make(graph, x), "y")
    return digest_graph(graph.freeze())


@pytest.mark.parametrize(
    ("operator", "call"),
    [
        (lambda g, x: x + x, lambda g, x: g.add(x, x)),
        (lambda g, x: 2 - x, lambda g, x: g.sub(2, x)),
        (lambda g, x: x - 2, lambda g, x: g.sub(x, 2)),
        (lambda g, x: 3 * x, lambda g, x: g.scale(x, 3.0)),
        (lambda g, x: -x, lambda g, x: g.scale(x, -1.0)),
        (lambda g, x: x / x, lambda g, x: g.div(x, x)),
        (lambda g, x: 1 / x, lambda g, x: g.scale(g.pow(x, -1), 1.0)),
        (lambda g, x: x**2, lambda g, x: g.pow(x, 2)),
        (lambda g, x: x @ g.transpose(x), lambda g, x: g.matmul(x, g.transpose(x))),
        (lambda g, x: x > 0.5, lambda g, x: g.greater(x, 0.5)),
        (lambda g, x: x[:, -9:9, 2:100], lambda g, x: g.slice(x, 2, 2)),
        (lambda g, x: x[:, 1:-1], lambda g, x: g.slice(x, 1, 1, 5)),
        (lambda g, x: x[..., 3], lambda g, x: g.reshape(g.slice(x, 2, 3, 4), (4, 6))),
        (lambda g, x: x[:, None, -1], lambda g, x: g.reshape(g.slice(x, 1, 5), (4, 1, 8))),
    ],
)
def test_operators_are_calls(operator, call):
    """Both make the same graph."""
    assert digest_of(operator) == digest_of(call) != digest_of(lambda g, x: g.relu(x))


def test_invalid_operands_and_indices():
    """Each has its rule; tensors are not iterated, and NumPy leaves operators to them."""
    graph = GraphBuilder("g")
    x = graph.input([4, 6], name="x")
    copied = pickle.loads(pickle.dumps(graph.freeze())).tensors[0]
    for wrong, words in (
        (lambda: x[::2], "step of 1"),
        (lambda: x[9], "an index must lie in"),
        (lambda: x[1, 2], "leave a dim"),
        (lambda: x[0, 0, 0], "may name 2 dims"),
        (lambda: x + "a", "an operand that is not a tensor must be a finite number"),
        (lambda: np.ones(6) * x, "declare it with graph.constant"),
        (lambda: x / 0, "divisor must not be 0"),
        (lambda: copied + copied, "being defined"),
        (lambda: graph.where(x > 0, 1.0, 2.0), "an operand must be a tensor"),
        (lambda: graph.matmul(x, np.ones(6)), "declare arrays by graph.constant"),
        (lambda: graph.loss((x, x)), "of several results, pass one"),
        (lambda: graph.pad(x, (1, 2)), "pass {dim"),
        (lambda: graph.sum(x, keepdim=True), "without other dims"),
        (lambda: graph.input(TensorSpec.activation((4,), "f32"), name="z", tile_hint=2), "set it there"),
    ):
        with pytest.raises(ShapeError, match=words):
            wrong()
    with pytest.raises(TypeError):
        iter(x)
    thawed = GraphBuilder.thaw(graph.freeze())
    assert (thawed.find("x") * 2.0).shape == (4, 6)


def test_the_batch_stays_first():
    """Sums over the batch follow its labelled dim, so no op may move it."""
    graph = GraphBuilder("g")
    x = graph.input([4, 6, 8], name="x", labels=[BATCH, None, None])
    y = graph.input([3, 4, 6, 8], name="y")
    for wrong in (
        lambda: graph.transpose(x, 0, 1),
        lambda: graph.reshape(x, (24, 8)),
        lambda: graph.reshape(x, (1, 4, 48)),
        lambda: x + y,
    ):
        with pytest.raises(ShapeError, match="dim 0, which counts the batch, must stay"):
            wrong()
    assert graph.reshape(x, (4, -1)).shape == (4, 48)


def test_a_layer_with_dropout_is_saved(tmp_path):
    """The key of its mask is an argument of the layer, which no one passes."""

    @tilewise.layer
    def dropped(graph, x):
        return graph.dropout(nn.linear(graph, x, "w", 8), 0.5)

    graph = tilewise.ComputeGraph("g")
    graph.output(dropped(graph, graph.input([4, 8], name="x", labels=[BATCH, None]), path="a"), "y")
    graph.save(tmp_path / "graph.json")
    assert tilewise.ComputeGraph.load(tmp_path / "graph.json").digest() == graph.digest()


def test_hints_of_specs():
    """A declaration takes shape, tiles and layout from a spec; copies of the spec have no layout of their own."""
    graph = GraphBuilder("g")
    spec = TensorSpec.parameter((64, 8), "f32", "w", tile_hint=32, dist_hint=("tp",))
    w = graph.parameter(spec, name="weight")
    x = graph.input(TensorSpec.activation((4, 8), "bf16", tile_hint=2), name="x", layout=("dp",))
    assert graph.draft.hints == {w.id: (("tp",), ()), x.id: (("dp",), ())}
    assert (w.spec.tile_hint, x.spec.tile_hint, x.spec.dtype.name) == (32, 2, "bf16")
    assert spec.renamed("other").dist_hint == (("tp",), ())
    with pytest.raises(ShapeError, match="panels of 32 rows"):
        graph.parameter([64, 8], name="v", tile_hint=30)
    with pytest.raises(LayoutError, match="at most one entry per dim"):
        TensorSpec.activation((4,), "f32", dist_hint=("dp", "tp"))


def test_layers_as_classes():
    """Each class adds what its function adds."""
    label = {"out_label": None, "in_label": None}
    for module, function in (
        (nn.Linear("a", 5), lambda g, x: nn.linear(g, x, "a.weight", 5, bias=True, **label)),
        (nn.LayerNorm("a"), lambda g, x: nn.layer_norm(g, x, "a", eps=1e-5)),
        (nn.RMSNorm("a"), lambda g, x: nn.rms_norm(g, x, "a.weight", eps=1e-6)),
        (nn.Dropout(0.5), lambda g, x: g.dropout(x, 0.5)),
        (nn.MultiHeadAttention("a", 2), lambda g, x: nn.multi_head_attention(g, x, "a", 2)),
        (nn.Conv1d("a", 3, 2), lambda g, x: nn.conv1d(g, x, "a", 3, 2)),
        (nn.Sequential(nn.Linear("a", 5), nn.tanh), lambda g, x: g.tanh(nn.Linear("a", 5)(x))),
    ):
        assert digest_of(lambda g, x, layer=module: layer(x)) == digest_of(function)
    image = GraphBuilder("g").input([2, 3, 4, 4], name="x")
    assert nn.Conv2d("a", 5, (2, 1), padding=1)(image).shape == (2, 5, 5, 6)
    ids = GraphBuilder("g").input([2, 3], "i32", name="ids", storage="scalars")
    assert nn.Embedding("a", 9, 4)(ids).shape == (2, 3, 4)
    with pytest.raises(ShapeError, match="being defined"):
        nn.gelu(pickle.loads(pickle.dumps(image)))
