"""The builder checks each call, keeps equal nodes once, and prints what it built."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import numpy as np
import pytest

from tilewise.core.dims import Dim
from tilewise.core.errors import InternalError, PlanError, ShapeError
from tilewise.graph import GraphBuilder, differentiate, layer, simplify
from tilewise.ir.graph import TensorSpec
from tilewise.ir.mermaid import to_mermaid
from tilewise.ir.op import bind
from tilewise.ir.show import show_graph
from tilewise.ir.validate import validate_graph
from tilewise.nn import linear


def test_wrong_shapes_fail_at_the_call():
    """The message names the op, the rule and both shapes."""
    g = GraphBuilder()
    x, w = g.input([4, 6], name="x"), g.parameter([8, 5], name="w")
    with pytest.raises(
        ShapeError, match=r"\[graph.linear\] inner sizes must agree; got f32\[4, 6\], f32\[8, 5\]"
    ):
        g.matmul(x, w, trans_b=True)
    with pytest.raises(ShapeError, match=r"one shape, or shapes that NumPy would broadcast"):
        g.add(x, g.input([4, 5], name="y"))
    with pytest.raises(ShapeError, match="dtype"):
        g.matmul(x, g.parameter([8, 6], "bf16", name="wb"), trans_b=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda g: g.input([4], name="x"), "names must be unique; got 'x'"),
        (lambda g: g.parameter([2, 3, 4], name="w"), "one or two fixed dims"),
        (lambda g: g.input([0, 4], name="y"), "a size must lie in"),
        (lambda g: g.input([4], "f8", name="y"), "a dtype must be one of .*; got 'f8'"),
        (lambda g: g.constant(np.zeros(3), name="c"), "an array of float32 or int32"),
        (
            lambda g: g.constant(np.ma.masked_less(np.arange(3, dtype=np.float32), 1), name="c"),
            "an array of float32 or int32 without a mask",
        ),
        (lambda g: g.input([4], name=""), "a name must be printable"),
        (lambda g: g.parameter([4], name="__metadata__"), "files of weights reserve; got '__metadata__'"),
        (
            lambda g: g.draft.declare("parameter", g.find("x").spec.renamed("__metadata__")),
            "files of weights reserve; got '__metadata__'",
        ),
        (lambda g: g.loss(g.find("x")), "a loss must be one f32 computed by the graph"),
        (lambda g: g.find("nonsense"), "must have the tensor; got 'nonsense'"),
    ],
)
def test_wrong_declarations_are_rejected(make, words):
    """Duplicate names, ranks, sizes, dtypes and missing names are rejected, each for its own reason."""
    g = GraphBuilder()
    g.input([4], name="x")
    with pytest.raises(ShapeError, match=words):
        make(g)


def test_names_are_unique():
    """Inputs, weights and outputs are read by name; the optimizer's names are reserved."""
    g = GraphBuilder("g")
    x = g.input([4, 8], name="x")
    g.output(x, "x")  # the same tensor
    y = g.output(g.silu(x), "y")
    assert g.draft.outputs == {"x": x.id, "y": y.id}
    for name in ("y", "optimizer.master.x", "optimizer.step", "loss.inv_count"):
        for declare in (g.input, g.parameter, g.state):
            with pytest.raises(ShapeError, match=r"unique|reserved"):
                declare([4, 8], name=name)
    g.input([4, 8], name="z")
    with pytest.raises(ShapeError, match="unique"):
        g.output(y, "z")


def test_second_thread_is_rejected():
    """Two threads would write at the same indices, which planning would report as a defect."""
    g = GraphBuilder("g")
    x = g.input([4, 8], name="x")
    calls = (
        lambda: g.input([4, 8], name="y"),
        lambda: g.parameter([8, 8], name="w"),
        lambda: g.silu(x),
        lambda: linear(g, x, "w", 8),
        lambda: g.output(x, "o"),
        lambda: g.constrain(x, ("dp", None)),
    )
    with ThreadPoolExecutor(1) as other:
        with g.all_or_nothing():
            g.scale(x, 2.0)
            for call in calls:
                with pytest.raises(ShapeError, match="one thread at a time may write to a graph"):
                    other.submit(call).result()
            reader = other.submit(g.freeze)  # sees all of the block or nothing
            g.silu(x)
        assert len(reader.result().ops) == len(g.draft.ops) == 2 and g.draft.names == {"x": x.id}
        assert other.submit(calls[0]).result() is g.find("y")
    for copied in (deepcopy(g), pickle.loads(pickle.dumps(g))):
        assert copied.freeze() == g.freeze() and copied.silu(copied.find("y")).shape == (4, 8)


