"""One plan for sequences of any length up to a bound: padding changes no bit, whatever shares or cuts the batch.

Padded rows have gradients of zero, so they add zeros to sums over rows. A zero that is added changes nothing but the
sign of a sum that is zero, and these sums end without that sign where rows may be padding; so all comparisons here are
of bytes, zeros among them.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from padded_batches import change_ints, differing, graph_for, padded, small_model, steps

import tilewise as tw
from tilewise import models
from tilewise.core import DeviceMesh
from tilewise.core.errors import LayoutError, PlanError, ShapeError
from tilewise.kernels.isa import isa_in_use
from tilewise.nn import linear, rms_norm
from tilewise.session import verify_strategy

LENGTHS = (150, 70, 187, 3)
LONGEST, BOUND = max(LENGTHS), 300  # five atoms of 64 positions, of which the batch fills three


@pytest.fixture(scope="module")
def exact():
    """Ten steps of the batch at its own length, in a plan for only that length; by dtype and batch splits."""
    losses = {}

    def run(dtype, batch_splits):
        if (dtype, batch_splits) not in losses:
            graph = graph_for(tw.Dim("seq", 1, BOUND), dtype)
            plan = graph.plan({}, batch_splits=batch_splits, sizes={"seq": LONGEST})
            assert not plan.symbol_bounds
            losses[dtype, batch_splits] = steps(graph, plan, [padded(LENGTHS, LONGEST, s) for s in range(10)])
        return losses[dtype, batch_splits]

    return run


@pytest.mark.parametrize(
    "dtype,width,batch_splits,axes,accumulation",
    [
        ("f32", LONGEST, 4, {}, 1),
        ("f32", BOUND, 1, {}, 1),
        ("f32", 240, 2, {"tp": 2}, 1),
        ("f32", 256, 4, {}, 2),
        ("bf16", LONGEST + 1, 4, {}, 1),
        ("bf16", LONGEST + 2, 1, {}, 1),
        ("bf16", 211, 4, {"dp": 2}, 1),
        ("bf16", 219, 4, {"dp": 2}, 2),
    ],
    ids=str,
)
def test_padding_changes_no_bit_of_ten_steps(exact, dtype, width, batch_splits, axes, accumulation):
    """Losses, norms, gradients, parameters and optimizer states equal those of the exact length's plan."""
    graph = graph_for(tw.Dim("seq", 1, BOUND), dtype)
    plan = graph.plan(axes, batch_splits=batch_splits, accumulation=accumulation)
    padded_steps = steps(graph, plan, [padded(LENGTHS, width, s) for s in range(10)])
    assert differing(exact(dtype, batch_splits), padded_steps) == []


def test_partial_sums_between_microbatches():
    """Two devices share each of three microbatches: the same bits as one device and the exact length."""
    lengths = tuple(range(2, 86, 7))
    longest = max(lengths)
    graph = graph_for(tw.Dim("seq", 1, 90), "bf16", batch=len(lengths))
    expected = steps(
        graph,
        graph.plan({}, batch_splits=12, sizes={"seq": longest}),
        [padded(lengths, longest, s) for s in range(3)],
    )
    plan = graph.plan({"dp": 2}, batch_splits=12, accumulation=3)
    assert differing(expected, steps(graph, plan, [padded(lengths, longest + s, s) for s in range(3)])) == []


def test_contents_of_padding_have_no_effect(exact):
    """Another token there changes nothing; a counted label there changes everything."""
    graph = graph_for(tw.Dim("seq", 1, BOUND))
    plan = graph.plan({})
    other = [padded(LENGTHS, 240, s, pad=77) for s in range(10)]
    assert differing(exact("f32", 4), steps(graph, plan, other)) == []
    counted = [padded(LENGTHS, 240, s) for s in range(10)]
    for batch in counted:
        batch["labels"][0, -1] = 5
    assert len(differing(exact("f32", 4), steps(graph, plan, counted))) > 10


def test_graph_of_one_length_gives_the_same():
    """Up to 128 positions every cut of a sequence is one sum, so the bound has no effect."""
    lengths = (40, 9, 88, 61)
    batches = [padded(lengths, 88, s) for s in range(3)]
    fixed, any_length = graph_for(88), graph_for(tw.Dim("seq", 1, 128))
    expected = steps(fixed, fixed.plan({}), batches)
    plan = any_length.plan({"dp": 2})
    for width in (88, 117):
        wider = [padded(lengths, width, s) for s in range(3)]
        assert differing(expected, steps(any_length, plan, wider)) == [], width


