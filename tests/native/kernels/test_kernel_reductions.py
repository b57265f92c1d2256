"""Split trees and the gradient norm against fp64."""

import numpy as np
from kernel_checks import (
    assert_close,
    assert_same_bits,
    bits,
    empty,
    every_level,
    in_turn,
    packed,
    random,
    rng,
)

from tilewise.kernels import reference
from tilewise.kernels.isa import run


def tree(rows):
    """The definition of the left-complete tree over a list, in which None is an empty slot, from the top."""
    if len(rows) == 1:
        return rows[0]
    half = 1 << (len(rows) - 1).bit_length() - 1
    left, right = tree(rows[:half]), tree(rows[half:])
    return right if left is None else left if right is None else left + right


@every_level
@in_turn("batch_splits", [1, 3, 8])
@in_turn("seq_len,k_splits", [(1, 8), (192, 8), (300, 12), (1000, 3)])
def test_split_tree(isa, batch_splits, seq_len, k_splits):
    """To the bit: the tree over sequence splits without empty ones, then over batch splits; each carry first."""
    numbers = [c for c, _, _ in reference.sequence_splits(seq_len, k_splits)]
    gen = rng(batch_splits)
    partials, carries = random(gen, batch_splits, 37 * len(numbers)), [random(gen, 1, 37) for _ in range(2)]
    out = empty(1, 37)
    run("split_tree_f32", [out, partials, *carries], [2, seq_len, k_splits, 0], isa=isa)
    assert_close(out, reference.split_tree(partials, carries, len(numbers)), "f32")

    def expected(order):
        sums = []
        for split in partials.reshape(batch_splits, len(numbers), 37):
            slots = [None] * k_splits
            for place, c in enumerate(numbers):
                slots[c] = split[order[place]]
            sums.append(tree(slots))
        return carries[1] + (carries[0] + tree(sums))

    assert_same_bits(out, expected(range(len(numbers))))
    if len(numbers) > 2:
        swapped = [0, *reversed(range(1, len(numbers) - 1)), len(numbers) - 1]
        swapped[0], swapped[-1] = swapped[-1], swapped[0]
        assert (bits(out) != bits(expected(swapped))).any(), "k splits in another order must show"


