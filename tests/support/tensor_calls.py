"""Every call on tensors of any shape: how a graph makes it, and the same in PyTorch.

Each takes two tensors a and b `[BATCH, SEQ, WIDTH]`, and parameters that it declares, and returns one of
that shape.
"""

from __future__ import annotations

import numpy as np
import torch

import tilewise as tw
from tilewise.nn import linear

BATCH, SEQ, WIDTH, HEADS = 4, 6, 8, 2
HEAD = WIDTH // HEADS
functional = torch.nn.functional
rng = np.random.default_rng(3)
INDEX = rng.integers(0, SEQ, (BATCH, SEQ, WIDTH)).astype(np.int32)
CHOSEN = np.array([1, 1, 5, 0, 2, 3], np.int32)
MASK = np.where(rng.random((SEQ, SEQ)) < 0.3, -np.inf, 0.0).astype(np.float32)
MASK[:, 0] = 0.0
IMAGE = (BATCH, 2, SEQ, 4)


def positive(x):
    """A positive tensor, in a graph or in PyTorch."""
    return x * x + 0.5


def index(g, value=INDEX, **options):
    return g.constant(value, name=f"index{len(g.draft.names)}", **options)


def by_element(g, value=INDEX):
    return index(g, value, labels=[tw.BATCH, None, None])


def alike(g, x, other):
    """x in the dtype of another tensor."""
    return x if x.spec.dtype == other.spec.dtype else g.cast(x, other.spec.dtype.name)


def heads(g, x):
    """`[batch, seq, width]` to `[batch, heads, seq, head]`."""
    return g.permute(g.reshape(x, (BATCH, -1, HEADS, HEAD)), (0, 2, 1, 3))


def torch_heads(x):
    return x.view(BATCH, -1, HEADS, HEAD).transpose(1, 2)


def attend(g, a, b, mask=None, **options):
    """Attention of tensors with heads in a dim of their own."""
    mask = None if mask is None else g.constant(mask, name="mask")
    q, kv = heads(g, a), heads(g, b)
    out = g.scaled_dot_product_attention(q, kv, kv, attn_mask=mask, **options)
    return g.reshape(g.permute(out, (0, 2, 1, 3)), (BATCH, SEQ, WIDTH))


def torch_attend(a, b, **options):
    q, kv = torch_heads(a), torch_heads(b)
    return functional.scaled_dot_product_attention(q, kv, kv, **options).transpose(1, 2).reshape(a.shape)


def grouped(g, a, b):
    """Two query heads share a KV head."""
    q, kv = heads(g, a), g.slice(heads(g, b), 1, 0, 1)
    out = g.scaled_dot_product_attention(q, kv, kv, attn_mask=g.constant(MASK, name="mask"))
    return g.reshape(g.permute(out, (0, 2, 1, 3)), (BATCH, SEQ, WIDTH))


def torch_grouped(a, b):
    q, kv = torch_heads(a), torch_heads(b)[:, :1].expand(-1, HEADS, -1, -1)
    mask = torch.tensor(MASK)
    out = functional.scaled_dot_product_attention(q, kv, kv, attn_mask=mask)
    return out.transpose(1, 2).reshape(a.shape)


def vector(g, size=WIDTH):
    return g.parameter([size], g.find("operand0").spec.dtype, name="vector")


def weight(g, *shape):
    return g.parameter(shape, g.find("operand0").spec.dtype, name="weight")


