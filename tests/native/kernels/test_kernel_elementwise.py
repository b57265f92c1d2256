"""Elementwise kernels, casts, copies, look-ups and trees against fp64, PyTorch and exact results."""

import ml_dtypes
import numpy as np
import torch
from kernel_checks import (
    NUMPY,
    array,
    assert_close,
    assert_same_bits,
    bits,
    empty,
    every_dtype,
    every_level,
    in_turn,
    packed,
    random,
    rng,
    tensor,
)

from tilewise.kernels import reference
from tilewise.kernels.isa import run

SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        3e38,
        -3e38,
        1e-38,
        1e-45,
        88.8,
        -87.5,
        -104.0,
        1.00390625,
        1.01171875,
    ]
)
every_width = in_turn("d", [1, 16, 45, 150])


def ulps(y, exact):
    want = exact.astype(np.float32)
    distance = np.abs(y.astype(np.float64) - exact)
    return float((distance / np.spacing(np.abs(want))).max())


@every_level
def test_exp_and_log_are_within_two_ulp(isa):
    """exp and log over their ranges, and at the edges the values of the C library."""
    for name, x in (
        ("exp", np.linspace(-87, 88.7, 200001)),
        ("log", np.concatenate([np.geomspace(1e-37, 3e38, 100001), np.linspace(0.5, 2, 100000)])),
    ):
        x = x.astype(np.float32)[None, :]
        y = np.empty_like(x)
        run(f"{name}_f32", [y, x], isa=isa)
        assert ulps(y, reference.REFERENCES[name](x)) <= 2
    edges = np.array([[-np.inf, -200, -0.0, 89, np.inf, np.nan]], np.float32)
    y = np.empty_like(edges)
    run("exp_f32", [y, edges], isa=isa)
    np.testing.assert_array_equal(y, np.array([[0, 0, 1, np.inf, np.inf, np.nan]], np.float32))
    edges = np.array([[0, -0.0, -1, 1, np.inf, np.nan]], np.float32)
    run("log_f32", [y, edges], isa=isa)
    np.testing.assert_array_equal(y, np.array([[-np.inf, -np.inf, np.nan, 0, np.inf, np.nan]], np.float32))
    tiny = np.array([[1e-40, 1e-45]], np.float32)
    small = np.empty_like(tiny)
    run("log_f32", [small, tiny], isa=isa)
    np.testing.assert_allclose(small, np.log(tiny.astype(np.float64)), rtol=3e-7)


@every_level
@every_dtype
@every_width
def test_elementwise_ops(isa, dt, d):
    """Arithmetic, activations, gates and losses, forward and backward."""
    gen = rng(d)
    a, b, c, out, second = *(random(gen, 6, d, dt, 3.0) for _ in range(3)), empty(6, d, dt), empty(6, d, dt)
    positive = (np.abs(c.astype(np.float32)) + 0.25).astype(a.dtype)
    for name, inputs, floats in (
        ("add", [a, b], []),
        ("multiply", [a, b], []),
        ("scale", [a], [1.7]),
        ("silu", [a], []),
        ("silu_backward", [a, b], []),
        ("silu_gate", [a, b], []),
        ("relu", [a], []),
        ("relu_backward", [a, b], []),
        ("gelu", [a], []),
        ("gelu_backward", [a, b], []),
        ("gelu_tanh", [a], []),
        ("gelu_tanh_backward", [a, b], []),
        ("gelu_tanh_gate", [a, b], []),
        ("tanh", [a], []),
        ("tanh_backward", [a, b], []),
        ("softcap", [a], [2.5]),
        ("softcap_backward", [a, b], [2.5]),
        ("subtract", [a, b], []),
        ("divide", [a, b], []),
        ("shift", [a], [1.25]),
        ("maximum", [a, b], []),
        ("minimum", [a, b], []),
        ("maximum_backward", [a, b, c], []),
        ("greater", [a, b], []),
        ("equal", [a, b], []),
        ("select", [(a.astype(np.float32) > 0).astype(a.dtype), b, c], []),
        ("sigmoid", [a], []),
        ("sigmoid_backward", [a, b], []),
        ("sqrt", [positive], []),
        ("power", [a], [3.0]),
        ("power", [positive], [-2.5]),
        ("power", [positive], [1.7]),
        ("exp", [a], []),
        ("log", [positive], []),
        ("abs", [a], []),
        ("abs_backward", [a, b], []),
        ("bce_with_logits", [a, positive], []),
        ("bce_with_logits_backward", [a, b, positive], []),
        ("log_softmax", [a], []),
        ("log_softmax_backward", [a, b], []),
    ):
        run(f"{name}_{dt}", [out, *inputs], floats=floats, isa=isa)
        assert_close(out, reference.REFERENCES[name](*inputs, *floats), dt, bound=1e-6)
    for name in ("silu_gate_backward", "gelu_tanh_gate_backward"):
        run(f"{name}_{dt}", [out, second, a, b, c], isa=isa)
        for got, want in zip((out, second), reference.REFERENCES[name](a, b, c), strict=True):
            assert_close(got, want, dt, bound=1e-6)


