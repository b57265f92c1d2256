"""Attention over windows, with capped scores and given lengths, against fp64 and PyTorch."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from attention_calls import (
    Scores,
    backward,
    both_ways,
    exact,
    forward,
    operands,
    paged,
    run_paged,
    torch_attention,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import (
    LEVELS,
    array,
    assert_close,
    assert_same_bits,
    bits,
    every_dtype,
    every_level,
    in_turn,
    random,
    rng,
    tensor,
)

SEQ = 150
WINDOWS = [5, 63, 64, 65, SEQ, (1 << 31) - 1]
CASES = [
    *(Scores(window=window) for window in WINDOWS),
    Scores(softcap=0.7),
    Scores(softcap=50.0, window=70),
    Scores(causal=False, softcap=2.0),
    Scores(causal=False, lengths=(1, SEQ)),
    Scores(causal=False, lengths=(64, 65)),
    Scores(causal=False, lengths=(63, 129), softcap=5.0),
]
every_case = pytest.mark.parametrize("scores", CASES, ids=str)


@every_level
@every_dtype
@every_case
def test_forward_and_backward(isa, dt, scores):
    """Output, lse and gradients with grouped heads and an odd head size."""
    shape = (SEQ, 2, 4, 2, 20)
    q, k, v = operands(shape, dt, scale=1.5)
    dout = random(rng(9), *q.shape, dt)
    results, want = both_ways(shape, dt, q, k, v, dout, isa, scores), exact(shape, q, k, v, dout, scores)
    peer, batch_splits = torch_attention(shape, q, k, v, scores)
    peer.backward(tensor(dout))
    assert_close(results[0], want[0], dt, array(peer), 3e-6)
    assert_close(results[1], want[1], "f32", bound=3e-6)
    for got, gradient, split in zip(results[2:], want[2:], batch_splits, strict=True):
        assert_close(got, gradient, dt, array(split.grad), 6e-6)


@every_level
@every_dtype
@in_turn("softcap", [0.0, 3.0])
def test_a_window_as_long_as_the_sequence_has_no_effect(isa, dt, softcap):
    """The same bits; a shorter window differs."""
    shape = (SEQ, 1, 4, 2, 32)
    q, k, v = operands(shape, dt)
    dout = random(rng(9), *q.shape, dt)
    whole = both_ways(shape, dt, q, k, v, dout, isa, Scores(softcap=softcap))
    for window in (SEQ, SEQ + 1, 1 << 30):
        results = both_ways(shape, dt, q, k, v, dout, isa, Scores(window=window, softcap=softcap))
        for a, b in zip(results, whole, strict=True):
            assert_same_bits(a, b)
    short = both_ways(shape, dt, q, k, v, dout, isa, Scores(window=SEQ // 2, softcap=softcap))
    for a, b in zip(short, whole, strict=True):
        assert (bits(a) != bits(b)).any()


@every_level
@every_dtype
def test_a_window_of_one_position_gives_its_value(isa, dt):
    """Softmax over one position is 1: out equals v to the bit, dq and dk are zero, dv is the sum of dout."""
    shape = (70, 2, 2, 2, 24)
    q, k, v = operands(shape, dt)
    dout = random(rng(9), *q.shape, dt)
    out, _, dq, dk, dv = both_ways(shape, dt, q, k, v, dout, isa, Scores(window=1))
    assert_same_bits(out, v)
    assert np.abs(dq.astype(np.float32)).max() <= 2e-6 and np.abs(dk.astype(np.float32)).max() <= 2e-6
    assert_close(dv, dout.astype(np.float64), dt, bound=2e-6)


@every_level
@every_dtype
@in_turn("window", [1, 64, 65, 100])
def test_skipped_kv_blocks_have_no_effect(isa, dt, window):
    """Rows of a long sequence equal those of its end alone, without the KV blocks before every window."""
    shape, cut = (300, 1, 4, 2, 24), 128
    short = (300 - cut, *shape[1:])
    q, k, v = operands(shape, dt)
    dout = random(rng(9), *q.shape, dt)
    scores = Scores(window=window)
    whole = both_ways(shape, dt, q, k, v, dout, isa, scores)
    end = both_ways(short, dt, *(x[cut:] for x in (q, k, v, dout)), isa, scores)
    seen = window - 1  # rows that see nothing before the cut
    for a, b in zip(whole[:3], end[:3], strict=True):
        assert_same_bits(a[cut + seen :], b[seen:])
    for a, b in zip(whole[3:], end[3:], strict=True):  # positions that only those rows see
        assert_same_bits(a[cut + seen :], b[seen:])
    if seen:
        assert (bits(whole[0][cut : cut + seen]) != bits(end[0][:seen])).any(), "a row that sees more shows"


@every_level
@every_dtype
def test_masked_and_skipped_kv_blocks_are_equal(isa, dt):
    """Rows whose KV blocks are skipped equal rows among neighbours that still see those blocks."""
    shape, scores = (400, 1, 4, 2, 32), Scores(window=70)
    q, k, v = operands(shape, dt)
    dense, _ = forward(shape, dt, q, k, v, isa, scores)
    caches, table = paged(dt, k, v, 64, rng(3), shape[4])
    for rows in ([399], [399, 0], [0, 133, 134, 135, 399], [64, 69, 70, 71, 133]):
        out = run_paged(shape, dt, q[rows], caches, table, rows, isa, scores)
        assert_same_bits(out, dense[rows])


@every_level
@every_dtype
@pytest.mark.parametrize(
    "scores",
    [Scores(window=1), Scores(window=64), Scores(window=97, softcap=2.0), Scores(softcap=2.0)],
    ids=str,
)
def test_prompts_in_chunks_and_tokens_one_by_one(isa, dt, scores):
    """Pages give the bits of dense attention; pages before all windows are never read."""
    shape = (330, 1, 4, 2, 16)
    q, k, v = operands(shape, dt)
    dense, _ = forward(shape, dt, q, k, v, isa, scores)
    caches, table = paged(dt, k, v, 64, rng(3), shape[4])
    for cuts in ([0, 330], [0, 1, 64, 65, 200, 330], [*range(0, 330, 33), 330]):
        for begin, end in pairwise(cuts):
            rows = np.arange(begin, end)
            assert_same_bits(run_paged(shape, dt, q[rows], caches, table, rows, isa, scores), dense[rows])
    for row in (0, 1, 63, 64, 127, 128, 191, 192, 329):
        own = table.copy()
        if scores.window:
            own[0, : max(0, row - scores.window + 1) // 64] = 1 << 30
        assert_same_bits(run_paged(shape, dt, q[[row]], caches, own, [row], isa, scores), dense[[row]])
    if scores.window > 1:
        other = replace(scores, window=scores.window + 1)
        out = run_paged(shape, dt, q[[329]], caches, table, [329], isa, other)
        assert (bits(out) != bits(dense[[329]])).any(), "a position more must show"


@every_level
@every_dtype
@in_turn("length", [1, 63, 64, 65, 100])
def test_padding_has_no_effect(isa, dt, length):
    """Padding with anything, NaN included, changes no bit and gets zeros; a wrong length differs."""
    shape, short = (SEQ, 1, 4, 2, 24), (length, 1, 4, 2, 24)
    q, k, v = operands(shape, dt)
    dout = random(rng(9), *q.shape, dt)
    own = Scores(causal=False)
    alone = both_ways(short, dt, *(x[:length] for x in (q, k, v, dout)), isa, own)
    padded = replace(own, lengths=(length,))
    for filled in (False, True):
        inputs = [x.copy() for x in (q, k, v, dout)]
        if filled:
            for x in inputs:
                x[length:] = np.nan
        for a, b in zip(both_ways(shape, dt, *inputs, isa, padded), alone, strict=True):
            assert_same_bits(a[:length], b)
            assert not bits(a[length:]).any()
    longer = both_ways(shape, dt, q, k, v, dout, isa, replace(own, lengths=(length + 1,)))
    assert any((bits(a[:length]) != bits(b)).any() for a, b in zip(longer, alone, strict=True))


@every_dtype
def test_each_sequence_has_its_own_length(dt):
    """Two sequences in one task, and each alone, give the same bits; swapped lengths differ."""
    q, k, v = operands((70, 2, 4, 2, 24), dt)
    dout = random(rng(9), *q.shape, dt)
    both = both_ways((70, 2, 4, 2, 24), dt, q, k, v, dout, scores=Scores(False, lengths=(69, 33)))
    for half, length in ((slice(0, 70), 69), (slice(70, 140), 33)):
        scores = Scores(False, lengths=(length,))
        alone = both_ways((70, 1, 4, 2, 24), dt, *(x[half] for x in (q, k, v, dout)), scores=scores)
        for a, b in zip(both, alone, strict=True):
            assert_same_bits(a[half], b)
    swapped = both_ways((70, 2, 4, 2, 24), dt, q, k, v, dout, scores=Scores(False, lengths=(33, 69)))
    assert all((bits(a) != bits(b)).any() for a, b in zip(swapped, both, strict=True))


@every_level
def test_caps_bound_scores_of_any_size(isa):
    """Scores of thousands are capped; NaN stays in its row."""
    shape = (66, 1, 1, 1, 16)
    q, k, v = (x.copy() for x in operands(shape, "f32"))
    q, k = q * 3000, k * 3000
    q[10, 3] = np.nan
    dout = random(rng(9), *q.shape)
    dout[10] = 0
    out, lse = forward(shape, "f32", q, k, v, isa, Scores(softcap=4.0))
    assert np.isnan(out[10]).all() and np.isfinite(np.delete(out, 10, 0)).all()
    assert np.abs(np.delete(lse, 10, 0)).max() <= 4 + np.log(66) + 1e-5
    dq, *_ = backward(shape, "f32", dout, out, lse, q, k, v, isa, Scores(softcap=4.0))
    assert np.isnan(dq[10]).all() and np.isfinite(np.delete(dq, 10, 0)).all()


@settings(max_examples=25)
@given(
    st.integers(1, 200),
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    st.integers(1, 20),
    st.integers(0, 210),
    st.sampled_from([0.0, 1.0, 30.0]),
    st.sampled_from(["f32", "bf16"]),
    st.sampled_from(LEVELS),
    st.data(),
)
def test_any_shape(seq, count, heads, half, window, softcap, dt, isa, data):
    """Random shapes, windows, caps and lengths against fp64; paged rows have the bits of dense ones."""
    shape = (seq, count, *heads, 2 * half)
    lengths = data.draw(st.none() | st.lists(st.integers(1, seq), min_size=count, max_size=count).map(tuple))
    scores = Scores(lengths is None, 0 if lengths else window, softcap, lengths)
    q, k, v = operands(shape, dt)
    dout = random(rng(9), *q.shape, dt)
    results, want = both_ways(shape, dt, q, k, v, dout, isa, scores), exact(shape, q, k, v, dout, scores)
    for a, b, bound in zip(results, want, (4e-6, 4e-6, 2e-5, 2e-5, 2e-5), strict=True):
        worst = np.abs(a.astype(np.float64) - b).max()
        assert worst <= (bound if dt == "f32" else 0.06) * max(1.0, np.abs(b).max())
    if lengths is None:
        rows = data.draw(st.lists(st.integers(0, seq - 1), min_size=1, max_size=20))
        caches, table = paged(dt, k[:seq], v[:seq], 64, rng(3), shape[4])
        out = run_paged(shape, dt, q[rows], caches, table, rows, isa, scores)
        assert_same_bits(out, results[0][rows])