@every_level
@in_turn("heads,k_splits", [(8, 8), (3, 8), (20, 6), (2, 1)])
def test_head_sum(isa, heads, k_splits):
    """To the bit: heads of a k split in order, then the tree, of which devices compute subtrees."""
    size, x = 21, random(rng(heads), 1, 21 * heads)
    cuts = [(c * heads // k_splits, (c + 1) * heads // k_splits) for c in range(k_splits)]

    def expected(order):
        sums = [None] * k_splits
        for c, (begin, end) in enumerate(cuts):
            for head in order[begin:end]:
                value = x[:, head * size : (head + 1) * size]
                sums[c] = value if sums[c] is None else sums[c] + value
        return tree(sums)

    def run_on(held_ranges, begin=0):
        out, ranges = (
            empty(1, size),
            [(size * (b - begin), size * (e - begin)) if e > b else (0, 0) for b, e in held_ranges],
        )
        held_x = np.ascontiguousarray(x[:, size * begin :])
        run("head_sum_f32", [out, held_x], [len(ranges), *(v for r in ranges for v in r)], isa=isa)
        return out

    whole = run_on(cuts)
    ranges = [(size * b, size * e) for b, e in cuts]
    assert_close(whole, reference.head_sum(x, ranges, size), "f32")
    assert_same_bits(whole, expected(range(heads)))
    if heads > 2:
        assert (bits(whole) != bits(expected([*range(1, heads), 0]))).any(), (
            "heads in another order must show"
        )
    if k_splits == 8:
        parts = [run_on(cuts[c : c + 2], cuts[c][0]) for c in range(0, 8, 2)]
        total = empty(1, size)
        run("tree_add_f32", [total, None, *parts], isa=isa)
        assert_same_bits(total, whole)


@every_level
def test_a_device_without_a_head_adds_nothing(isa):
    """Its sum is -0, which changes no sign."""
    out = empty(1, 5)
    run("head_sum_f32", [out, np.ones((1, 5), np.float32)], [2, 0, 0, 0, 0], isa=isa)
    assert_same_bits(out, np.full((1, 5), -0.0, np.float32))


@every_level
def test_a_zero_sum_over_padded_rows_is_positive(isa):
    """Zeros added to -0 give -0 or +0 by their signs; with padding, the sum is always +0."""
    for is_padded, sign in ((0, True), (1, False)):
        out = empty(1, 3)
        partials = np.full((2, 3), [-0.0, 2.5, -1e-42], np.float32)
        run("split_tree_f32", [out, partials], [0, 1, 8, is_padded], isa=isa)
        assert np.signbit(out).tolist() == [[sign, False, True]]
        np.testing.assert_array_equal(out, 2 * partials[:1])


@every_level
@in_turn("slots", [1, 2, 3, 5, 8, 12, 13])
@in_turn("width", [1, 2, 3, 4])
def test_tree_resume(isa, slots, width):
    """Runs of any length, each continuing from the last one's stack, give the one tree to the bit."""
    partials = [random(rng(s), 3, 21) for s in range(slots)]

    def resumed(order):
        stack = None
        for begin in range(0, slots, width):
            run_now = [partials[order[s]] for s in range(begin, min(begin + width, slots))]
            end = begin + len(run_now)
            left = empty(3, 21 * (1 if end == slots else end.bit_count()))
            run("tree_resume_f32", [left, stack, *run_now], [begin, len(run_now), int(end == slots)], isa=isa)
            exact = reference.tree_resume(stack, begin, run_now, end == slots)
            assert_close(left, exact, "f32")
            stack = left
        return stack

    root = resumed(range(slots))
    assert_same_bits(root, tree(partials))
    if slots > 2:
        swapped = [slots - 1, *range(1, slots - 1), 0]
        assert (bits(root) != bits(resumed(swapped))).any(), "a swapped child must show"


def test_tree_resume_in_place():
    """A run's stack may replace the one that it continues."""
    partials = [random(rng(s), 2, 40) for s in range(3)]
    stack, root = empty(2, 80), empty(2, 40)
    run("tree_resume_f32", [stack[:, :40], None, partials[0]], [0, 1, 0])
    run("tree_resume_f32", [stack, stack, partials[1]], [1, 1, 0])
    run("tree_resume_f32", [root, stack, partials[2]], [2, 1, 1])
    assert_same_bits(root, tree(partials))


def square_sums(
    grad, part, k_splits, first_row=0, *, rows=None, first_entry=0, size=None, is_packed=False, isa=""
):
    """The entries that a call computes, for a gradient of which `part` is present."""
    rows = len(grad) if rows is None else rows
    out = np.full((len(k_splits) * rows if size is None else size, 1), 7.0)
    ints = [int(is_packed), rows, first_row, first_entry, len(k_splits), *(x for c in k_splits for x in c)]
    run("square_sum_f32", [out, packed(part, "f32") if is_packed else part], ints, isa=isa)
    exact = reference.square_sum(part, rows, first_row, first_entry, len(out), k_splits)
    np.testing.assert_allclose(out, exact, rtol=1e-14, atol=0)
    return out


@every_level
@in_turn("is_packed", [False, True])
def test_square_sum(isa, is_packed):
    """An entry has the same fp64 bits for any rows and columns of a device and any entries of a call."""
    grad = random(rng(9), 150, 50)
    cuts = [(0, 10), (10, 10), (10, 36), (36, 50)]
    whole = square_sums(grad, grad, cuts, isa=isa)
    assert_same_bits(whole, square_sums(grad, grad, cuts, is_packed=not is_packed, isa=isa))
    pieces = [
        (rows, columns) for rows in ((0, 7), (7, 96), (96, 150)) for columns in (slice(0, 2), slice(2, 4))
    ]

    def assembled(shift):
        total = np.zeros_like(whole)
        for (a, b), columns in pieces:
            begin, end = cuts[columns][0][0], cuts[columns][-1][1]
            ranges = [
                (max(x - begin, 0), min(y, end) - begin) if begin <= x < y <= end else (0, 0) for x, y in cuts
            ]
            part = grad[a + shift : b + shift, begin:end]
            for first in range(0, len(whole), 64):
                size = min(64, len(whole) - first)
                entries = square_sums(
                    grad, part, ranges, a, first_entry=first, size=size, is_packed=is_packed, isa=isa
                )
                assert not (total[first : first + size] * entries).any(), "an entry that two hold"
                total[first : first + size] += entries
        return total

    assert_same_bits(whole, assembled(0))
    pieces = pieces[:-2]
    assert (bits(whole) != bits(assembled(0))).any(), "a part that is left out must show"
    assert (bits(whole) != bits(assembled(1))).any(), "another row must show"


@every_level
def test_entries_past_the_last_are_zero(isa):
    """A vector has an entry per element; the rest of a gradient's region is zero."""
    vector = random(rng(4), 5, 1)
    out = square_sums(vector, vector, [(0, 1)], size=9, isa=isa)
    assert_same_bits(out[:5], vector.astype(np.float64) ** 2)
    assert not out[5:].any()


@every_level
@in_turn("entries", [1, 7, 8, 40, 77])
def test_norm_adds_one_tree(isa, entries):
    """The left-complete tree over all entries in fp64 to the bit; its square root as fp32."""
    squares = rng(entries).standard_normal((entries, 1)) ** 2 * 10.0 ** rng(1).integers(-9, 9, (entries, 1))
    out, loss = np.empty((1, 2), np.float32), np.ones((1, 1), np.float32)
    run("norm_scale", [out, squares, loss], floats=[0.0], isa=isa)
    assert out[0, 0] == np.float32(np.sqrt(tree(list(squares[:, 0]))))


def test_another_order_of_the_norm_is_detected():
    """The twin: entries that overflow unless the tree adds them first in its own order."""
    huge = float(np.finfo(np.float64).max)
    out, loss = np.empty((1, 2), np.float32), np.ones((1, 1), np.float32)
    for order, is_finite in (([huge, -huge, huge, -huge], True), ([huge, huge, -huge, -huge], False)):
        run("norm_scale", [out, np.array([[v] for v in order]), loss], floats=[0.0])
        assert np.isfinite(out[0, 0]) == is_finite


@every_level
@in_turn("max_norm", [0.0, 1.0, 1e6])
def test_norm_scale(isa, max_norm):
    """The norm and its clipping factor; the factor is NaN if the norm or the loss is not a finite fp32 number."""
    partials = np.abs(rng(11).standard_normal((40, 1)))
    out, loss = np.empty((1, 2), np.float32), np.ones((1, 1), np.float32)
    for bad_square, bad_loss in (
        (None, 1),
        (np.nan, 1),
        (np.inf, 1),
        (1e90, 1),
        (None, np.nan),
        (None, -np.inf),
    ):
        squares = partials.copy()
        if bad_square is not None:
            squares[27, 0] = bad_square
        loss[0, 0] = bad_loss
        run("norm_scale", [out, squares, loss], floats=[max_norm], isa=isa)
        expected = reference.norm_scale(squares, loss, max_norm)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(out[0], expected.astype(np.float32), rtol=1e-6)
        assert np.isnan(out[0, 1]) == (bad_square is not None or bad_loss != 1)