CALLS = {
    "add": (lambda g, a, b: a + g.sum(b, -1, keepdim=True), lambda a, b: a + b.sum(-1, keepdim=True)),
    "both broadcast": (
        lambda g, a, b: g.mul(g.mean(a, -1, keepdim=True), g.mean(b, 1, keepdim=True)),
        lambda a, b: a.mean(-1, keepdim=True) * b.mean(1, keepdim=True),
    ),
    "numbers": (lambda g, a, b: (1 - 2 * a) / 4 + 3 / positive(b), lambda a, b: (1 - 2 * a) / 4 + 3 / positive(b)),
    "sub and div": (lambda g, a, b: (a - b) / positive(b), lambda a, b: (a - b) / positive(b)),
    "numbers in other calls": (
        lambda g, a, b: g.where(g.maximum(0.1, a) > 0.5, a, 0.5) + g.minimum(b, 0.2),
        lambda a, b: a.clamp(min=0.5) + b.clamp(max=0.2),
    ),
    "sigmoid": (lambda g, a, b: g.sigmoid(a), lambda a, b: a.sigmoid()),
    "exp": (lambda g, a, b: g.exp(a), lambda a, b: a.exp()),
    "log and sqrt": (
        lambda g, a, b: g.log(positive(a)) + g.sqrt(positive(b)),
        lambda a, b: positive(a).log() + positive(b).sqrt(),
    ),
    "pow": (
        lambda g, a, b: a**3 + positive(a) ** 1.7 - positive(b) ** -1.5,
        lambda a, b: a**3 + positive(a) ** 1.7 - positive(b) ** -1.5,
    ),
    "maximum": (
        lambda g, a, b: g.maximum(a, b) + g.minimum(a, g.relu(a)),
        lambda a, b: torch.maximum(a, b) + torch.minimum(a, a.relu()),
    ),
    "where": (
        lambda g, a, b: g.where(g.greater(a, b), a, -b) + g.where(g.equal(a, b), b, a),
        lambda a, b: torch.where(a > b, a, -b) + torch.where(a == b, b, a),
    ),
    "abs": (lambda g, a, b: g.abs(a), lambda a, b: a.abs()),
    "softmax": (lambda g, a, b: g.softmax(a, 1), lambda a, b: a.softmax(1)),
    "log_softmax": (lambda g, a, b: g.log_softmax(a), lambda a, b: a.log_softmax(-1)),
    "sum": (
        lambda g, a, b: a + g.sum(a, 1, keepdim=True) + g.mean(b, (1, 2), keepdim=True),
        lambda a, b: a + a.sum(1, keepdim=True) + b.mean((1, 2), keepdim=True),
    ),
    "max": (
        lambda g, a, b: g.max(a, 1, keepdim=True) + g.max(g.relu(b), -1, keepdim=True),
        lambda a, b: a.amax(1, keepdim=True) + b.relu().amax(-1, keepdim=True),
    ),
    "reshape": (
        lambda g, a, b: g.reshape(g.exp(g.reshape(a, (BATCH, SEQ * 2, -1))), (BATCH, SEQ, WIDTH)),
        lambda a, b: a.exp(),
    ),
    "permute": (
        lambda g, a, b: g.permute(g.exp(g.permute(a, (0, 2, 1))), (0, 2, 1)),
        lambda a, b: a.exp(),
    ),
    "slices": (
        lambda g, a, b: g.concat([a[:, 2:5], b[:, None, :-3][:, 0]], 1),
        lambda a, b: torch.cat([a[:, 2:5], b[:, :3]], 1),
    ),
    "split": (
        lambda g, a, b: g.concat(g.split(a, 3, -1)[::-1], -1) * g.concat(g.split(b, [1, 5], 1)[::-1], 1),
        lambda a, b: torch.cat(a.split(3, -1)[::-1], -1) * torch.cat(b.split([1, 5], 1)[::-1], 1),
    ),
    "pad": (
        lambda g, a, b: g.pad(a, {1: (2, 1), 2: (0, 3)}, 1.5)[:, 1 : 1 + SEQ, 2 : 2 + WIDTH],
        lambda a, b: functional.pad(a, (0, 3, 2, 1), value=1.5)[:, 1 : 1 + SEQ, 2 : 2 + WIDTH],
    ),
    "index_select": (
        lambda g, a, b: g.index_select(a, 1, index(g, CHOSEN)),
        lambda a, b: a.index_select(1, torch.tensor(CHOSEN)),
    ),
    "gather": (
        lambda g, a, b: g.gather(a, 2, by_element(g)),
        lambda a, b: a.gather(2, torch.tensor(INDEX).long()),
    ),
    "scatter_add": (
        lambda g, a, b: g.scatter_add(a, 1, by_element(g), b),
        lambda a, b: a.scatter_add(1, torch.tensor(INDEX).long(), b),
    ),
    "scatter_add by a list": (
        lambda g, a, b: g.scatter_add(a, 1, index(g, CHOSEN[:3].copy()), b[:, :3]),
        lambda a, b: a.index_add(1, torch.tensor(CHOSEN[:3]), b[:, :3]),
    ),
    "one_hot": (
        lambda g, a, b: a * alike(g, g.one_hot(index(g, CHOSEN, storage="scalars"), WIDTH), a),
        lambda a, b: a * functional.one_hot(torch.tensor(CHOSEN).long(), WIDTH),
    ),
    "matmul": (
        lambda g, a, b: g.matmul(g.matmul(a, b, trans_b=True), b) + b @ g.matmul(a, b, trans_a=True),
        lambda a, b: (a @ b.mT) @ b + b @ (a.mT @ b),
    ),
    "a vector": (lambda g, a, b: a * vector(g) - b, lambda a, b, v: a * v - b),
    "one number": (lambda g, a, b: a * g.exp(vector(g, 1)), lambda a, b, v: a * v.exp()),
    "rows of a weight": (lambda g, a, b: a + weight(g, SEQ, WIDTH), lambda a, b, w: a + w),
    "one row of a weight": (lambda g, a, b: weight(g, 1, WIDTH) - a, lambda a, b, w: w - a),
    "a weight from the left": (lambda g, a, b: g.matmul(weight(g, SEQ, SEQ), a), lambda a, b, w: w @ a),
    "bce": (
        lambda g, a, b: g.binary_cross_entropy_with_logits(a, g.sigmoid(b), reduction="none"),
        lambda a, b: functional.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction="none"),
    ),
    "l1_loss": (
        lambda g, a, b: g.l1_loss(a, b, reduction="none"),
        lambda a, b: functional.l1_loss(a, b, reduction="none"),
    ),
    "conv2d": (
        lambda g, a, b: g.reshape(
            g.conv2d(g.reshape(a, IMAGE), weight(g, 2, 18), vector(g, 2), kernel_size=3, padding=1), a.shape
        ),
        lambda a, b, v, w: functional.conv2d(a.reshape(IMAGE), w.view(2, 2, 3, 3), v, padding=1).reshape(a.shape),
    ),
    "conv1d": (
        lambda g, a, b: g.reshape(
            g.conv1d(a, weight(g, 12, SEQ * 3), kernel_size=3, padding=2, stride=2, dilation=2), a.shape
        ),
        lambda a, b, w: functional.conv1d(
            a, w.view(12, SEQ, 3), padding=2, stride=2, dilation=2
        ).reshape(a.shape),
    ),
    "attention": (attend, torch_attend),
    "causal attention": (
        lambda g, a, b: attend(g, a, b, causal=True),
        lambda a, b: torch_attend(a, b, is_causal=True),
    ),
    "attention with a mask": (
        lambda g, a, b: attend(g, a, b, mask=MASK),
        lambda a, b: torch_attend(a, b, attn_mask=torch.tensor(MASK)),
    ),
    "attention across sequences": (
        lambda g, a, b: attend(g, a, b[:, :4]),
        lambda a, b: torch_attend(a, b[:, :4]),
    ),
    "causal attention across sequences": (
        lambda g, a, b: attend(g, a, b[:, :4], causal=True),
        lambda a, b: torch_attend(a, b[:, :4], is_causal=True),
    ),
    "grouped attention with a mask": (grouped, torch_grouped),
}  # fmt: skip
WHOLE_BATCH = {  # with one microbatch only
    "mse_loss": (lambda g, a, b: a + g.mse_loss(a, b), lambda a, b: a + functional.mse_loss(a, b)),
    "sum over the batch": (lambda g, a, b: b + g.sum(a, (0, 1)), lambda a, b: b + a.sum((0, 1))),
    "gather_batch": (
        lambda g, a, b: a + g.reshape(products(g, a, b), (BATCH, 1, 1)),
        lambda a, b: a + (a.flatten(1) @ b.flatten(1).T).log_softmax(-1).sum(-1)[:, None, None],
    ),
}


def products(g, a, b):
    """Every element of the batch, compared with all others."""
    flat = [g.reshape(x, (BATCH, SEQ * WIDTH)) for x in (a, b)]
    return g.sum(g.log_softmax(g.matmul(flat[0], g.gather_batch(flat[1]), trans_b=True)), -1)


@tw.layer
def called(g, a, b, *, name):
    """One call as a layer, so that many calls can be in one graph."""
    return {**CALLS, **WHOLE_BATCH}[name][0](g, a, b)


def build(names, label=None, dtype="f32"):
    """A graph with some calls. Its loss depends on the result of each, added to b, which is the output `y0`,
    `y1`, ...
    """
    g = tw.ComputeGraph("calls")
    x, t = (g.input([BATCH, SEQ, WIDTH], dtype, name=n, labels=[tw.BATCH, None, None]) for n in "xt")
    total = None
    for number, name in enumerate(names):
        a, b = (linear(g, x, f"{n}{number}", WIDTH, out_label=label) for n in ("a", "b"))
        y = called(g, a, b, path=str(number), name=name) + b
        g.output(y, f"y{number}")
        total = y * t if total is None else total + y * t
    g.loss(g.mean(total))
    return g