@every_level
@every_dtype
@every_width
def test_add_bias(isa, dt, d):
    """One vector added to every row, also in place."""
    gen = rng(d)
    x, bias, out = random(gen, 6, d, dt, 3.0), random(gen, 1, d, dt), empty(6, d, dt)
    run(f"add_bias_{dt}", [out, x, bias], isa=isa)
    assert_close(out, reference.REFERENCES["add_bias"](x, bias), dt, array(tensor(x) + tensor(bias)))
    run(f"add_bias_{dt}", [x, x, bias], isa=isa)
    assert_same_bits(x, out)


@every_level
def test_activations_of_large_values(isa):
    """Where an activation is x, 0 or a constant, it is exact for any size of x, and so is its derivative."""
    x = np.array([[1e-30, 20.0, 1e4, 3e38, -20.0, -1e4, -3e38]], np.float32)
    one, out = np.ones_like(x), np.empty_like(x)
    for name, near in (("gelu", 0.5), ("gelu_tanh", 0.5), ("tanh", 1.0), ("softcap", 1.0)):
        run(f"{name}_f32", [out, x], floats=[30.0] if name == "softcap" else [], isa=isa)
        np.testing.assert_allclose(out[0, 0], near * x[0, 0], rtol=1e-6)
        right, left = {"tanh": (1, -1), "softcap": (30, -30)}.get(name, (x[0, 2:4], 0))
        np.testing.assert_array_equal(out[0, 2:4], right)
        np.testing.assert_array_equal(out[0, 5:], left)
        operand = out if name == "tanh" else x
        run(f"{name}_backward_f32", [out, one, operand], floats=[30.0] if name == "softcap" else [], isa=isa)
        np.testing.assert_allclose(out[0, 0], near, rtol=1e-6)
        np.testing.assert_array_equal(out[0, 2:4], 1 if name.startswith("gelu") else 0)
        np.testing.assert_array_equal(out[0, 5:], 0)


@every_level
@every_dtype
def test_relu_of_special_values(isa, dt):
    """NaN and infinity stay, both zeros give 0, and the gradient is zero where x is not above 0."""
    x, one = SPECIAL[None].astype(NUMPY[dt]), np.ones((1, SPECIAL.size), NUMPY[dt])
    y, dx = np.empty_like(x), np.empty_like(x)
    run(f"relu_{dt}", [y, x], isa=isa)
    np.testing.assert_array_equal(y.astype(np.float32), array(tensor(x).relu()).astype(np.float32))
    run(f"relu_backward_{dt}", [dx, one, x], isa=isa)
    np.testing.assert_array_equal(dx.astype(np.float32), (x.astype(np.float32) > 0).astype(np.float32))


