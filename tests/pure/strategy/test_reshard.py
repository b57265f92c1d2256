"""Disagreements about layouts become reshards, placed by priorities; strict plans reject them."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewise.core.dims import BATCH, DimLabel
from tilewise.core.errors import LayoutError
from tilewise.graph import GraphBuilder, differentiate, layer
from tilewise.ir.batch import cut_batch
from tilewise.ir.contractions import factors_of
from tilewise.ir.reshards import explain_reshards
from tilewise.ir.validate import validate_graph, validate_pending_reductions
from tilewise.nn import linear, rms_norm
from tilewise.strategy import DistributionStrategy, ParallelismMode, insert_reshards, propagate_layouts

A, B = DimLabel("x"), DimLabel("y", 4)
RULES = {BATCH.name: "a", A.name: "b"}


def spread(graph, axes=None, rules=None, *, layouts=None, strict=False, microbatches=1):
    """A graph with its reshards inserted, and its layout; both keep their rules."""
    rules = RULES if rules is None else rules
    strategy = DistributionStrategy(ParallelismMode.HYBRID, axes or {"a": 2, "b": 2}, rules, layouts or {})
    layout = propagate_layouts(graph, strategy.mesh(), strategy, cut_batch(graph, microbatches))
    graph, layout = insert_reshards(graph, layout, strict=strict)
    validate_graph(graph)
    validate_pending_reductions(graph, layout)
    require_agreement(graph, layout)
    return graph, layout


def require_agreement(graph, layout):
    """After reshards, all tensors of an op have one layout per factor; the layouts of a reshard give its kind."""
    assert not layout.reshards and len(layout.compute) == len(graph.tensors)
    for op in graph.ops:
        if op.op == "call":
            inner = graph.templates[op.attrs["template"]].graph
            require_agreement(inner, layout.calls[op.id])
            continue
        factors, seen = factors_of(graph, op), {}
        operands = [*zip(op.inputs, factors.inputs)]
        arrived = {
            o for r in layout.pending_reductions.values() for x in r for o in x.outputs if x.op == op.id
        }
        operands += [(o, d) for i, (o, d) in enumerate(zip(op.outputs, factors.outputs)) if i not in arrived]
        for tensor, dims in operands:
            for name, axes in zip(dims or (), layout.compute[tensor] if tensor is not None else ()):
                assert name in factors.moved or seen.setdefault(name, axes) == axes, (op, name)
        if op.op in ("all_gather", "slice"):
            (x,), (y,) = op.inputs, op.outputs
            if op.op == "slice":
                x, y = y, x
            pairs = [*zip(layout.compute[x], layout.compute[y])]
            assert all(a[: len(b)] == b for a, b in pairs) and any(a != b for a, b in pairs)


def ops_of(graph):
    """Names of the reshards and of the ops that read them."""
    made = [op for op in graph.ops if op.op in ("all_gather", "slice")]
    return [(op.op, next(o.op for o in graph.ops if op.outputs[0] in o.inputs)) for op in made]


def test_agreeing_layouts_are_unchanged():
    """Column and row weights with one label: nothing is inserted, strict or not."""
    g = GraphBuilder()
    x = g.input([4, 8], name="x", labels=[BATCH, None])
    h = linear(g, x, "up", 16, out_label=A)
    g.output(linear(g, h, "down", 8, in_label=A), "y")
    graph = g.freeze()
    assert spread(graph, strict=True)[0] is graph


@pytest.mark.parametrize(
    ("in_label", "weight_label", "made", "is_shared"),
    [
        (A, None, ["slice"], True),  # the weight says where the sum is cut; rows follow
        (A, B, ["slice"], True),
        (None, A, ["all_gather"], False),  # one k split: rows come together
        (A, A, [], True),
    ],
)
def test_sum_is_shared_only_where_its_weight_is_cut(in_label, weight_label, made, is_shared):
    """A product's k splits are those of its weight's label; without one, the shared operand is gathered."""
    g = GraphBuilder()
    x = g.input([4, 16], name="x", labels=[None, weight_label])
    g.output(linear(g, x, "w", 8, in_label=in_label), "y")
    graph, layout = spread(g.freeze())
    assert [name for name, _ in ops_of(graph)] == made and bool(layout.pending_reductions) == is_shared


def test_terms_are_cut_each_by_its_own_weight():
    """Two terms of one sum with dims of other sizes: each operand is sliced as its own weight is cut."""
    g = GraphBuilder()
    x, z = g.input([4, 16], name="x"), g.input([4, 48], name="z")
    w = [g.parameter([8, 16], name="w", labels=[None, A]), g.parameter([8, 48], name="v", labels=[None, B])]
    g.output(g.op("linear", [x, w[0], z, w[1], None, None], transpose=True)[0], "y")
    graph, _ = spread(g.freeze(), rules={A.name: "b", B.name: "b"})
    cut = [graph.spec(op.outputs[0]).labels for op in graph.ops if op.op == "slice"]
    assert cut == [(None, A), (None, B)]


def test_whole_operands_are_gathered():
    """A norm's dim is gathered before it."""
    g = GraphBuilder()
    x = g.input([4, 16], name="x", labels=[None, A])
    g.output(rms_norm(g, x, "gamma", eps=1e-5), "y")
    graph, layout = spread(g.freeze())
    assert ops_of(graph) == [("all_gather", "rms_norm")] and layout.compute[graph.outputs["y"]] == ((), ())


