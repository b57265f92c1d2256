"""Windows, capped scores and lengths of sequences over meshes: equal to one device to the bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from padded_batches import VOCAB, change_ints, differing, padded, steps

import tilewise as tw
from tilewise.core.errors import LayoutError, PlanError, ShapeError
from tilewise.ir.program import Mode
from tilewise.nn import linear, rms_norm
from tilewise.session import verify_strategy

WIDTH, HEADS, KV_HEADS, DIM = 32, 8, 2, 8
KINDS = {
    "window": {"window": 70, "causal": True},
    "one position": {"window": 1, "causal": True},
    "softcap": {"softcap": 0.5, "causal": True},
    "both": {"window": 9, "softcap": 2.0, "causal": True},
    "encoder": {"causal": False},
    "capped encoder": {"causal": False, "softcap": 1.0},
}
every_dtype = pytest.mark.parametrize("dtype", ["f32", "bf16"])


@tw.layer
def block(graph, x, lengths, *, kind, dtype, dim):
    heads, kv_heads = tw.DimLabel("heads", dim), tw.DimLabel("kv_heads", dim, HEADS // KV_HEADS)
    h = rms_norm(graph, x, "norm", eps=1e-5)
    q = linear(graph, h, "q", HEADS * dim, out_label=heads)
    k, v = (linear(graph, h, n, KV_HEADS * dim, out_label=kv_heads) for n in ("k", "v"))
    options = {} if KINDS[kind].get("causal", True) else {"lengths": lengths}
    y = graph.scaled_dot_product_attention(q, k, v, head_dim=dim, **KINDS[kind], **options)
    return graph.add(x, linear(graph, y, "o", WIDTH, in_label=heads))


def training_graph(kind, seq, dtype="f32", batch=4, layers=2, dim=DIM):
    g = tw.ComputeGraph("kinds")
    tokens, labels = (
        g.input([batch, seq], "i32", name=n, labels=[tw.BATCH, None], storage="scalars")
        for n in ("tokens", "labels")
    )
    lengths = g.input([batch], "i32", name="lengths", labels=[tw.BATCH], storage="scalars")
    x = g.embedding(tokens, g.parameter([VOCAB, WIDTH], dtype, name="embed"))
    for i in range(layers):
        x = block(g, x, lengths, path=f"layers.{i}", kind=kind, dtype=dtype, dim=dim)
    loss, rows = g.mean_cross_entropy(linear(g, x, "head", VOCAB), labels)
    g.output(rows, "loss_rows")
    g.loss(loss)
    g.optimize(tw.optim.AdamW())
    return g


def batch_of(lengths, width, seed=0, pad=3):
    """Random sequences of those lengths, padded; the labels of padding are not counted."""
    return {**padded(lengths, width, seed, pad), "lengths": np.array(lengths, np.int32)}


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "axes,accumulation", [({"dp": 2, "tp": 2}, 2), ({"tp": 4}, 1), ({"dp": 4}, 1)], ids=str
)
def test_training_equals_one_device(dtype, kind, axes, accumulation):
    """Loss, gradients, parameters and moments; four devices share two KV heads."""
    batches = [batch_of((100, 1, 64, 65, 7, 99, 63, 100), 100, seed) for seed in range(2)]
    graph = training_graph(kind, 100, dtype, batch=8)
    report = verify_strategy(graph, axes, batches, accumulation=accumulation)
    assert report.equal, report.text


@pytest.mark.parametrize(
    "kernel,kind,place,part",
    [
        ("attention_f32", "window", 5, "loss"),
        ("attention_backward", "window", 6, "gradient of"),
        ("attention_backward", "both", 6, "gradient of"),
        ("attention_backward", "encoder", 4, "gradient of"),
    ],
)
def test_other_window_or_mask_is_detected(kernel, kind, place, part):
    """Fault: on the mesh, one direction sees a position more, or is causal."""

    def one_more(ints):
        return [*ints[:place], ints[place] + 1, *ints[place + 1 :]]

    fault = verify_strategy(
        training_graph(kind, 100),
        {"dp": 2},
        [batch_of((100, 1, 64, 65), 100)],
        change=lambda plan: change_ints(plan, kernel, one_more),
    )
    assert not fault.equal and part in fault.text


@pytest.mark.parametrize("kind,batch_splits", [("both", 2), ("capped encoder", 1), ("capped encoder", 2)])
def test_tasks_of_several_sequences(kind, batch_splits):
    """Tiles of one, four and eight sequences: each task uses the lengths of its own, over devices too."""
    batch = batch_of((60, 1, 50, 64, 7, 9, 63, 33), 64)
    rows = []
    for number, axes in ((8, {}), (batch_splits, {}), (batch_splits, {"dp": batch_splits})):
        graph = training_graph(kind, 64, batch=8)
        plan = graph.plan(axes, batch_splits=number)
        assert plan.settings.row_tile == 64 * (8 // number)
        with graph.instantiate(plan) as model:
            model.initialize(0, 0.1)
            model.forward(**batch)
            rows.append(model.get_tensor("loss_rows").tobytes())
    assert len(set(rows)) == 1
    report = verify_strategy(graph, {"dp": batch_splits, "tp": 2}, [batch], batch_splits=batch_splits)
    assert report.equal, report.text


def test_lengths_of_another_device_are_detected():
    """Fault: lengths exchanged between the sequences of two devices."""
    graph = training_graph("encoder", 80)
    good = batch_of((80, 9, 64, 65), 80)
    expected = steps(graph, graph.plan({}), [good])
    swapped = {**good, "lengths": good["lengths"][[2, 3, 0, 1]]}
    assert differing(expected, steps(graph, graph.plan({"dp": 2}), [good])) == []
    assert len(differing(expected, steps(graph, graph.plan({"dp": 2}), [swapped]))) > 5


@pytest.mark.parametrize("kind,dtype", [*zip(KINDS, ["f32", "bf16"] * 3)])
def test_workers_share_heads_where_sequences_are_few(kind, dtype):
    """Two tasks of half of the heads each, over all sequences; a wrong length in one of them is detected."""
    graph, batch = training_graph(kind, 80, dtype, dim=64), batch_of((80, 9, 64, 65), 80)
    expected = steps(graph, graph.plan({}, workers_per_device=1, batch_splits=2), [batch])
    for axes in ({}, {"dp": 2}):
        plan = graph.plan(axes, workers_per_device=3, batch_splits=2)
        by_heads = [
            i
            for t in plan.program.classes[0].templates
            for i in t.instructions
            if i.kernel.startswith("attention") and i.operands[0].mode == Mode.COL
        ]
        assert len(by_heads) == 2 and all(i.extent.constant == 2 * i.step for i in by_heads)
        assert differing(expected, steps(graph, plan, [batch])) == []
    if kind == "encoder":
        shorter = {**batch, "lengths": batch["lengths"] - np.array([0, 0, 0, 1], np.int32)}
        assert differing(expected, steps(graph, plan, [shorter])) != []


@pytest.mark.parametrize("kind,dtype", [("both", "f32"), ("capped encoder", "bf16")])
def test_padding_changes_no_bit(kind, dtype):
    """Three steps of a symbolic length equal those of the exact length, whatever the padding contains."""
    lengths = (74, 3, 64, 65)
    graph = training_graph(kind, tw.Dim("seq", 1, 150), dtype)
    expected = steps(
        graph, graph.plan({}, sizes={"seq": 74}), [batch_of(lengths, 74, seed) for seed in range(3)]
    )
    for width, axes, accumulation in ((75, {}, 1), (128, {"dp": 2}, 1), (140, {"dp": 2, "tp": 2}, 2)):
        plan = graph.plan(axes, accumulation=accumulation)
        padded = [batch_of(lengths, width, seed, pad=seed) for seed in range(3)]
        assert differing(expected, steps(graph, plan, padded)) == [], (width, axes)


def test_lengths_that_count_padding_are_detected():
    """Fault: a length that reaches into the padding."""
    graph = training_graph("encoder", tw.Dim("seq", 1, 90))
    good = batch_of((40, 3, 9, 50), 60)
    expected = steps(graph, graph.plan({}), [good])
    longer = {**good, "lengths": good["lengths"] + np.array([0, 1, 0, 0], np.int32)}
    assert len(differing(expected, steps(graph, graph.plan({}), [longer]))) > 5


@settings(max_examples=8)
@given(
    st.sampled_from(list(KINDS)),
    st.lists(st.integers(1, 140), min_size=4, max_size=4),
    st.integers(0, 70),
    st.sampled_from([{}, {"dp": 2}, {"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 4}]),
    st.sampled_from([1, 2]),
    st.sampled_from(["f32", "bf16"]),
)
def test_any_kind_over_any_mesh(kind, lengths, extra, axes, accumulation, dtype):
    """A padded step over a mesh compared with one device and the exact length."""
    graph, longest = training_graph(kind, tw.Dim("seq", 1, 220), dtype, layers=1), max(lengths)
    try:
        plan = graph.plan(axes, accumulation=accumulation)
    except LayoutError:
        assume(False)
    expected = steps(graph, graph.plan({}, sizes={"seq": longest}), [batch_of(lengths, longest)])
    assert differing(expected, steps(graph, plan, [batch_of(lengths, longest + extra)])) == []


# ---- over pages --------------------------------------------------------------------------------------------


def attended(g, q, k, v, kind, pages=()):
    heads, kv_heads = tw.DimLabel("heads", DIM), tw.DimLabel("kv_heads", DIM, HEADS // KV_HEADS)
    parts = [
        g.input([*shape, width * DIM], name=name, labels=[*[None] * len(shape), label])
        for name, shape, width, label in (
            ("q", q, HEADS, heads),
            ("k", k, KV_HEADS, kv_heads),
            ("v", v, KV_HEADS, kv_heads),
        )
    ]
    if not pages:
        return g.scaled_dot_product_attention(*parts, head_dim=DIM, **KINDS[kind])
    caches = [
        g.kv_write(
            g.state([4 * 64, KV_HEADS * DIM], name=n, labels=[None, kv_heads]),
            x,
            pages["slots"],
            head_dim=DIM,
        )
        for n, x in zip(("k_cache", "v_cache"), parts[1:])
    ]
    of_token = [pages[n] for n in ("positions", "sequence", "blocks")]
    options = {name: value for name, value in KINDS[kind].items() if name != "causal"}
    return g.paged_attention(parts[0], *caches, *of_token, head_dim=DIM, **options)


@pytest.mark.parametrize("kind,tp", [("both", 1), ("window", 2), ("softcap", 4), ("both", 4)])
def test_pages_equal_whole_sequences(kind, tp):
    """A prompt in chunks, then token by token, over devices; a window of another length is detected."""
    gen, length = np.random.default_rng(1), 150
    arrays = {
        n: gen.standard_normal((length, w * DIM), np.float32) for n, w in (("q", 8), ("k", 2), ("v", 2))
    }
    g = tw.ComputeGraph("whole")
    g.output(attended(g, *[[1, length]] * 3, kind), "y")
    with g.instantiate(g.plan({})) as model:
        model.forward(**{n: x[None] for n, x in arrays.items()})
        dense = model.get_tensor("y")[0]
    g, tokens = tw.ComputeGraph("pages"), tw.Dim("tokens", 1, 100)
    pages = {
        n: g.input([tokens], "i32", name=n, storage="scalars") for n in ("positions", "sequence", "slots")
    }
    pages["blocks"] = g.input([1, 3], "i32", name="blocks")
    g.output(attended(g, [tokens], [tokens], [tokens], kind, pages), "y")
    blocks = np.array([[2, 0, 3]], np.int32)
    with g.instantiate(g.plan({"tp": tp})) as model:
        outputs = []
        for begin, end in pairwise([0, 1, 70, 145, *range(146, length + 1)]):
            positions = np.arange(begin, end, dtype=np.int32)
            index = {
                "positions": positions,
                "sequence": np.zeros_like(positions),
                "slots": blocks[0, positions // 64] * 64 + positions % 64,
                "blocks": blocks,
            }
            model.forward(**{n: x[begin:end] for n, x in arrays.items()}, **index)
            outputs.append(model.get_tensor("y"))
    assert np.concatenate(outputs).tobytes() == dense.tobytes()


# ---- what is refused ---------------------------------------------------------------------------------------


def test_lengths_are_checked_before_a_run():
    """Before anything is written: each run has its own length, and the next step is unaffected."""
    graph = training_graph("encoder", tw.Dim("seq", 1, 64))
    good = batch_of((20, 3, 4, 5), 20)
    with graph.instantiate(graph.plan({"dp": 2})) as model:
        model.initialize(0, 0.1)
        first = model.step(good, 1e-3)
        for wrong, words in ((0, r"\[1, 20\]; got 0 at \[2\]"), (21, "got 21"), (-3, "got -3")):
            bad = {**good, "lengths": good["lengths"].copy()}
            bad["lengths"][2] = wrong
            model.initialize(0, 0.1)
            with pytest.raises(ShapeError, match=f"'lengths' must lie in .*{words}"):
                model.step(bad, 1e-3)
            assert model.step(good, 1e-3).loss == first.loss


def attend(lengths=None, *, seq=8, **options):
    g = tw.ComputeGraph("attend")
    x = g.input([4, seq, 8], name="x", labels=[tw.BATCH, None, None])
    if lengths is not None:
        options["lengths"] = lengths(g)
    g.output(g.scaled_dot_product_attention(x, x, x, head_dim=4, **options), "y")
    return g


def of_form(shape, dtype="i32", **options):
    return lambda g: g.input(shape, dtype, name="lengths", **{"storage": "scalars", **options})


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: attend(window=0, causal=True), "window must lie in"),
        (lambda: attend(window=2.5, causal=True), "window must be an integer"),
        (lambda: attend(window=2, causal=False), "a window ends at its token"),
        (lambda: attend(softcap=0.0), "softcap must lie in"),
        (lambda: attend(softcap=-1.0), "softcap must lie in"),
        (lambda: attend(softcap=float("nan")), "softcap must be a finite number"),
        (lambda: attend(of_form([4]), causal=True), "lengths need causal=False"),
        (lambda: attend(of_form([5]), causal=False), "must have one size of 'b'"),
        (lambda: attend(of_form([4, 8]), causal=False), r"lengths must be \[b\]"),
        (lambda: attend(of_form([4], "f32"), causal=False), "lengths must be i32"),
        (lambda: attend(causal=False, seq=tw.Dim("seq", 1, 8)), "must be causal or have lengths"),
    ],
)
def test_invalid_attention_is_rejected(make, words):
    """Each by the call that describes it."""
    with pytest.raises(ShapeError, match=words):
        make()


def test_ops_by_name_are_checked_alike():
    """Attributes passed to `op` are checked as well."""
    g = tw.ComputeGraph("attend")
    x = g.input([4, 8, 8], name="x")
    plain = {"head_dim": 4, "causal": True, "scale": 1.0, "window": 0, "softcap": 0.0}
    for change, words in (
        ({"window": -1}, "a window must be 1 or more"),
        ({"softcap": 1e9}, "a softcap must lie"),
    ):
        with pytest.raises(ShapeError, match=words):
            g.op("attention", [x, x, x, None, None], **{**plain, **change})
    g.output(g.op("attention", [x, x, x, None, None], **plain)[0], "y")


def test_lengths_must_count_the_batch_with_microbatches():
    """Without the label they would be those of the wrong sequences."""
    graph = attend(of_form([4]), causal=False)
    with pytest.raises(LayoutError, match="labelled alike"):
        graph.plan({}, accumulation=2)
    with pytest.raises(PlanError, match="one batch"):
        g = attend(of_form([4], labels=[tw.BATCH]), causal=False)
        g.output(g.input([2], "i32", name="other", labels=[tw.BATCH], storage="scalars"), "other")
        g.plan({})


@pytest.mark.parametrize("in_layer", [False, True])
def test_inputs_may_have_different_rows_per_sequence(in_layer):
    """Each sum over the batch is cut by the rows of its own operands, for any number of devices and microbatches."""

    @tw.layer
    def rows_of(graph, ids):
        return graph.embedding(ids, graph.parameter([16, 8], name="table"))

    g = tw.ComputeGraph("rows")
    x = g.input([8, 70, 8], name="x", labels=[tw.BATCH, None, None])
    ids, labels = (
        g.input([8], "i32", name=n, labels=[tw.BATCH], storage="scalars") for n in ("ids", "labels")
    )
    rows = rows_of(g, ids, path="a") if in_layer else rows_of.function(g, ids)
    loss, _ = g.mean_cross_entropy(linear(g, rows, "head", 6), labels)
    g.loss(g.add(loss, g.mean(linear(g, x, "other.weight", 6, bias=True))))
    g.optimize(tw.optim.AdamW())
    rng = np.random.default_rng(0)
    data = {
        "x": rng.standard_normal((8, 70, 8), np.float32),
        "ids": rng.integers(0, 16, 8).astype(np.int32),
        "labels": rng.integers(0, 6, 8).astype(np.int32),
    }
    report = verify_strategy(g, {"dp": 2}, [data, data], accumulation=2)
    assert report.equal, report.text


def test_lengths_without_the_label_are_not_shared():
    """Devices share sequences only with their lengths: a missing label is rejected in planning."""
    graph = attend(of_form([4]), causal=False)
    with pytest.raises(PlanError, match="'slice:lengths'; give both sides one layout"):
        graph.plan({"dp": 2})


def test_constant_lengths():
    """Lengths that never change may be a constant; one beyond the sequence is rejected in planning."""
    for values, fits in (((8, 1, 5, 3), True), ((8, 1, 9, 3), False)):
        graph = attend(
            lambda g, values=values: g.constant(
                np.array(values, np.int32), name="lengths", storage="scalars"
            ),
            causal=False,
        )
        if fits:
            graph.plan({})
            continue
        with pytest.raises(ShapeError, match=r"'lengths' must lie in \[1, 8\]; got 9"):
            graph.plan({})