@pytest.mark.parametrize(("seq", "name"), [(8, "positions"), (Dim("seq", 1, 8), "rows.positions")])
def test_second_tensor_of_positions_is_rejected_with_advice(seq, name):
    """Its name is fixed: the caller takes the first one again, or an input of its own."""
    g = GraphBuilder()
    tokens = g.input([2, seq], "i32", name="tokens", storage="scalars")
    first = g.positions(tokens)
    with pytest.raises(
        ShapeError, match=rf"\[graph.positions\] .* use graph.find\('{name}'\) if it .* your own"
    ):
        g.positions(tokens)
    assert g.find(name) is first
    own = g.input([2, seq], "i32", name="places", storage="scalars")
    table = g.constant(np.zeros((8, 4), np.float32), name="table")
    for places in (first, own):
        g.rope(g.input([2, seq, 8], name=f"x of {places.spec.name}"), places, table, head_dim=4)


def test_weight_named_like_a_gradient_is_rejected_in_planning():
    """`w.grad` is the gradient of `w`."""
    g = GraphBuilder("g")
    x, y = g.input([4, 8], name="x"), g.input([4], "i32", name="y")
    h = linear(g, linear(g, x, "w", 8), "w.grad", 8)
    loss = g.loss(g.mean_cross_entropy(h, y)[0])
    with pytest.raises(ShapeError, match="unique"):
        differentiate(g.freeze(), loss.id)


def test_equal_nodes_are_one():
    """Hash-consing: the same op on the same operands gives the same node; another attribute does not."""
    g = GraphBuilder()
    x = g.input([4, 6], name="x")
    assert g.silu(x) == g.silu(x)
    assert g.scale(x, 2.0) != g.scale(x, 3.0)
    assert len(g.draft.ops) == 3


@pytest.mark.parametrize("name,options", [("silu", {}), ("gelu", {"approximate": "tanh"})])
def test_gates_are_fused(name, options):
    """An activation times another tensor is one op, in either order; gelu by the error function is not fused."""
    for swapped in (False, True):
        g = GraphBuilder()
        x, up = g.input([4, 6], name="x"), g.input([4, 6], name="up")
        sides = [getattr(g, name)(x, **options), up]
        g.output(g.mul(*(reversed(sides) if swapped else sides)), "gated")
        graph = simplify(g.freeze())
        validate_graph(graph)
        fused = "silu_gate" if name == "silu" else "gelu_tanh_gate"
        assert [(op.op, op.inputs) for op in graph.ops] == [(fused, (x.id, up.id))]
    g = GraphBuilder()
    x = g.input([4, 6], name="x")
    g.output(g.mul(g.gelu(x), x), "gated")
    assert [op.op for op in simplify(g.freeze()).ops] == ["gelu", "multiply"]


def test_fusion_and_dead_code():
    """silu * up and linear + residual become one op each; unused ops are removed; results keep their ids."""
    g = GraphBuilder()
    x = g.input([4, 6], name="x")
    w = g.parameter([6, 6], name="w")
    gate = g.mul(g.silu(x), x)
    out = g.add(x, g.matmul(gate, w, trans_b=True))
    g.scale(out, 7.0)
    g.output(out, "out")
    graph = simplify(g.freeze())
    validate_graph(graph)
    assert [op.op for op in graph.ops] == ["silu_gate", "linear"]
    assert bind(graph.ops[1]).residual == x.id and graph.outputs["out"] == out.id


def test_bias_is_fused_before_a_residual():
    """The residual stays an op: it is added to a rounded sum, as in other frameworks."""
    g = GraphBuilder()
    x, w = g.input([4, 6], name="x"), g.parameter([6, 6], name="w")
    biased = g.add_bias(g.matmul(x, w, trans_b=True), g.parameter([6], name="b"))
    g.output(g.add(biased, x), "out")
    graph = simplify(g.freeze())
    validate_graph(graph)
    assert [op.op for op in graph.ops] == ["linear", "add"]
    assert bind(graph.ops[0]).bias == g.find("b").id and bind(graph.ops[0]).residual is None
    with pytest.raises(ShapeError, match="adds a residual or a bias"):
        g.op("linear", [x, w, x, g.find("b")], transpose=True)


def test_no_fusion_with_other_readers():
    """A silu or product with a second reader stays."""
    g = GraphBuilder()
    x = g.input([4, 6], name="x")
    w = g.parameter([6, 6], name="w")
    s = g.silu(x)
    product = g.matmul(x, w, trans_b=True)
    g.output(g.mul(s, x), "a")
    g.output(s, "b")
    g.output(g.add(product, x), "c")
    g.output(product, "d")
    assert [op.op for op in simplify(g.freeze()).ops] == ["silu", "linear", "multiply", "add"]


