"""Biases, layer norms and norms of heads on every strategy: equal to one device to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from padded_batches import VOCAB, change_ints, differing, padded, small_model, steps
from small_llama import batches, change_first, drop_partial, halve_batch_splits

import tilewise as tw
from tilewise.core.errors import ShapeError
from tilewise.core.mesh import DeviceMesh
from tilewise.nn import layer_norm, linear, rms_norm
from tilewise.session import verify_strategy
from tilewise.strategy import ParallelismMode

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 8, 2, 4, 48
BATCH, SEQ = 8, 9
HEADS_LABEL = tw.DimLabel("heads", HEAD_DIM)
KV_LABEL = tw.DimLabel("kv_heads", HEAD_DIM, HEADS // KV_HEADS)
MLP, VOCABULARY = tw.DimLabel("mlp"), tw.DimLabel("vocab", 8)


def biased(g, x):
    """Every product has a bias, and norms have two vectors, as in GPT-2 and BERT."""
    h = layer_norm(g, x, "norm", eps=1e-5)
    q = linear(g, h, "q.weight", HEADS * HEAD_DIM, out_label=HEADS_LABEL, bias=True)
    k, v = (linear(g, h, f"{n}.weight", KV_HEADS * HEAD_DIM, out_label=KV_LABEL, bias=True) for n in "kv")
    out = g.scaled_dot_product_attention(q, k, v, head_dim=HEAD_DIM, causal=True)
    x = g.add(x, linear(g, out, "o.weight", WIDTH, in_label=HEADS_LABEL, bias=True))
    up = g.gelu(linear(g, x, "up.weight", INNER, out_label=MLP, bias=True))
    return g.add(x, linear(g, up, "down.weight", WIDTH, in_label=MLP, bias=True))


def normed_heads(g, x):
    """Queries and keys are normalised head by head, as in Qwen3 and Gemma 3; gates and caps as in Gemma 2."""
    h = rms_norm(g, x, "norm.weight", eps=1e-5, offset=1.0)
    q = linear(g, h, "q.weight", HEADS * HEAD_DIM, out_label=HEADS_LABEL)
    k, v = (linear(g, h, f"{n}.weight", KV_HEADS * HEAD_DIM, out_label=KV_LABEL) for n in "kv")
    q = rms_norm(g, q, "q_norm.weight", eps=1e-5, offset=1.0, head_dim=HEAD_DIM)
    k = rms_norm(g, k, "k_norm.weight", eps=1e-5, head_dim=HEAD_DIM)
    out = g.scaled_dot_product_attention(q, k, v, head_dim=HEAD_DIM, causal=True)
    x = g.add(x, linear(g, out, "o.weight", WIDTH, in_label=HEADS_LABEL))
    gate, up = (linear(g, x, f"{n}.weight", INNER, out_label=MLP) for n in ("gate", "up"))
    gated = g.mul(g.gelu(gate, approximate="tanh"), g.softcap(up, 5.0))
    return g.add(x, linear(g, gated, "down.weight", WIDTH, in_label=MLP))


BLOCKS = {"biased": biased, "normed_heads": normed_heads}


def build(name: str, dtype: str = "f32", seq: int | tw.Dim = SEQ, batch: int = BATCH) -> tw.ComputeGraph:
    g = tw.ComputeGraph(name)
    tokens = g.input([batch, seq], "i32", name="tokens", labels=[tw.BATCH, None], storage="scalars")
    labels = g.input([batch, seq], "i32", name="labels", labels=[tw.BATCH, None], storage="scalars")
    table = g.parameter([VOCAB, WIDTH], dtype, name="table", labels=[VOCABULARY, None])
    x = g.embedding(tokens, table)
    block = tw.layer(BLOCKS[name])
    for i in range(2):
        x = block(g, x, path=f"layers.{i}")
    g.loss(g.mean_cross_entropy(linear(g, x, "head", VOCAB, out_label=VOCABULARY), labels)[0])
    g.optimize(tw.optim.AdamW())
    return g


def compare(name, dtype, axes, accumulation=1, count=4, **options):
    return verify_strategy(
        build(name, dtype),
        DeviceMesh(axes),
        batches(small_model(), count, BATCH, SEQ),
        accumulation=accumulation,
        **options,
    )


EVERYDAY = [
    ("biased", "f32", {"tp": 4}, 1),
    ("biased", "bf16", {"dp": 2, "tp": 2}, 2),
    ("normed_heads", "bf16", {"tp": 4}, 1),
    ("normed_heads", "f32", {"dp": 2, "tp": 2}, 2),
]
MESHES = [({}, 4), ({"dp": 2}, 1), ({"dp": 4}, 2), ({"tp": 2}, 1), ({"tp": 8}, 1), ({"dp": 2, "tp": 4}, 2)]
SLOW = [(name, dtype, *mesh) for name in BLOCKS for dtype in ("f32", "bf16") for mesh in MESHES]


@pytest.mark.parametrize(
    "name,dtype,axes,accumulation",
    [*EVERYDAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_equal_to_one_device(name, dtype, axes, accumulation):
    """Loss, gradients, parameters and moments; also with more devices than KV heads."""
    report = compare(name, dtype, axes, accumulation)
    assert report.equal, report.text


def merge_splits_of_heads(instruction):
    """All heads of a device are added in order, instead of along the tree."""
    k_splits, *ranges = instruction.ints
    return replace(instruction, ints=(k_splits, 0, max(ranges), *[0] * (2 * k_splits - 2)))


FAULTS = [
    ("biased", {}, 4, "bias_gradient:q.bias", halve_batch_splits),
    ("biased", {"dp": 4}, 1, "bias_gradient:up.bias/reduce_scatter", drop_partial),
    ("biased", {}, 4, "layer_norm_backward:norm.weight", halve_batch_splits),
    ("biased", {"dp": 2}, 1, "layer_norm_backward:norm.weight/reduce_scatter", drop_partial),
    ("normed_heads", {}, 4, "rms_norm_backward:k_norm.weight", halve_batch_splits),
    ("normed_heads", {"tp": 4}, 1, "head_sum/reduce_scatter", drop_partial),
    ("normed_heads", {"tp": 2}, 1, "head_sum", merge_splits_of_heads),
]


@pytest.mark.parametrize(
    "name,axes,accumulation,label,fault", FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_planted_faults_are_detected(name, axes, accumulation, label, fault):
    """A moved border and a dropped partial."""
    assert not compare(name, "f32", axes, accumulation, change=change_first(label, fault, -1)).equal


@pytest.mark.parametrize(
    "heads,group,k_splits,tp", [(8, 1, 12, 3), (3, 1, 8, 2), (2, 4, 8, 8), (6, 2, 8, 2)], ids=str
)
def test_shares_of_heads(heads, group, k_splits, tp):
    """Shares of unequal size, heads that do not fill the k splits, and a head that several devices have."""
    label = tw.DimLabel("heads", HEAD_DIM, group)
    g = tw.ComputeGraph("shares", k_splits=k_splits)
    x = g.input([4, 6, WIDTH], name="x", labels=[tw.BATCH, None, None])
    h = linear(g, x, "up.weight", heads * HEAD_DIM, out_label=label, bias=True)
    h = rms_norm(g, h, "gain", eps=1e-5, offset=1.0, head_dim=HEAD_DIM)
    g.loss(g.mean(g.gelu(linear(g, h, "down.weight", WIDTH, in_label=label))))
    g.optimize(tw.optim.AdamW())
    data = {"x": np.random.default_rng(0).standard_normal((4, 6, WIDTH), np.float32)}
    strategy = tw.DistributionStrategy(ParallelismMode.HYBRID, {"tp": tp}, {"heads": "tp"})
    states = []
    for chosen in (tw.DistributionStrategy.single(), strategy):
        g.set_distribution(chosen)
        with g.instantiate() as model:
            model.initialize(2, 0.5)
            for _ in range(3):
                model.step(data, 1e-2)
            states.append(model.state_dict() | {"gain.grad": model.get_tensor("gain.grad")})
    assert states[0]["gain.grad"].any() and differing(*states) == []


def test_heads_cut_by_a_label_are_rejected():
    """A head that devices would share cannot be normalised; nor can a dim that holds no whole heads."""
    g = tw.ComputeGraph("cut")
    x = g.input([4, 12], name="x", labels=[tw.BATCH, tw.DimLabel("heads", 2)])
    for size, words in ((4, "keep heads of 4 whole"), (5, "must hold heads of 5")):
        with pytest.raises(ShapeError, match=words):
            rms_norm(g, x, "gain", eps=1e-5, head_dim=size)
        assert not g.has("gain")


def test_bias_without_a_label():
    """It is whole on every device, which uses its part where the columns are shared; so is its gradient."""
    g = tw.ComputeGraph("unlabelled")
    x = g.input([4, 6, WIDTH], name="x", labels=[tw.BATCH, None, None])
    h = g.add_bias(linear(g, x, "up", INNER, out_label=MLP), g.parameter([INNER], name="bias", init="zeros"))
    y = linear(g, h, "down", WIDTH, in_label=MLP)
    g.loss(g.mean(g.mul(y, y)))
    g.optimize(tw.optim.AdamW())
    data = {"x": np.random.default_rng(0).standard_normal((4, 6, WIDTH), np.float32)}
    report = verify_strategy(g, DeviceMesh({"tp": 2}), [data] * 2)
    assert report.equal, report.text


def test_initial_values():
    """By default biases are zero and gains one; random values have their spread."""
    g = tw.ComputeGraph("first")
    x = g.input([4, WIDTH], name="x")
    y = linear(g, rms_norm(g, x, "norm", eps=1e-5), "w.weight", 400, bias=True)
    g.output(g.add_bias(y, g.parameter([400], name="drawn", init="normal", init_scale=2.0)), "y")
    g.output(g.scale(g.parameter([3, 5], name="flat", init="ones"), 1.0), "one")
    with g.instantiate() as model:
        model.initialize(seed=3, scale=0.5)
        first = {n: model.get_tensor(n) for n in model.parameter_names()}
    assert not first["w.bias"].any() and (first["norm"] == 1).all() and (first["flat"] == 1).all()
    assert 0.9 < first["drawn"].std() < 1.1 and 0.45 < first["w.weight"].std() < 0.55


def test_bias_has_the_name_of_its_weight():
    """Another ending is rejected, and nothing is declared."""
    g = tw.ComputeGraph("names")
    x = g.input([4, WIDTH], name="x")
    with pytest.raises(ShapeError, match=r"\[nn.linear\].*without '.weight' at its end"):
        linear(g, x, "up", 8, bias=True)
    assert not g.has("up")


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BLOCKS)
def test_padding_changes_no_bit(name, dtype):
    """Padded sequences on two devices with two microbatches equal the longest one's length on one device."""
    lengths = (70, 9, 66, 31)
    graph = build(name, dtype, tw.Dim("seq", 1, 130), len(lengths))
    expected = steps(graph, graph.plan({}, sizes={"seq": 70}), [padded(lengths, 70, s) for s in range(2)])
    plan = graph.plan({"dp": 2}, accumulation=2)
    wider = [padded(lengths, 97 + s, s) for s in range(2)]
    assert differing(expected, steps(graph, plan, wider)) == []
    if dtype == "f32":  # cuts counted over the batch's longest instead of the bound
        moved = change_ints(plan, "split_tree", lambda ints: [ints[0], 64, *ints[2:]])
        assert differing(expected, steps(graph, moved, wider))
