"""Tensor calls: the same bits for any tiles, and groups whose tasks order themselves by the data."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native.tile.table_tiles import (
    SPECS,
    arrays_of,
    attributes_of,
    in_call_order,
    named_tiles,
    optional_tiles,
)
from tilewise import tensor, tile
from tilewise.core.errors import ConfigError, ShapeError
from tilewise.runtime import Runtime
from tilewise.tensor import Tensor

NAMES = [name for name, spec in SPECS.items() if spec.each]


@pytest.fixture(scope="module")
def runtime():
    """A runtime with one worker."""
    with Runtime(num_workers=1, window=256) as rt:
        yield rt


def results(runtime, name, module, **keywords):
    """All operands after a call of the whole operands, or of their tiles."""
    arrays = arrays_of(name, seed=2)
    with runtime.registered(*(array for *_, array in arrays)) as buffers:
        tiles = named_tiles(name, arrays, buffers)
        call = getattr(module, SPECS[name].base)
        named = {**attributes_of(name), **optional_tiles(name, tiles), **keywords}
        group = call(*in_call_order(name, tiles), **named)
        if group is not None:
            group.wait_all()
    return [array.tobytes() for *_, array in arrays], group


@pytest.mark.parametrize("name", NAMES)
def test_any_tiles_give_the_bits_of_the_whole_call(runtime, name):
    """Every kernel that may be divided, with drawn tiles."""
    whole, _ = results(runtime, name, tile)

    @settings(max_examples=6, deadline=None, database=None)
    @given(st.integers(1, 7), st.integers(1, 45))
    def check(rows, cols):
        divided, group = results(runtime, name, tensor, tile=(rows, cols))
        assert divided == whole
        assert rows > 5 or len(group) > 1

    check()
    divided, _ = results(runtime, name, tensor)  # automatic tiles
    assert divided == whole


def product(runtime, a, b, out, steps, **flags):
    c = out.copy()
    with runtime.registered(a, b, c) as (ha, hb, hc):
        if steps is None:
            tile.gemm(ha, hb, hc, **{"trans_a": 0, "trans_b": 0, "accumulate": 0, **flags})
        else:
            group = tensor.matmul(ha, hb, Tensor(hc, steps), **flags)
            group.wait_all()
            assert len(group) == -(-c.shape[0] // steps[0]) * -(-c.shape[1] // steps[1])
    return c


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.tuples(*[st.integers(1, 70)] * 3),
    st.tuples(*[st.integers(1, 80)] * 2),
    st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    *[st.booleans()] * 4,
)
def test_products_have_the_same_bits_for_any_tiles(
    runtime, sizes, steps, dtype, trans_a, trans_b, accumulate, wide
):
    """The whole inner dim is contracted by one task, so the order of additions is one."""
    m, k, n = sizes
    rng = np.random.default_rng(m * 71 + k)
    a = rng.standard_normal((k, m) if trans_a else (m, k)).astype(dtype)
    b = rng.standard_normal((n, k) if trans_b else (k, n)).astype(dtype)
    out = rng.standard_normal((m, n)).astype(np.float32 if wide else dtype)
    accumulate = accumulate and out.dtype == np.float32
    flags = {"trans_a": trans_a, "trans_b": trans_b, "accumulate": accumulate}
    whole, divided = product(runtime, a, b, out, None, **flags), product(runtime, a, b, out, steps, **flags)
    assert whole.tobytes() == divided.tobytes()
    exact = (a.T if trans_a else a).astype(np.float64) @ (b.T if trans_b else b).astype(np.float64)
    exact = exact + (out.astype(np.float64) if accumulate else 0)
    tolerance = 1e-4 if out.dtype == np.float32 else 0.06
    assert np.allclose(divided.astype(np.float64), exact, rtol=tolerance, atol=tolerance * k)
    divided.reshape(-1).view(np.uint8)[0] ^= 1  # the twin
    assert whole.tobytes() != divided.tobytes()


def test_calls_order_themselves_by_their_data(runtime):
    """A chain of calls with different tiles needs no wait in between."""
    rng = np.random.default_rng(0)
    x, h, y, bias = (rng.standard_normal(s).astype(np.float32) for s in [(60, 50), (60, 40), (60, 40), (40,)])
    w = rng.standard_normal((50, 40)).astype(np.float32)
    with runtime.registered(x, h, y, bias, w) as (hx, hh, hy, hbias, hw):
        for _ in range(3):
            tensor.matmul(hx, hw, hh, tile=(16, 16))
            tensor.add_bias(hh, hbias, hy, tile=(7, 40))
            tensor.relu(hy, hh, tile=(60, 9))
            last = tensor.softmax(Tensor(hh, (13, 5)), hy, name="rows")
        last.wait_all()
        assert len(last) == 5  # softmax needs whole rows
    exact = np.maximum(x @ w + bias, 0)
    exact = np.exp(exact - exact.max(1, keepdims=True))
    assert np.allclose(y, exact / exact.sum(1, keepdims=True), atol=1e-5)


def test_invalid_calls_are_rejected(runtime):
    """Sizes are checked before the first tile is submitted."""
    x, wide, cube = (
        np.zeros((8, 6), np.float32),
        np.zeros((8, 7), np.float32),
        np.zeros((2, 2, 2), np.float32),
    )
    half = np.zeros((8, 6), ml_dtypes.bfloat16)
    before = runtime.stats().num_submitted
    with runtime.registered(x, wide, cube, half) as (hx, hwide, hcube, hhalf):
        cases = [
            (lambda: tensor.relu(hx, hwide), ShapeError, "sizes of one name"),
            (lambda: tensor.relu(hx, hcube), ShapeError, "one or two dimensions"),
            (lambda: tensor.relu(hx, hhalf), ConfigError, "must be"),
            (lambda: tensor.relu(hx, hx, tile=(0, 4)), ShapeError, "1 or more"),
            (lambda: Tensor(hx, (4,)), ShapeError, "1 or more"),
            (lambda: Tensor(hcube), ShapeError, "one or two dimensions"),
            (lambda: tensor.matmul(hx, hx, hx), ShapeError, "inner and outer sizes"),
            (lambda: tensor.matmul(hcube, hx, hx), ShapeError, "two dimensions"),
        ]
        for call, kind, message in cases:
            with pytest.raises(kind, match=message):
                call()
    assert runtime.stats().num_submitted == before


@pytest.mark.parametrize("columns", [True, False])
def test_automatic_tiles_cover_the_matrix(columns):
    """At least 32 KiB per tile unless the matrix is smaller, and whole rows where columns may not be divided."""
    for rows, cols in [(1, 1), (1, 1 << 20), (4096, 64), (3, 5), (1 << 16, 3), (256, 4096)]:
        step, width = tensor.loops.automatic_steps(rows, cols, 4, columns=columns)
        assert 1 <= step <= rows and 1 <= width <= cols and (columns or width == cols)
        assert step * width * 4 >= min(1 << 15, rows * cols * 4)
