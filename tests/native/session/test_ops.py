"""Every op in a small graph: result and gradient against PyTorch, for odd sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw
from support.made_ops import make_op
from tilewise.core.errors import PlanError, ShapeError
from tilewise.ir.op import result
from tilewise.models.decoder.rope import Rope, rope_table
from tilewise.nn import linear

BATCH, SEQ, WIDTH, CLASSES, HEAD = 3, 7, 20, 37, 4
T = BATCH * SEQ


def rotate(x, seq, rotated=HEAD):
    """RoPE in PyTorch with paired halves of the first elements of every head."""
    table = torch.tensor(rope_table(Rope(10000.0, seq, rotary_dim=rotated), HEAD, seq, seq))
    half = rotated // 2
    heads = x.view(BATCH, seq, -1, HEAD)
    a, b, rest = heads.split([half, half, HEAD - rotated], dim=-1)
    c, s = table[None, :, None, :half], table[None, :, None, half:]
    return torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1).view(x.shape), table.numpy()


def norm_of_heads(x, gamma):
    heads = x.unflatten(-1, (-1, HEAD))
    return (heads * (heads.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gamma).flatten(-2)


def build_rope(g, a, b, rotated=HEAD):
    positions = g.constant(
        np.tile(np.arange(SEQ, dtype=np.int32), (BATCH, 1)), name="positions", storage="scalars"
    )
    _, table = rotate(torch.zeros(BATCH, SEQ, WIDTH), SEQ, rotated)
    return g.rope(a, positions, g.constant(table, name="table"), head_dim=HEAD)


LENGTHS = (SEQ, 1, 4)


def attend(**scores):
    options = {"causal": True, **scores}
    return lambda g, a, b: g.scaled_dot_product_attention(b, a, a, head_dim=HEAD, **options)


def attend_to_lengths(g, a, b):
    lengths = g.constant(np.array(LENGTHS, np.int32), name="lengths", storage="scalars")
    return attend(causal=False, softcap=2.0, lengths=lengths)(g, a, b)


def torch_attend(softcap=torch.inf, window=SEQ, lengths=None):
    """The same in PyTorch, step by step."""
    query, position = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None, :]
    seen = ((position <= query) & (position > query - window)).expand(BATCH, SEQ, SEQ)
    if lengths is not None:
        seen = (position < torch.tensor(lengths)[:, None, None]).expand(BATCH, SEQ, SEQ)

    def attention(a, b):
        keys, queries = (x.view(BATCH, SEQ, -1, HEAD).transpose(1, 2) for x in (a, b))
        scores = queries @ keys.mT * HEAD**-0.5
        if softcap < torch.inf:
            scores = softcap * torch.tanh(scores / softcap)
        p = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        y = (p @ keys).transpose(1, 2).reshape(BATCH, SEQ, WIDTH)
        padding = torch.arange(SEQ) >= torch.tensor(lengths or (SEQ,) * BATCH)[:, None]
        return y.masked_fill(padding[..., None], 0)

    return attention


OPS = {
    "attention": (attend(), torch_attend()),
    "window": (attend(window=3), torch_attend(window=3)),
    "capped_attention": (attend(window=4, softcap=0.8), torch_attend(0.8, 4)),
    "lengths": (attend_to_lengths, torch_attend(2.0, lengths=LENGTHS)),
    "add": (lambda g, a, b: g.add(a, b), lambda a, b: a + b),
    "add_bias": (
        lambda g, a, b: g.add_bias(a, g.parameter([WIDTH], name="bias")),
        lambda a, b, bias: a + bias,
    ),
    "multiply": (lambda g, a, b: g.mul(a, b), lambda a, b: a * b),
    "scale": (lambda g, a, b: g.scale(a, -1.5), lambda a, b: -1.5 * a),
    "silu": (lambda g, a, b: g.silu(a), lambda a, b: torch.nn.functional.silu(a)),
    "silu_gate": (lambda g, a, b: g.mul(g.silu(a), b), lambda a, b: torch.nn.functional.silu(a) * b),
    "relu": (lambda g, a, b: g.relu(a), lambda a, b: a.relu()),
    "gelu": (lambda g, a, b: g.gelu(a), lambda a, b: torch.nn.functional.gelu(a)),
    "gelu_tanh": (
        lambda g, a, b: g.gelu(a, approximate="tanh"),
        lambda a, b: torch.nn.functional.gelu(a, approximate="tanh"),
    ),
    "gelu_tanh_gate": (
        lambda g, a, b: g.mul(g.gelu(a, approximate="tanh"), b),
        lambda a, b: torch.nn.functional.gelu(a, approximate="tanh") * b,
    ),
    "tanh": (lambda g, a, b: g.tanh(a), lambda a, b: a.tanh()),
    "softcap": (lambda g, a, b: g.softcap(a, 1.5), lambda a, b: 1.5 * (a / 1.5).tanh()),
    "softmax": (lambda g, a, b: g.softmax(a), lambda a, b: a.softmax(-1)),
    "rms_norm": (
        lambda g, a, b: g.rms_norm(a, g.parameter([WIDTH], name="gamma"), eps=1e-5),
        lambda a, b, gamma: a * (a.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gamma,
    ),
    "rms_norm_with_an_offset": (
        lambda g, a, b: g.rms_norm(a, g.parameter([WIDTH], name="gamma"), eps=1e-5, offset=1.0),
        lambda a, b, gamma: a * (a.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + gamma),
    ),
    "rms_norm_of_heads": (
        lambda g, a, b: g.rms_norm(a, g.parameter([HEAD], name="gamma"), eps=1e-5, offset=0.5, head_dim=HEAD),
        lambda a, b, gamma: norm_of_heads(a, gamma + 0.5),
    ),
    "layer_norm": (
        lambda g, a, b: g.layer_norm(
            a, g.parameter([WIDTH], name="gamma"), g.parameter([WIDTH], name="bias"), eps=1e-5
        ),
        lambda a, b, gamma, bias: torch.nn.functional.layer_norm(a, (WIDTH,), gamma, bias, 1e-5),
    ),
    "layer_norm_beside_a_residual": (
        lambda g, a, b: g.add(
            a,
            g.layer_norm(a, g.parameter([WIDTH], name="gamma"), g.parameter([WIDTH], name="bias"), eps=1e-5),
        ),
        lambda a, b, gamma, bias: a + torch.nn.functional.layer_norm(a, (WIDTH,), gamma, bias, 1e-5),
    ),
    "residual": (
        lambda g, a, b: g.add(a, g.matmul(b, g.parameter([WIDTH, WIDTH], name="w"), trans_b=True)),
        lambda a, b, w: a + b @ w.T,
    ),
    "not_transposed": (
        lambda g, a, b: g.matmul(a, g.parameter([WIDTH, WIDTH], name="w")),
        lambda a, b, w: a @ w,
    ),
    "two_uses": (
        lambda g, a, b: g.add(g.mul(a, b), g.silu(a)),
        lambda a, b: a * b + torch.nn.functional.silu(a),
    ),
    "rope": (build_rope, lambda a, b: rotate(a, SEQ)[0]),
    "rope of a part": (lambda g, a, b: build_rope(g, a, b, 2), lambda a, b: rotate(a, SEQ, 2)[0]),
}


def run_both(op, torch_op):
    def build(g, a, b):
        return g.add(op(g, a, b), b)

    def reference(a, b, *rest):
        return torch_op(a, b, *rest) + b

    g = tw.ComputeGraph("ops")
    x = g.input([BATCH, SEQ, WIDTH], name="x")
    labels = g.input([BATCH, SEQ], "i32", name="labels", storage="scalars")
    names = ["wa", "wb"]
    a, b = (g.matmul(x, g.parameter([WIDTH, WIDTH], name=n), trans_b=True) for n in names)
    y = build(g, a, b)
    names += [n for n in ("gamma", "bias", "w") if g.has(n)]
    loss, _ = g.mean_cross_entropy(
        g.matmul(y, g.parameter([CLASSES, y.shape[-1]], name="head"), trans_b=True), labels
    )
    g.output(y, "y")
    g.loss(loss)
    generator = np.random.default_rng(5)
    values = {
        n: generator.standard_normal(g.find(n).shape).astype(np.float32) * 0.3 for n in [*names, "head"]
    }
    x_value = generator.standard_normal((BATCH, SEQ, WIDTH)).astype(np.float32)
    label_value = generator.integers(0, CLASSES, (BATCH, SEQ)).astype(np.int32)
    tensors = {n: torch.tensor(v, requires_grad=True) for n, v in values.items()}
    tx = torch.tensor(x_value)
    ty = reference(*(tx @ tensors[n].T for n in names[:2]), *(tensors[n] for n in names[2:]))
    tloss = torch.nn.functional.cross_entropy(
        (ty @ tensors["head"].T).flatten(0, 1), torch.tensor(label_value).long().flatten()
    )
    tloss.backward()
    with g.instantiate() as model:
        for n, v in values.items():
            model.set_tensor(n, v)
        model.forward(x=x_value, labels=label_value)
        y_value = model.get_tensor("y")
        model.backward()
        gradients = {n: model.get_tensor(f"{n}.grad") for n in values}
    return y_value, ty.detach().numpy(), gradients, {n: t.grad.numpy() for n, t in tensors.items()}


@pytest.mark.parametrize("name", OPS)
def test_result_and_gradient(name):
    """fp32: 2e-6 for results, 1e-5 for gradients, relative to the largest element."""
    y, ty, gradients, expected = run_both(*OPS[name])
    assert np.abs(y - ty).max() <= 2e-6 * np.abs(ty).max()
    for n, g in gradients.items():
        assert np.abs(g - expected[n]).max() <= 1e-5 * np.abs(expected[n]).max(), n


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
def test_products_of_activations(ta, tb):
    """`matmul` of two activations in all transpose forms."""
    g = tw.ComputeGraph("matmul")
    shape_a, shape_b = ((9, 13) if ta else (13, 9)), ((11, 9) if tb else (9, 11))
    a, b = g.input(shape_a, name="a"), g.input(shape_b, name="b")
    g.output(g.matmul(a, b, trans_a=ta, trans_b=tb), "y")
    generator = np.random.default_rng(0)
    va, vb = (generator.standard_normal(s).astype(np.float32) for s in (shape_a, shape_b))
    with g.instantiate() as model:
        model.forward(a=va, b=vb)
        exact = (va.T if ta else va).astype(np.float64) @ (vb.T if tb else vb)
        assert np.abs(model.get_tensor("y") - exact).max() <= 1e-6 * np.abs(exact).max()


def test_denormals_do_not_depend_on_the_callers_mode():
    """Workers set their own floating-point modes: a caller that flushes denormals changes no bit."""
    tiny = np.full((2, 3), 1e-40, np.float32)
    g = tw.ComputeGraph("tiny")
    g.output(g.scale(g.input([2, 3], name="x"), 0.5), "y")
    assert torch.set_flush_denormal(True)
    try:
        with g.instantiate() as model:
            model.forward(x=tiny)
            tensor = model.get_tensor("y")
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(tensor.view(np.uint32), (tiny * np.float32(0.5)).view(np.uint32)) and tensor.all()


def test_embedding_cast_and_rows():
    """Rows by id, by index, and rounding to bf16 and back."""
    g = tw.ComputeGraph("rows")
    ids = g.input([5], "i32", name="ids", storage="scalars")
    index = g.input([2], "i32", name="index", storage="scalars")
    table = g.parameter([40, 6], name="table")
    rows = g.gather_rows(g.embedding(ids, table), index)
    g.output(g.cast(g.cast(rows, "bf16"), "f32"), "y")
    value = np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32)
    with g.instantiate() as model:
        model.set_tensor("table", value)
        model.forward(ids=np.array([3, 39, 0, 3, 7], np.int32), index=np.array([4, 1], np.int32))
        expected = torch.tensor(value[[7, 39]]).bfloat16().float().numpy()
        assert np.array_equal(model.get_tensor("y"), expected)


@pytest.mark.parametrize("in_layer", [False, True])
def test_attention_without_a_batch_label(in_layer):
    """Tiles have whole sequences, also if attention is in a layer and no input has a batch label."""

    @tw.layer
    def attend(graph, q, k):
        return graph.scaled_dot_product_attention(q, k, k, head_dim=8, causal=True)

    g = tw.ComputeGraph("attention")
    q, k = g.input([5, 100, 16], name="q"), g.input([5, 100, 8], name="k")
    out = (
        attend(g, q, k, path="a")
        if in_layer
        else g.scaled_dot_product_attention(q, k, k, head_dim=8, causal=True)
    )
    g.output(out, "y")
    generator = np.random.default_rng(2)
    vq, vk = (generator.standard_normal(t.shape).astype(np.float32) for t in (q, k))
    tq = torch.tensor(vq).view(5, 100, 2, 8).transpose(1, 2)
    tk = torch.tensor(vk).view(5, 100, 1, 8).transpose(1, 2).expand(-1, 2, -1, -1)
    expected = torch.nn.functional.scaled_dot_product_attention(tq, tk, tk, is_causal=True).transpose(1, 2)
    with g.instantiate() as model:
        model.forward(q=vq, k=vk)
        assert np.abs(model.get_tensor("y") - expected.reshape(5, 100, 16).numpy()).max() < 1e-6


def test_sequences_cut_by_tiles_are_rejected():
    """Sequences without a batch label next to a batch: planning reports it before anything runs."""
    g = tw.ComputeGraph("attention")
    g.output(g.scale(g.input([4, 6, 8], name="x", labels=[tw.BATCH, None, None]), 2.0), "scaled")
    q = g.input([3, 9, 8], name="q")
    g.output(g.scaled_dot_product_attention(q, q, q, head_dim=8, causal=True), "y")
    with pytest.raises(PlanError, match="whole sequences"):
        g.plan()


def test_elementwise_ops_on_parameters():
    """Vectors and weights are processed whole in their storage, with edge panels; rows of panels are rejected."""
    g = tw.ComputeGraph("parameters")
    v, w = g.parameter([7], name="v"), g.parameter([37, 5], name="w")
    g.output(g.add(v, v), "v2")
    g.output(g.scale(w, 3.0), "w3")
    values = {
        n: np.random.default_rng(3).standard_normal(g.find(n).shape).astype(np.float32) for n in ("v", "w")
    }
    for bad in (
        lambda: g.softmax(w),
        lambda: g.rms_norm(w, g.parameter([5], name="g")),
        lambda: g.matmul(w, w),
    ):
        with pytest.raises(ShapeError, match="weight"):
            bad()
    with g.instantiate() as model:
        for n, value in values.items():
            model.set_tensor(n, value)
        model.forward()
        assert np.array_equal(model.get_tensor("v2"), 2 * values["v"])
        assert np.array_equal(model.get_tensor("w3"), np.float32(3) * values["w"])


def lower_sum(self, low):
    """A sum, by the kernel of another op."""
    x = low.tensor(self.a)
    tiles = {"out": low.row(self.out), "a": low.row(x), "b": low.row(self.b)}
    low.emit("add", over=x, dtype=x.dtype, tiles=tiles)


@pytest.mark.parametrize("in_place", ["", "a", "b", "a b", "b a"])
@pytest.mark.parametrize("axes", [{}, {"dp": 2}], ids=["one", "dp"])
def test_a_result_in_the_memory_of_an_operand(in_place, axes, same_ops):
    """With any permitted memory, a named result is the sum of both operands, to the bit."""
    make_op("total", out=result(like="a", in_place=in_place), lower=lower_sum)
    graph = tw.ComputeGraph("g")
    x = graph.input([8, 4], name="x", labels=[tw.BATCH, None])
    a, b = linear(graph, x, "a", 6), linear(graph, x, "b", 6)
    (y,) = graph.op("total", [a, b])
    graph.output(y, "y")
    graph.output(graph.add(linear(graph, x, "a2", 6), linear(graph, x, "b2", 6)), "z")
    values = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    with graph.instantiate(graph.plan(axes)) as model:
        model.initialize(0, 0.5)
        for name in ("a", "b"):
            model.set_tensor(f"{name}2", model.get_tensor(name))
        model.forward(x=values)
        assert np.array_equal(model.get_tensor("y"), model.get_tensor("z"))
