"""Calls of the attention kernels, their references, and PyTorch with explicit mask and cap.

A shape is (positions of a sequence, sequences, query heads, KV heads, head size).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from kernel_checks import NUMPY, empty, random, rng, tensor

from tilewise.kernels import reference
from tilewise.kernels.isa import run


@dataclass(frozen=True)
class Scores:
    """Options of scores; 0 and None mean none."""

    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    lengths: tuple[int, ...] | None = None
    first: tuple[int, ...] | None = None  # of every row

    @property
    def tiles(self):
        """Lengths and first positions as operands."""
        return [None if x is None else np.array(x, np.int32)[:, None] for x in (self.lengths, self.first)]

    @property
    def named(self):
        """The options as the reference takes them."""
        lengths, first = self.tiles
        return {"window": self.window, "softcap": self.softcap, "lengths": lengths, "first": first}

    def seen(self, seq, count):
        """`[sequences, 1, queries, positions]`: which positions a query sees."""
        query, position = torch.arange(seq)[:, None], torch.arange(seq)[None, :]
        if self.causal:
            mask = (position <= query) & (position > query - (self.window or seq))
            first = torch.tensor(self.first or (0,) * (seq * count)).view(count, 1, seq, 1)
            return mask & (position >= first)
        lengths = torch.tensor(self.lengths or (seq,) * count)
        return (position[None] < lengths[:, None, None]).expand(count, seq, seq)[:, None]

    def positions(self, query):
        """The positions that a causal row sees."""
        return range(max(0, query - self.window + 1) if self.window else 0, query + 1)

    def padding(self, seq, count):
        """`[sequences, 1, queries, 1]`: rows at or beyond a sequence's length."""
        lengths = torch.tensor(self.lengths or (seq,) * count)
        return (torch.arange(seq)[None] >= lengths[:, None])[:, None, :, None]


CAUSAL = Scores()


def operands(shape, dt, seed=0, scale=1.0):
    seq, count, heads, kv_heads, dim = shape
    gen = rng(seed)
    return tuple(random(gen, seq * count, width * dim, dt, scale) for width in (heads, kv_heads, kv_heads))


def forward(shape, dt, q, k, v, isa="", scores=CAUSAL):
    seq, _, heads, kv_heads, dim = shape
    out, lse = empty(len(q), heads * dim, dt), empty(len(q), heads)
    run(
        f"attention_{dt}",
        [out, lse, q, k, v, *scores.tiles],
        [seq, heads, kv_heads, dim, scores.causal, scores.window],
        [dim**-0.5, scores.softcap],
        isa=isa,
    )
    return out, lse


def backward(shape, dt, dout, out, lse, q, k, v, isa="", scores=CAUSAL, dkv_is_f32=False):
    seq, _, heads, kv_heads, dim = shape
    kind = "f32" if dkv_is_f32 else dt
    grads = [empty(*q.shape, dt), empty(*k.shape, kind), empty(*v.shape, kind)]
    run(
        f"attention_backward_{dt}",
        [*grads, dout, out, lse, q, k, v, *scores.tiles],
        [seq, heads, kv_heads, dim, scores.causal, dkv_is_f32, scores.window],
        [dim**-0.5, scores.softcap],
        isa=isa,
    )
    return grads


def both_ways(shape, dt, q, k, v, dout, isa="", scores=CAUSAL):
    out, lse = forward(shape, dt, q, k, v, isa, scores)
    return [out, lse, *backward(shape, dt, dout, out, lse, q, k, v, isa, scores)]


def exact(shape, q, k, v, dout, scores=CAUSAL):
    """The same in fp64."""
    seq, _, heads, kv_heads, dim = shape
    sizes = seq, heads, kv_heads, dim, scores.causal, dim**-0.5
    results = reference.attention(q, k, v, *sizes, **scores.named)
    return [*results, *reference.attention_backward(dout, q, k, v, *sizes, **scores.named)]


def torch_attention(shape, q, k, v, scores=CAUSAL):
    """PyTorch in the operands' dtype, with an explicit mask or step by step with a cap: output and operands."""
    seq, count, heads, kv_heads, dim = shape
    batch_splits = [tensor(x).requires_grad_() for x in (q, k, v)]
    widths = (heads, kv_heads, kv_heads)
    split = [x.view(count, seq, w, dim).transpose(1, 2) for x, w in zip(batch_splits, widths, strict=True)]
    split[1:] = [x.repeat_interleave(heads // kv_heads, 1) for x in split[1:]]
    seen = scores.seen(seq, count)
    if scores.softcap:
        bent = scores.softcap * torch.tanh(split[0] @ split[1].mT * dim**-0.5 / scores.softcap)
        out = bent.masked_fill(~seen, -torch.inf).softmax(-1) @ split[2]
    else:
        out = torch.nn.functional.scaled_dot_product_attention(*split, attn_mask=seen)
    out = out.masked_fill(scores.padding(seq, count), 0)
    return out.transpose(1, 2).reshape(count * seq, heads * dim), batch_splits


def paged(dt, k, v, block_size, gen, dim):
    """A cache of shuffled pages full of NaN outside the sequence, and its block table."""
    blocks = -(-len(k) // block_size) + 3
    order, places = gen.permutation(blocks), np.arange(len(k))
    slots = (order[places // block_size] * block_size + places % block_size).astype(np.int32)
    empty_caches = [np.full((blocks * block_size, x.shape[1]), np.nan).astype(NUMPY[dt]) for x in (k, v)]
    caches = [
        reference.kv_write(c, x, slots, block_size, dim) for c, x in zip(empty_caches, (k, v), strict=True)
    ]
    return caches, order[None, :].astype(np.int32)


def run_paged(
    shape, dt, q, caches, table, positions, isa="", scores=CAUSAL, block_size=64, sequence=None, row_begin=0
):
    _, _, heads, kv_heads, dim = shape
    out, positions = empty(*q.shape, dt), np.asarray(positions, np.int32)[:, None]
    owner = np.zeros_like(positions) if sequence is None else np.asarray(sequence, np.int32)[:, None]
    run(
        f"attention_paged_{dt}",
        [out, q, *caches, positions, owner, table],
        [block_size, heads, kv_heads, dim, scores.window],
        [dim**-0.5, scores.softcap],
        isa=isa,
        row_begin=row_begin,
    )
    return out