def test_cuts_that_follow_the_length_are_detected(exact):
    """Fault: sequence splits counted over the batch's longest instead of the bound."""
    graph = graph_for(tw.Dim("seq", 1, BOUND))
    plan = change_ints(graph.plan({}), "split_tree", lambda ints: [ints[0], LONGEST, *ints[2:]])
    results = steps(graph, plan, [padded(LENGTHS, LONGEST, s) for s in range(10)])
    assert "losses" in differing(exact("f32", 4), results)


@pytest.mark.skipif(isa_in_use() not in ("avx512_bf16", "amx_bf16"), reason="takes one token at a time")
def test_pairs_of_tokens_across_sequences_are_detected(exact):
    """Fault: products that pair a sequence's odd last token with the next one's first where nothing is padded."""
    graph = graph_for(tw.Dim("seq", 1, BOUND), "bf16")
    plan = change_ints(graph.plan({}, batch_splits=1), "matmul_dw", lambda ints: [*ints[:3], 0])
    results = steps(graph, plan, [padded(LENGTHS, LONGEST, s) for s in range(10)])
    assert any(name.endswith(".grad") for name in differing(exact("bf16", 1), results))


@pytest.fixture(scope="module")
def running():
    """A model in batch splits for two microbatches that runs forward and backward only."""
    graph = graph_for(tw.Dim("seq", 1, 140))
    with graph.instantiate(graph.plan({})) as model:
        model.initialize(0, 0.1)
        yield model


def gradients(model, batch):
    model.forward(**batch)
    loss, rows = model.get_tensor("loss"), model.get_tensor("loss_rows")
    model.backward()
    return {"loss": loss, **{n: model.get_tensor(f"{n}.grad") for n in model.parameter_names()}}, rows


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 120), min_size=4, max_size=4),
    st.integers(0, 20),
    st.integers(0, 1000),
)
def test_any_lengths_with_any_padding(running, lengths, extra, seed):
    """Runs of all widths follow each other in one instance; rows of padding have losses of +0."""
    longest = max(lengths)
    expected, rows = gradients(running, padded(lengths, longest, seed))
    results, wider = gradients(running, padded(lengths, longest + extra, seed))
    assert differing(expected, results) == []
    assert wider.shape == (4, longest + extra)
    np.testing.assert_array_equal(wider[:, :longest].view(np.int32), rows.view(np.int32))
    for row, length in enumerate(lengths):
        assert not wider[row, length:].view(np.int32).any()


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(1, 330), min_size=8, max_size=8),
    st.integers(0, 70),
    st.sampled_from([{}, {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 4}]),
    st.sampled_from([1, 2]),
    st.sampled_from([2, 3, 8, 12]),
    st.sampled_from(["f32", "bf16"]),
)
def test_random_lengths_on_random_meshes(lengths, extra, axes, accumulation, k_splits, dtype):
    """Two padded steps over a mesh equal one device and the exact length, for several numbers of k splits."""
    graph = tw.ComputeGraph("llama", k_splits=k_splits)
    models.build_training_graph(graph, small_model(), 8, tw.Dim("seq", 1, 400), dtype)
    graph.optimize(tw.optim.AdamW())
    longest = max(lengths)
    try:
        plan = graph.plan(axes, accumulation=accumulation)
    except LayoutError:
        assume(False)
    expected = steps(
        graph, graph.plan({}, sizes={"seq": longest}), [padded(lengths, longest, s) for s in range(2)]
    )
    results = steps(graph, plan, [padded(lengths, longest + extra, s) for s in range(2)])
    assert differing(expected, results) == []


def test_verify_accepts_batches_of_different_lengths():
    """Each step has another length; a dropped row of a batch split is detected."""
    graph = graph_for(tw.Dim("seq", 1, 90))
    batches = [padded((n, 3, 2 * n, n + 1), 2 * n, n) for n in (7, 45, 2)]
    assert verify_strategy(graph, DeviceMesh({"dp": 2, "tp": 2}), batches).equal
    fault = verify_strategy(
        graph,
        DeviceMesh({"dp": 2}),
        batches,
        change=lambda plan: change_ints(plan, "matmul_dw", lambda ints: [_less_one(ints[0]), *ints[1:]]),
    )
    assert not fault.equal


def _less_one(number):
    return number._replace(constant=number.constant - 1)