def test_print_and_picture():
    """The text names every op and tensor; the flow chart has an edge per operand."""
    g = GraphBuilder("g")
    x = g.input([4, 6], name="x")
    g.output(g.add(g.silu(x), x), "y")
    text = show_graph(g.freeze())
    assert "silu(%0)" in text and "output y = %2" in text
    assert to_mermaid(g.freeze()).count("-->") == 4


def test_verify_finds_broken_rules():
    """Operands before producers and wrong specs are named."""
    g = GraphBuilder("g")
    x = g.input([4, 6], name="x")
    g.silu(g.silu(x))
    graph = g.freeze()
    swapped = type(graph)(graph.name, graph.tensors, graph.ops[::-1], {})
    with pytest.raises(InternalError, match="ids are dense"):
        validate_graph(swapped)
    tensors = list(graph.tensors)
    tensors[1] = type(tensors[1])(1, TensorSpec((5, 6), "f32"), "result", 0)
    with pytest.raises(InternalError, match="specs their op infers"):
        validate_graph(type(graph)(graph.name, tuple(tensors), graph.ops, {}))


def test_gradient_needs_a_path():
    """A parameter that does not influence the loss is rejected by name."""
    g = GraphBuilder("g")
    x, labels = g.input([4, 6], name="x"), g.input([4], "i32", name="labels", storage="scalars")
    g.parameter([3, 3], name="unused")
    w = g.parameter([8, 6], name="w")
    loss, _ = g.mean_cross_entropy(g.matmul(x, w, trans_b=True), labels)
    g.loss(loss)
    with pytest.raises(PlanError, match="unused"):
        differentiate(g.freeze(), loss.id)


def test_layer_names_follow_the_path():
    """Parameters of a layer are named by path; another signature is another template."""

    @layer
    def block(graph, x, *, size):
        return graph.matmul(x, graph.parameter([size, size], name="w"), trans_b=True)

    g = GraphBuilder()
    x = g.input([4, 6], name="x")
    y = block(g, block(g, x, path="layers.0", size=6), path="layers.1", size=6)
    assert [t.spec.name for t in g.freeze().of_kind("parameter")] == ["layers.0.w", "layers.1.w"]
    assert len(g.draft.templates) == 1 and [op.op for op in g.draft.ops] == ["call", "call"]
    z = g.input([9, 6], name="z")
    block(g, z, path="other", size=6)
    assert len(g.draft.templates) == 2
    with pytest.raises(ShapeError, match="belong to the graph"):
        block(GraphBuilder(), y, path="elsewhere", size=6)


def test_cache_is_read_as_written():
    """Heads and blocks of another size would be misread; caches consist of whole blocks."""
    g = GraphBuilder("cached")
    x, q = g.input([3, 16], name="x"), g.input([3, 16], name="q")
    ids = [g.input([3], "i32", name=name) for name in ("slots", "positions", "sequence")]
    table, cache = g.input([1, 2], "i32", name="table"), g.state([128, 16], name="cache")
    written = g.kv_write(cache, x, ids[0], head_dim=8)
    for head_dim, block_size in ((16, 64), (8, 128)):
        with pytest.raises(ShapeError, match="with the head_dim and block_size it was written with"):
            g.paged_attention(q, written, written, *ids[1:], table, head_dim=head_dim, block_size=block_size)
    g.paged_attention(q, written, written, *ids[1:], table, head_dim=8)
    with pytest.raises(ShapeError, match="whole blocks of 48 rows"):
        g.kv_write(cache, x, ids[0], head_dim=8, block_size=48)
    with pytest.raises(ShapeError, match="heads of 5"):
        g.kv_write(cache, x, ids[0], head_dim=5)


def test_layouts_of_fused_results_are_kept():
    """A fused op inherits the hint of the result it replaces, unless it has its own."""

    def build(*hinted):
        g = GraphBuilder()
        x, r = (g.input([4, 8], name=name) for name in "xr")
        made = {"product": linear(g, x, "w", 8)}
        made["sum"] = g.add(made["product"], r)
        made["gate"] = g.silu(made["sum"])
        made["gated"] = g.mul(made["gate"], r)
        g.output(g.scale(made["gated"], 2.0), "y")
        for name, axis in hinted:
            g.constrain(made[name], (axis,))
        graph = simplify(g.freeze())
        assert [op.op for op in graph.ops] == ["linear", "silu_gate", "scale"]
        return {name: graph.hints[t.id][0] for name, t in made.items() if t.id in graph.hints}

    assert build(("product", "a"), ("gate", "b")) == {"sum": ("a",), "gated": ("b",)}
    assert build(("product", "a"), ("sum", "b"), ("gated", "c")) == {"sum": ("b",), "gated": ("c",)}