def test_unconstrained_operand_is_sliced():
    """Elementwise, the shared operand takes precedence over an unconstrained one; slices take the other's label."""
    g = GraphBuilder()
    x, z = g.input([4, 16], name="x", labels=[None, A]), g.input([4, 16], name="z")
    g.output(g.add(x, z), "y")
    graph, layout = spread(g.freeze())
    assert ops_of(graph) == [("slice", "add")]
    (cut,) = (op.outputs[0] for op in graph.ops if op.op == "slice")
    assert graph.spec(cut).labels == (None, A) and layout.compute[cut] == ((), ("b",))


def test_hints_take_precedence_over_rules():
    """A hint on a tensor, or by name, overrides the label's rule; replicated is a hint too."""
    for layouts, hint, expected in (
        ({}, None, ("b",)),
        ({}, (None, "a"), ("a",)),
        ({}, (None, None), ()),
        ({"x": (None, "a")}, None, ("a",)),
        ({"*": (), "x": (None, "a")}, None, ()),
        ({"x": (None, "a")}, (None, None), ()),
    ):
        g = GraphBuilder()
        x = g.input([4, 16], name="x", labels=[None, A], layout=hint)
        g.output(g.silu(x), "y")
        graph, layout = spread(g.freeze(), layouts=layouts)
        assert layout.compute[x.id][1] == expected == layout.compute[graph.outputs["y"]][1] and not ops_of(
            graph
        )


def test_layout_by_name_without_a_match_is_rejected():
    """A typo in a pattern must not silently drop a layout."""
    g = GraphBuilder("g")
    g.output(g.silu(g.input([4, 16], name="x", labels=[None, A])), "y")
    for layouts in ({"x.weight": (None, "a")}, {"*": (), "z": ()}):
        with pytest.raises(LayoutError, match=r"'(x\.weight|z)', which matches none in 'g'"):
            spread(g.freeze(), layouts=layouts)


def test_hint_on_a_result_applies_before_elementwise_ops():
    """A hint after elementwise ops is a slice before them; after a product, the sum arrives in shards."""
    g = GraphBuilder()
    x = g.input([4, 16], name="x")
    g.output(g.constrain(g.silu(g.silu(x)), (None, "a")), "y")
    graph, layout = spread(g.freeze())
    assert ops_of(graph) == [("slice", "silu")]
    assert [layout.compute[op.outputs[0]] for op in graph.ops] == [((), ("a",))] * 3
    g = GraphBuilder()
    x = g.input([8, 16], name="x", labels=[None, A])
    y = linear(g, x, "down", 8, in_label=A)
    g.output(g.constrain(g.silu(y), (None, "b")), "z")
    graph, layout = spread(g.freeze(), strict=True)
    ((pending,),) = layout.pending_reductions.values()
    assert not ops_of(graph) and pending.group == ("b",) and pending.arrives == (((), ("b",)),)