PYTORCH = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu_gate": lambda gate, x: torch.nn.functional.silu(gate) * x,
}


@every_dtype
@in_turn("name", PYTORCH)
def test_activations_against_pytorch(dt, name):
    """Forward and gradients are as accurate as PyTorch's."""
    gen = rng(8)
    inputs = [random(gen, 40, 50, dt, 2.0) for _ in range(1 + (name == "silu_gate"))]
    dy, y, grads = random(gen, 40, 50, dt), empty(40, 50, dt), [empty(40, 50, dt) for _ in inputs]
    tensors = [tensor(x).requires_grad_() for x in inputs]
    peer = PYTORCH[name](*tensors)
    peer.backward(tensor(dy))
    run(f"{name}_{dt}", [y, *inputs])
    run(f"{name}_backward_{dt}", [*grads, dy, *inputs])
    assert_close(y, reference.REFERENCES[name](*inputs), dt, array(peer))
    exact = reference.REFERENCES[f"{name}_backward"](dy, *inputs)
    for got, want, of in zip(grads, exact if len(inputs) > 1 else [exact], tensors, strict=True):
        assert_close(got, want, dt, array(of.grad))


@every_level
def test_cast_rounds_to_nearest_even_and_keeps_nan(isa):
    """Every 16-bit pattern survives a round trip; rounding equals ml_dtypes, including denormals."""
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)[None, :]
    wide, back = np.empty(every.shape, np.float32), np.empty_like(every)
    run("cast_bf16_f32", [wide, every], isa=isa)
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    run("cast_f32_bf16", [back, wide], isa=isa)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(bits(back)[number], bits(every)[number])
    assert np.isnan(back.astype(np.float32)[~number]).all()
    gen = rng(1)
    x = gen.integers(0, 1 << 32, (7, 1001), dtype=np.uint32)
    lost = np.array(
        [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32
    )  # rounded as numbers, none stays NaN
    for row, lane in enumerate((3, 12)):  # alone among the 16 of a vector, in either half
        x[row, lane : 16 * len(lost) : 16] = lost
    x = x.view(np.float32)
    y = np.empty(x.shape, ml_dtypes.bfloat16)
    run("cast_f32_bf16", [y, x], isa=isa)
    number = ~np.isnan(x)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits(y)[number], bits(expected)[number])
    assert np.isnan(y.astype(np.float32)[~number]).all()


@every_level
@every_dtype
def test_special_values_propagate(isa, dt):
    """Infinities and NaN propagate as in IEEE arithmetic."""
    x = SPECIAL.astype(np.float32).astype(NUMPY[dt])[None, :]
    y = np.empty_like(x)
    run(f"add_{dt}", [y, x, x], isa=isa)
    with np.errstate(all="ignore"):
        doubled = x + x
    np.testing.assert_array_equal(bits(y)[~np.isnan(y)], bits(doubled)[~np.isnan(y)])
    np.testing.assert_array_equal(np.isnan(y), np.isnan(doubled))
    run(f"silu_{dt}", [y, x], isa=isa)
    values = y.astype(np.float32)[0]
    assert values[4] == np.inf
    assert np.isnan(values[6])
    assert np.isnan(values[5])  # -inf times 0, as in PyTorch


@every_dtype
@in_turn("name", ["copy", "copy_pairs"])
def test_copies_keep_bits(dt, name):
    """Copies change no bit, including NaN payloads, between different strides."""
    gen = rng(3)
    kind = {4: np.uint32, 2: np.uint16}[np.dtype(NUMPY[dt]).itemsize]
    x = gen.integers(0, np.iinfo(kind).max, (5, 37), dtype=kind)
    outs = [np.zeros((5, 40), kind)[:, :37] for _ in range(2)]
    if name == "copy":
        run(f"copy_{dt}", [outs[0].view(NUMPY[dt]), x.view(NUMPY[dt])])
        np.testing.assert_array_equal(outs[0], x)
    else:
        run(
            f"copy_pairs_{dt}",
            [outs[0].view(NUMPY[dt]), x.view(NUMPY[dt]), outs[1].view(NUMPY[dt]), outs[0].view(NUMPY[dt])],
        )
        np.testing.assert_array_equal(outs[1], x)


