"""The scratch memory that the planner gives a kernel is sufficient on every level, and not larger than needed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from kernel_checks import NUMPY, every_dtype, every_level, packed, rng

import tilewise as tw
from tilewise import models
from tilewise.core import ResourceError
from tilewise.formats import FORMATS
from tilewise.kernels.isa import run
from tilewise.kernels.quantised import quantised_bytes
from tilewise.kernels.table import scratch_bytes
from tilewise.models import llama


def shape_of(tile):
    if tile is None:
        return 0, 0
    return tile[1:] if isinstance(tile, tuple) else tile.shape


def array(dt, *shape):
    return (rng(1).standard_normal(shape) * 0.1).astype(np.float32).astype(NUMPY[dt])


def backward(dt, seq, heads, kv_heads, dim):
    q, kv = (
        [array(dt, seq, heads * dim) for _ in range(3)],
        [array(dt, seq, kv_heads * dim) for _ in range(2)],
    )
    lse = np.zeros((seq, heads), np.float32)
    outs = [np.empty_like(q[0]), *(np.empty_like(k) for k in kv)]
    return (
        "attention_backward",
        [*outs, q[0], q[1], lse, q[2], *kv, None, None],
        [seq, heads, kv_heads, dim, 1, 0, 0],
        [0.1, 0.0],
    )


def forward(dt, seq, heads, kv_heads, dim):
    q, kv = array(dt, seq, heads * dim), [array(dt, seq, kv_heads * dim) for _ in range(2)]
    outs = [np.empty_like(q), np.empty((seq, heads), np.float32)]
    return "attention", [*outs, q, *kv, None, None], [seq, heads, kv_heads, dim, 1, 0], [0.1, 0.0]


def product(dt, rows, width, inner, k_splits):
    x, w = array(dt, rows, inner), packed(array("f32", width, inner), dt)
    cuts = [inner * c // k_splits for c in range(k_splits + 1)]
    ints = [0, 1, k_splits, *(v for pair in pairwise(cuts) for v in pair)]
    return "matmul", [np.empty((rows, width), NUMPY[dt]), None, x, w], ints, []


def input_gradient(dt, rows, width, inner, k_splits):
    """The same with the weight untransposed."""
    x, w = array(dt, rows, inner), packed(array("f32", inner, width), dt)
    _, _, ints, _ = product(dt, 1, 1, inner, k_splits)
    return "matmul_dx", [np.empty((rows, width), NUMPY[dt]), None, x, w], ints, []


def weight_gradient(dt, tokens, rows, cols, batch_splits):
    """A weight's gradient over tokens, batch split by batch split, with embedding rows."""
    out = packed(np.zeros((rows, cols), np.float32), "f32")
    ids = (np.arange(tokens, dtype=np.int32) % rows)[:, None]
    tiles = [out, array(dt, tokens, rows), array(dt, tokens, cols), ids, array(dt, tokens, cols)]
    return "matmul_dw", tiles, [tokens // batch_splits, 0, 0, 0], []


def plain_weight_gradient(dt, tokens, rows, cols, batch_splits):
    """The same for a weight that is not an embedding."""
    base, tiles, ints, floats = weight_gradient(dt, tokens, rows, cols, batch_splits)
    return base, [*tiles[:3], None, None], ints, floats


def plain(dt, rows, width, inner):
    tiles = [np.empty((rows, width), NUMPY[dt]), array(dt, rows, inner), array(dt, inner, width)]
    return "gemm", tiles, [0, 0, 0, 0], []


def grouped(_, rows, width, inner, k_splits):
    """A grouped product of a quantised weight, which is bf16."""
    form = FORMATS["q4_1"]
    words = np.zeros(quantised_bytes(form, width, inner) // 4, np.int32)
    x, w = array("bf16", rows, inner), (words, width, -(-form.row_bytes(inner) // 4))
    _, _, ints, _ = product("f32", 1, 1, inner, k_splits)
    tiles = [np.empty((rows, width), NUMPY["bf16"]), None, x, w]
    return "matmul_quantised", tiles, [form.number, 1, *ints], []


CALLS = [
    (backward, (200, 6, 1, 64)),
    (backward, (65, 4, 4, 128)),
    (backward, (640, 12, 2, 34)),
    (forward, (200, 8, 2, 64)),
    (forward, (70, 2, 1, 256)),
    (product, (2100, 40, 9000, 8)),
    (product, (16, 64, 300, 64)),
    (product, (600, 1100, 6200, 8)),  # as much state between windows as there may be
    (input_gradient, (2100, 96, 1200, 8)),
    (input_gradient, (600, 1100, 6200, 8)),
    (weight_gradient, (4096, 64, 300, 16)),
    (weight_gradient, (512, 33, 40, 512)),
    (plain_weight_gradient, (1024, 1100, 40, 4)),
    (plain_weight_gradient, (4096, 1100, 600, 16)),
    (plain_weight_gradient, (2048, 1100, 2100, 128)),
    (plain, (2030, 70, 900)),
    (plain, (1, 320_000, 2)),  # as many panels at a time as there may be
    (grouped, (300, 96, 8192, 64)),
]


@pytest.mark.slow
@every_level
@every_dtype
@pytest.mark.parametrize("make,sizes", CALLS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_kernel_runs_in_its_planned_scratch(make, sizes, dt, isa):
    """In exactly the planned amount; a step that does not fit would be an error."""
    base, tiles, ints, floats = make(dt, *sizes)
    kernel = f"{base}_{'bf16' if make is grouped else dt}"
    promised = scratch_bytes(kernel, ints, [shape_of(tile) for tile in tiles])
    run(kernel, tiles, ints, floats, isa=isa, scratch_bytes=promised)


@every_level
def test_too_little_scratch_is_detected(isa):
    """The twin: a quarter of a long sequence's need is rejected before a byte beyond it is accessed."""
    base, tiles, ints, floats = backward("f32", 640, 2, 1, 64)
    promised = scratch_bytes(f"{base}_f32", ints, [shape_of(tile) for tile in tiles])
    with pytest.raises(ResourceError, match="scratch"):
        run(f"{base}_f32", tiles, ints, floats, isa=isa, scratch_bytes=promised // 4)


def test_a_long_sequences_scratch_is_planned():
    """A plan over 32,000 tokens gives its workers the scratch of attention's backward pass, and counts it."""
    model = llama.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=32_000,
    )
    graph = tw.ComputeGraph("long")
    models.build_training_graph(graph, model, 1, 32_000, "bf16")
    graph.optimize(tw.optim.AdamW())
    plan = graph.plan(workers_per_device=2)
    backward = scratch_bytes("attention_backward_bf16", [32_000, 8, 1, 64, 1, 0, 0], [])
    assert plan.scratch_bytes == backward > 100 << 20
    usage = plan.estimate_memory_usage()[0]
    assert usage["scratch"] == 2 * backward
    assert usage["total"] == plan.arena_bytes[0] + usage["scratch"] + usage["signals"] + usage["engine"]