def test_hint_that_an_op_cannot_meet_is_a_reshard_after_it():
    """All readers and the output take the hinted layout; strict plans allow it, since it is explicit."""
    g = GraphBuilder()
    x = g.input([4, 16], name="x", labels=[None, A])
    y = g.constrain(g.silu(x), (None, ("b", "a")))
    z = g.constrain(linear(g, g.input([4, 16], name="w"), "v", 16, out_label=A), (None, None))
    g.output(y, "y"), g.output(z, "z")
    graph, layout = spread(g.freeze(), strict=True)
    assert layout.compute[graph.outputs["y"]] == ((), ("b", "a")) and layout.compute[graph.outputs["z"]] == (
        (),
        (),
    )
    assert sorted(op.op for op in graph.ops if op.op in ("slice", "all_gather")) == ["all_gather", "slice"]


def test_strict_rejects_implicit_reshards():
    """The error names op, operand, both layouts and their origins; a hint makes it explicit."""

    def build(hint):
        g = GraphBuilder()
        x = g.input([4, 16], name="x", labels=[None, A])
        h = rms_norm(g, x, "gamma", eps=1e-5)
        g.output(g.constrain(h, hint) if hint else h, "y")
        return g.freeze()

    words = (
        r"operand 0 of 'rms_norm:gamma' \(rms_norm\), x f32\[4, 16\], as \(-, b\) from the rule for 'x' of x and as "
        r"\(-, -\) from rms_norm, which needs the dim whole; label both dims alike"
    )
    with pytest.raises(LayoutError, match=words):
        spread(build(None), strict=True)


def test_batch_is_not_resharded():
    """A tensor that counts the batch is not resharded along it: its parts are cut in time as well."""
    g = GraphBuilder()
    x = g.input([4, 16], name="x", labels=[BATCH, None])
    z = g.input([4, 16], name="z", labels=[BATCH, None], layout=(None, None))
    g.output(g.add(x, z), "y")
    with pytest.raises(
        LayoutError, match=r"dims that count the batch must be shared alike; got operand 0 of 'add'"
    ):
        spread(g.freeze(), microbatches=2)


def test_op_over_the_whole_batch_names_what_can_be_sharded():
    """A contrastive loss compares all rows with all: the error's advice works."""
    width = DimLabel("width")
    g = GraphBuilder()
    sides = [g.input([4, 16], name=name, labels=[BATCH, None]) for name in ("x", "y")]
    vectors = [linear(g, side, f"w{i}", 16, out_label=width) for i, side in enumerate(sides)]
    g.output(g.matmul(*vectors, trans_b=True), "similarity")
    with pytest.raises(LayoutError, match="combines rows of the whole batch") as error:
        spread(g.freeze(), rules={BATCH.name: "b"})
    assert "leave b out of the mesh" in str(error.value) and "hint" not in str(error.value)
    assert spread(g.freeze(), rules={width.name: "b"})


@layer
def gated(graph, x, *, width):
    """A layer that needs its operand whole."""
    return linear(graph, rms_norm(graph, x, "gamma", eps=1e-5), "w", width, out_label=A)


def test_layers_have_a_copy_per_layout():
    """The first layer's operand is whole, the others' are shared: these have reshards inside and another name."""
    g = GraphBuilder()
    x = g.input([4, 16], name="x")
    for i in range(3):
        x = gated(g, x, path=f"layers.{i}", width=16)
    g.output(x, "y")
    graph, layout = spread(g.freeze())
    names = [op.attrs["template"].rpartition("+")[2] for op in graph.ops]
    assert names[1:] == ["reshards1"] * 2 and "reshards" not in names[0]
    assert layout.calls[1] is layout.calls[2] is not layout.calls[0]
    assert graph.templates[graph.ops[1].attrs["template"]].graph.ops[0].op == "all_gather"