# elements of four bytes of which a tile goes past the caches (elementwise.cc: kLongCopy)
LONG = (140_001, 131_072)


@every_level
@every_dtype
@in_turn("begin", [0, 1, 15, 16])
def test_long_copies_keep_bits(isa, dt, begin):
    """Non-temporal copies are complete from any to any alignment, and write nothing else."""
    kind = {4: np.uint32, 2: np.uint16}[np.dtype(NUMPY[dt]).itemsize]
    for count in LONG:
        x = rng(count).integers(0, np.iinfo(kind).max, (1, 4 // kind().itemsize * count), dtype=kind)
        memory = np.full((1, x.shape[1] + 2 * 64), 7, kind)
        out = memory[:, begin : begin + x.shape[1]]
        run(f"copy_pairs_{dt}", [out.view(NUMPY[dt]), x.view(NUMPY[dt])], isa=isa)
        np.testing.assert_array_equal(out, x)
        assert (memory[:, :begin] == 7).all() and (memory[:, begin + x.shape[1] :] == 7).all()


@every_level
@in_turn("begin", [0, 1, 16])
@in_turn("inputs", [2, 3])
def test_long_sums_keep_bits(isa, inputs, begin):
    """Non-temporal sums have the same bits as others, also with an in-place residual, and write nothing else."""
    gen = rng(inputs)
    for rows, cols in ((513, 272), (600, 219)):
        parts = [random(gen, rows, cols) for _ in range(inputs)]
        memory = np.full(rows * cols + 2 * 16, 7, np.float32)
        out = memory[begin : begin + rows * cols].reshape(rows, cols)
        out[:] = random(gen, rows, cols)
        expected = out.copy()
        for r in range(rows):  # a row alone is short
            run(
                "tree_add_f32",
                [expected[r : r + 1], expected[r : r + 1], *(p[r : r + 1] for p in parts)],
                isa=isa,
            )
        run("tree_add_f32", [out, out, *parts], isa=isa)
        assert_same_bits(out, expected)
        assert (memory[:begin] == 7).all() and (memory[begin + rows * cols :] == 7).all()


@in_turn("dtype", ["f64", "i32"])
def test_copies_of_other_dtypes(dtype):
    """Eight-byte elements and ids."""
    x = (1e8 * rng().standard_normal((3, 5))).astype({"f64": np.float64, "i32": np.int32}[dtype])
    out = np.zeros_like(x)
    run(f"copy_pairs_{dtype}", [out, x])
    assert (out == x).all()


@every_dtype
@in_turn("d", [7, 64])
def test_embedding_of_a_shard(dt, d):
    """Ids of other shards give rows of +0; own ids give the table's bits."""
    gen = rng(d)
    table, out = random(gen, 45, d, dt), empty(9, d, dt)
    ids = np.array([[99], [100], [131], [132], [144], [145], [0], [120], [2**31 - 1]], np.int32)
    run(f"embedding_{dt}", [out, ids, packed(table, dt)], [100])
    assert_same_bits(out, reference.embedding(ids, table, 100))


@every_level
@every_dtype
def test_spread(isa, dt):
    """One number in every element, rounded once."""
    x, out = np.array([[1 / 3]], np.float32), empty(5, 37, dt)
    run(f"spread_{dt}", [out, x], isa=isa)
    assert_same_bits(out, reference.REFERENCES["spread"](x, 5, 37).astype(np.float32).astype(NUMPY[dt]))


@every_dtype
def test_gather_rows_and_kv_write(dt):
    """Rows are selected and stored by index; negative slots are skipped."""
    gen = rng(4)
    x, index = random(gen, 12, 33, dt), np.array([[3], [3], [11], [0]], np.int32)
    out = empty(4, 33, dt)
    run(f"gather_rows_{dt}", [out, x, index])
    assert_same_bits(out, reference.gather_rows(x, index))
    numbers, picked = np.array([[7], [-1], [3], [2]], np.int32), np.zeros((3, 1), np.int32)
    run("gather_rows_i32", [picked, numbers, np.array([[3], [0], [3]], np.int32)])
    assert picked[:, 0].tolist() == [2, 7, 2]
    slots = np.array([[2], [-1], [0], [8]], np.int32)
    for block_size, head_dim in ((1, 33), (3, 11), (9, 3)):
        cache = np.ascontiguousarray(random(gen, 9, 33, dt))
        want = reference.kv_write(cache, x[:4], slots, block_size, head_dim)
        run(f"kv_write_{dt}", [cache, x[:4], slots], [block_size, head_dim])
        assert_same_bits(cache, want)


@every_level
@every_dtype
@in_turn("inputs", [1, 2, 3, 7, 8])
def test_tree_add(isa, dt, inputs):
    """The fixed tree over partial values, the residual after the root, one cast."""
    gen = rng(inputs)
    parts, residual, out = (
        [random(gen, 5, 21) for _ in range(inputs)],
        random(gen, 5, 21, dt),
        empty(5, 21, dt),
    )
    run(f"tree_add_{dt}", [out, residual, *parts], isa=isa)
    assert_close(out, reference.tree_add(residual, parts), dt, bound=1e-6)
    level = parts
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + ([level[-1]] if len(level) % 2 else [])
    if inputs in (1, 2, 4, 8):
        assert_same_bits(out, (level[0] + residual.astype(np.float32)).astype(NUMPY[dt]))


@every_level
@in_turn("inputs", [1, 2, 3, 8])
def test_tree_sum_of_rounded_inputs(isa, inputs):
    """The same bits as tree_add of the inputs in fp32, with gaps between rows and without."""
    gen = rng(inputs)
    parts = [random(gen, 5, 21, "bf16") for _ in range(inputs)]
    expected, out, wide = empty(5, 21, "bf16"), empty(5, 21, "bf16"), empty(5, 40, "bf16")
    run("tree_add_bf16", [expected, None, *(np.float32(part) for part in parts)], isa=isa)
    run("tree_sum_bf16", [out, *parts], isa=isa)
    run("tree_sum_bf16", [wide[:, :21], *parts], isa=isa)
    assert_same_bits(out, expected)
    assert_same_bits(np.ascontiguousarray(wide[:, :21]), expected)
    assert_close(out, reference.REFERENCES["tree_sum"](parts), "bf16", bound=1e-6)


@every_level
@every_dtype
def test_tree_max_and_min(isa, dt):
    """Exact maxima and minima, with gaps between rows and without."""
    gen = rng(6)
    parts = [random(gen, 5, 21, dt) for _ in range(3)]
    for out in (empty(5, 21, dt), empty(5, 40, dt)[:, :21]):
        run(f"tree_max_{dt}", [out, None, *parts], isa=isa)
        np.testing.assert_array_equal(np.float64(out), reference.tree_max(parts))
        run(f"tree_min_{dt}", [out, *parts], isa=isa)
        np.testing.assert_array_equal(np.float64(out), reference.tree_min(parts))


@every_level
def test_tree_or(isa):
    """A bitwise or combines rows that only one device has."""
    gen = rng(6)
    for dt in ("f32", "bf16"):
        x = random(gen, 4, 21, dt).copy()
        own = [np.where(np.arange(4)[:, None] % 2 == i, x, np.zeros((), x.dtype)) for i in range(2)]
        joined = empty(4, 21, dt)
        run(f"tree_or_{dt}", [joined, None, *own], isa=isa)
        assert_same_bits(joined, x)
        assert_same_bits(bits(joined), reference.tree_or([bits(o) for o in own]))