def by_hand(seq):
    """Layouts that change, a sum next to cross-entropy, and an output that devices share."""
    g, mlp = tw.ComputeGraph("by hand"), tw.DimLabel("mlp")
    x = g.input([4, seq, 16], name="x", labels=[tw.BATCH, None, None])
    labels = g.input([4, seq], "i32", name="labels", labels=[tw.BATCH, None], storage="scalars")
    a = g.output(linear(g, x, "a", 32, out_label=mlp), "a.out")
    h = rms_norm(g, g.add(g.softmax(a), g.silu(a)), "norm", eps=1e-5)
    y = g.add(x, linear(g, h, "b", 16))
    loss, _ = g.mean_cross_entropy(linear(g, y, "head", 12), labels)
    g.loss(g.add(loss, g.scale(g.sum(g.mul(y, y)), 0.01)))
    g.optimize(tw.optim.AdamW())
    return g


def test_any_graph_may_have_a_symbolic_length():
    """Gathered columns, norms, sums and outputs over devices equal graphs of fixed lengths."""
    graph, generator = by_hand(tw.Dim("seq", 1, 70)), np.random.default_rng(0)
    batches = [
        {
            "x": generator.standard_normal((4, length, 16), np.float32),
            "labels": generator.integers(0, 12, (4, length)).astype(np.int32),
        }
        for length in (70, 3, 65, 1)
    ]
    for mesh in ({"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}):
        report = verify_strategy(graph, mesh, batches)
        assert report.equal, report.text
    for batch in batches:
        fixed = by_hand(batch["x"].shape[1])
        assert differing(steps(fixed, fixed.plan({}), [batch]), steps(graph, graph.plan({}), [batch])) == []


# ---- what a plan says --------------------------------------------------------------------------------------


def test_work_and_traffic_follow_the_length():
    """Devices' reads equal the plan for the length; half the length is half the reading."""
    graph = graph_for(tw.Dim("seq", 1, 64))
    plan = graph.plan({"tp": 2})
    seen = {}
    with graph.instantiate(plan) as model:
        model.initialize(0, 0.1)
        for width in (64, 32, 7):
            model.reset_transfers()
            model.step(padded((width, 2, 5, 7), width), 1e-3)
            seen[width] = {k: v for k, v in model.transfers().items() if any(v)}
            assert seen[width] == {k: v for k, v in plan.traffic("step", {"seq": width}).items() if any(v)}
    assert plan.traffic("step") == plan.traffic("step", {"seq": 64})
    rows = {k for k in seen[64] if seen[64][k] != seen[32][k]}
    assert len(rows) > 4 and all(seen[64][k] == [2 * n for n in seen[32][k]] for k in rows)
    extents = [i.extent for of in plan.program.classes for t in of.templates for i in t.instructions]
    assert sum(e.multiple > 0 for e in extents) > len(extents) // 2


def test_memory_is_reserved_for_the_bound_or_for_a_given_length():
    """The estimate equals the allocation; a plan for a shorter length needs less."""
    graph = graph_for(tw.Dim("seq", 1, 256))
    plans, fixed = [graph.plan({}, sizes=sizes) for sizes in (None, {"seq": 64})], graph_for(256).plan({})
    for plan in plans:
        with graph.instantiate(plan) as model:
            assert model.memory_usage() == plan.estimate_memory_usage()
    assert plans[1].arena_bytes[0] < plans[0].arena_bytes[0] / 2
    assert plans[0].arena_bytes[0] == fixed.arena_bytes[0]
    text = plans[0].explain()
    assert (
        "seq up to 256; all figures are for the largest" in text and "activations in up to 256 rows" in text
    )
    assert "activations in 256 rows" in fixed.explain()


@pytest.mark.parametrize("sizes", [None, {"seq": 70}], ids=str)
def test_saved_plans_keep_their_lengths(tmp_path, sizes):
    """A plan for any length, or for one of them, is read back from its file."""
    graph = graph_for(tw.Dim("seq", 1, 90))
    plan = graph.plan({"dp": 2}, sizes=sizes)
    plan.save(tmp_path / "plan")
    loaded = tw.Plan.load(tmp_path / "plan")
    assert loaded.digest() == plan.digest() and loaded.settings == plan.settings
    batches = [padded((70, 3, 9, 41), 70, s) for s in range(2)]
    assert differing(steps(graph, plan, batches), steps(graph, loaded, batches)) == []


def test_generation_may_be_planned_for_one_size():
    """The same option for generation: fewer tokens at a time need less memory, and the text is the same."""
    graph = tw.ComputeGraph()
    models.build_decoding_graph(
        graph, small_model(), max_tokens=64, max_sequences=2, num_blocks=2, dtype="f32"
    )
    batch = {n: np.arange(3, dtype=np.int32) for n in ("tokens", "positions", "slots")}
    batch |= {"sequence": np.zeros(3, np.int32), "block_table": np.zeros((1, 2), np.int32)}
    outputs = []
    for plan in (graph.plan({}), graph.plan({"tp": 2}, sizes={"tokens": 3, "sequences": 1, "rows": 1})):
        with graph.instantiate(plan) as model:
            model.initialize(0, 0.1)
            model.forward(**batch, rows=np.array([2], np.int32))
            outputs.append((model.get_tensor("logits"), plan.placement(0).regions["activations"]))
    assert outputs[0][0].tobytes() == outputs[1][0].tobytes()
    assert outputs[1][1] < outputs[0][1] / 8


# ---- what is refused ---------------------------------------------------------------------------------------


REJECTED = {
    r"seq must lie in \[1, 64\] and be one number; got 65 in 'tokens'": padded((65, 1, 1, 1), 65),
    "got 0 in 'tokens'": {name: np.zeros((4, 0), np.int32) for name in ("tokens", "labels")},
    "be one number; got 8 in 'labels'": {**padded((9, 1, 1, 1), 9), "labels": np.zeros((4, 8), np.int32)},
    r"shapes must agree; got \(3, 9\) for 'tokens' \(4, 9\)": padded((9, 1, 1), 9),
    "'tokens' must be an array": {"tokens": [[1, 2], [3]], "labels": [[1, 2], [3]]},
}


def test_rejected_batch_changes_nothing():
    """It is rejected before anything is written: the next step is unaffected."""
    graph = graph_for(tw.Dim("seq", 1, 64))
    good = padded((20, 3, 4, 5), 20)
    with graph.instantiate(graph.plan({})) as model:
        model.initialize(0, 0.1)
        first = model.step(good, 1e-3)
        for words, batch in REJECTED.items():
            model.initialize(0, 0.1)
            with pytest.raises(ShapeError, match=words):
                model.step(batch, 1e-3)
            assert model.step(good, 1e-3).loss == first.loss


def test_only_known_sizes_are_shared():
    """A symbolic size cannot be divided over devices: its value is unknown when shares are cut."""
    rows = tw.DimLabel("rows")
    g = tw.ComputeGraph()
    x = g.input([4, tw.Dim("seq", 1, 8), 8], name="x", labels=[None, rows, None])
    g.output(g.scale(x, 2.0), "y")
    g.set_distribution(tw.DistributionStrategy(tw.ParallelismMode.HYBRID, {"sp": 2}, {"rows": "sp"}))
    with pytest.raises(LayoutError, match="got the symbol seq over 2 devices"):
        g.plan()


@pytest.mark.parametrize(
    "shape,words",
    [
        ([tw.Dim("n", 1, 8), 4], "a batch must have a fixed size"),
        ([4, tw.Dim("n", 0, 8)], "from 1 on"),
        ([4, tw.Dim("n", 1, 8), tw.Dim("m", 1, 8)], "at most one symbolic size"),
    ],
    ids=str,
)
def test_valid_symbolic_batches(shape, words):
    """One length per sequence, of one row or more."""
    g = tw.ComputeGraph()
    x = g.input([*shape, 2], name="x", labels=[tw.BATCH] + [None] * len(shape))
    g.loss(g.sum(x))
    with pytest.raises(PlanError, match=words):
        g.plan({})


def test_sizes_of_a_plan_are_checked():
    """An unknown symbol, or a value out of its bounds."""
    graph = graph_for(tw.Dim("seq", 1, 64))
    plan = graph.plan({})
    for sizes, words in (
        ({"length": 5}, "a size must be one of seq"),
        ({"seq": 65}, "size 'seq'"),
        ({"seq": 0}, "size 'seq'"),
    ):
        with pytest.raises(PlanError, match=words):
            graph.plan({}, sizes=sizes)
        with pytest.raises(PlanError, match=words):
            plan.traffic("step", sizes)


def test_positions_beyond_the_table_are_rejected():
    """In planning: a bound that the rotary table does not reach."""
    g = tw.ComputeGraph()
    tokens = g.input(
        [2, tw.Dim("seq", 1, 9)], "i32", name="tokens", labels=[tw.BATCH, None], storage="scalars"
    )
    w = g.parameter([16, 8], name="w")
    table = g.constant(np.zeros((8, 4), np.float32), name="table")
    g.output(g.rope(g.embedding(tokens, w), g.positions(tokens), table, head_dim=4), "y")
    with pytest.raises(ShapeError, match=r"'rows\.positions' must lie in"):
        g.plan({})