def test_hints_of_a_weight_apply_to_its_states():
    """A hint on a weight applies to its optimizer's states and its gradient, whatever their labels are."""
    from tilewise.optim import AdamW

    g = GraphBuilder()
    x = g.input([4, 16], name="x", labels=[BATCH, None])
    y = g.input([4], "i32", name="t", labels=[BATCH], storage="scalars")
    logits = g.constrain(linear(g, x, "w", 32, out_label=A), ("a",))
    g.loss(g.mean_cross_entropy(logits, y)[0])
    graph, gradients, _ = differentiate(g.freeze(), g.draft.loss_id)
    thawed = GraphBuilder.thaw(graph)
    AdamW().add_to(thawed, gradients)
    graph, layout = spread(thawed.freeze(), layouts={"w": (None, None)})
    layouts = {t.spec.name: layout.compute[t.id] for t in graph.tensors if t.spec.name.endswith("w")}
    assert len(layouts) >= 3 and set(layouts.values()) == {((), ())}


def test_reshards_are_explained_with_their_cost():
    """The most expensive first; equal layers are one line."""
    g = GraphBuilder()
    x = g.input([4, 16], name="x")
    for i in range(3):
        x = gated(g, x, path=f"layers.{i}", width=16)
    g.output(g.add(g.constrain(x, (None, None)), g.input([4, 16], name="z", layout=("a",))), "y")
    graph, layout = spread(g.freeze())
    lines = explain_reshards(graph, layout, 1)
    assert lines[0] == "all_gather:operand0 f32[4, 16] from (-, b) to (-, -): reads 32 elements, 2 times"
    assert len(lines) == 3 and all(line.endswith("reads 32 elements") for line in lines[1:])
    g = GraphBuilder()
    x = g.input([4, 16], name="x")
    g.output(g.constrain(g.silu(x), (None, "a")), "y")
    assert explain_reshards(*spread(g.freeze()), 1) == [
        "slice:x f32[4, 16] from (-, -) to (-, a): moves nothing"
    ]


HINTS = st.sampled_from(
    [None, (), ("a",), ("b",), (None, "a"), (None, "b"), ("a", "b"), (("a", "b"),), (None, ("b", "a"))]
)
LABELS = st.sampled_from([None, None, A, B])


@st.composite
def laid_out_graphs(draw):
    """Small graphs of products, norms, elementwise ops and softmax, with random labels and hints anywhere."""
    g = GraphBuilder("random")
    tensors = [
        g.input([8, 16], name=f"x{i}", labels=[draw(LABELS), None if i else draw(LABELS)], layout=draw(HINTS))
        for i in range(2)
    ]
    for i in range(draw(st.integers(1, 6))):
        x, other = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors))
        kind = draw(st.sampled_from(["linear", "add", "norm", "silu", "softmax", "matmul"]))
        if kind == "linear":
            labels = {"in_label": draw(LABELS), "out_label": draw(LABELS)}
            y = linear(g, x, f"w{i}", 16, **labels)
        elif kind == "matmul":
            y = g.matmul(g.matmul(x, other, trans_b=True), other)
        else:
            y = {
                "add": lambda x=x, other=other: g.add(x, other),
                "norm": lambda x=x, i=i: rms_norm(g, x, f"gamma{i}", eps=1e-5),
                "silu": lambda x=x: g.silu(x),
                "softmax": lambda x=x: g.softmax(x),
            }[kind]()
        hint = draw(HINTS)
        tensors.append(y if hint is None else g.constrain(y, hint))
    g.output(tensors[-1], "y")
    return g.freeze()


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(laid_out_graphs(), st.sampled_from([{"a": 2, "b": 2}, {"a": 4, "b": 1}, {"a": 1, "b": 8}]))
def test_any_labels_and_hints_become_consistent(graph, axes):
    """Operands agree, shared sums have a pending reduction, and hints are met."""
    try:
        spread_graph, layout = spread(graph, axes, {A.name: "b", B.name: ("a",)})
    except LayoutError as error:
        # Two labels of one tensor map to one axis, or a hint cuts a dim in other pieces than the other operand's label.
        assert re.search("an axis may shard only one dim|dims that devices share must be cut", str(error))
        return
    for tensor, hint in graph.hints.items():
        expected = tuple(tuple(a for a in dim if axes.get(a, 1) > 1) for dim in hint)
        assert expected in {
            layout.compute[t.id] for t in spread_graph.tensors if t.shape == graph.tensors[tensor].shape
        }
