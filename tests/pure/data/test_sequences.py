"""Sequences of several sources: packed, padded, and drawn by weight as a pure function of the step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core import ConfigError
from tilewise.data import IGNORED, Batches, ExampleList, PackedExamples, PaddedExamples, TextWindows
from tilewise.data.examples import pack_lengths

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=60)


def examples(lengths, most=40, strategy="truncate"):
    """Examples of distinct tokens; the labels of the second half of each are counted."""
    collected, first = ExampleList(most, strategy), 0
    for length in lengths:
        tokens = np.arange(first, first + length, dtype=np.int32)
        collected.add(tokens, np.where(np.arange(length) < length // 2, IGNORED, tokens).astype(np.int32))
        first += length
    return collected


def pairs(sequences):
    """Every counted pair of a token and its label."""
    rows = [sequences.row(index) for index in range(len(sequences))]
    return sorted((int(token), int(label)) for row in rows for token, label in zip(*row) if label != IGNORED)


@settings(max_examples=30)
@given(LENGTHS, st.integers(10, 25), st.sampled_from([1, 2, 4]))
def test_packing_predicts_what_padding_predicts(lengths, quarter, multiple):
    """Each example once and whole. No two sequences fit into one, and at most one is half empty."""
    own, context = examples(lengths).finish(), 4 * quarter
    packed = PackedExamples(own, context, multiple)
    assert pairs(packed) == pairs(PaddedExamples(own)) and pairs(packed)
    assert sorted(n for numbers in packed.bins for n in numbers) == list(range(len(own)))
    rows = [packed.row(index) for index in range(len(packed))]
    widths = [len(tokens) for tokens, _ in rows]
    spaces = [-(-length // multiple) * multiple for length in lengths]
    assert max(widths) <= context and sum(lengths) <= sum(widths) <= sum(spaces)
    assert all(len(tokens) == len(labels) and labels[-1] == IGNORED for tokens, labels in rows)
    assert len(widths) == 1 or sum(sorted(widths)[:2]) > context - 2 * multiple
    assert pack_lengths(spaces, context) == packed.bins
    batch = Batches([packed], len(packed), width=context, has_documents=True).at(0)
    for row in range(len(packed)):
        first, positions = batch["first"][row], batch["positions"][row]
        assert (first + positions == np.arange(context)).all()
        counted = np.flatnonzero(batch["labels"][row] != IGNORED)
        assert (first[counted] % multiple == 0).all()
        tokens = batch["tokens"][row]
        assert (tokens[counted] - positions[counted] == tokens[first[counted]]).all()  # those of one example


def test_a_lost_example_is_detected():
    """The twin: a sequence without its last example predicts less."""
    own = examples([5, 9, 12]).finish()
    packed = PackedExamples(own, 40)
    packed.bins[0].pop()
    assert pairs(packed) != pairs(PaddedExamples(own))


@settings(max_examples=30)
@given(LENGTHS, st.integers(2, 30))
def test_long_examples_are_split_truncated_or_dropped(lengths, most):
    """Splitting predicts the same tokens; each example is counted."""
    whole = examples(lengths).finish()
    split, cut, dropped = (examples(lengths, most, name) for name in ("split", "truncate", "drop"))
    assert pairs(PaddedExamples(split.finish())) == pairs(PaddedExamples(whole))
    num_long = sum(length > most for length in lengths)
    assert split.counts.split == num_long == dropped.counts.dropped
    assert cut.counts.truncated + cut.counts.unlabelled >= num_long
    for each in (split, cut, dropped):
        own, counts = each.finish(), each.counts
        assert len(own) == counts.examples and max([0, *own.lengths]) <= most
        assert (counts.tokens, counts.counted) == (len(own.tokens), len(pairs(PaddedExamples(own))))
    assert cut.counts.examples + cut.counts.unlabelled == len(lengths)


def sources(sizes):
    """Windows of one token each; the token says source and window."""
    return [
        TextWindows(np.arange(s * 1000, s * 1000 + size + 1, dtype=np.int32), 1)
        for s, size in enumerate(sizes)
    ]


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0.1, 10.0)), min_size=1, max_size=4),
    st.integers(0, 2**63 - 1),
)
def test_a_mixture_is_a_function_of_the_step(parts, seed):
    """In any order of steps; within a source, every sequence is used once per epoch of the source."""
    sizes, weights = zip(*parts)
    whole = Batches(sources(sizes), 5, seed, weights)
    tokens = [whole.at(step)["tokens"][:, 0] for step in range(30)]
    again = Batches(sources(sizes), 5, seed, weights)
    for step in (29, 3, 17):
        np.testing.assert_array_equal(again.at(step)["tokens"][:, 0], tokens[step])
    one_by_one = Batches(sources(sizes), 1, seed, weights)
    np.testing.assert_array_equal(one_by_one.at(42)["tokens"][0], [np.concatenate(tokens)[42]])
    for number, size in enumerate(sizes):
        own = [int(t) % 1000 for t in np.concatenate(tokens) if t // 1000 == number]
        for first in range(0, len(own) - size + 1, size):
            assert sorted(own[first : first + size]) == list(range(size))


def test_weights_are_shares_of_sequences():
    """Also across the blocks in which sources are chosen; another seed gives another order."""
    mixture = Batches(sources([50, 500, 5]), 1000, 1, (1.0, 2.0, 5.0))
    chosen = np.concatenate([mixture.at(step)["tokens"][:, 0] // 1000 for step in (*range(6), 65, 66)])
    shares = np.bincount(chosen) / len(chosen)
    np.testing.assert_allclose(shares, [0.125, 0.25, 0.625], atol=0.03)
    other = Batches(sources([50, 500, 5]), 1000, 2, (1.0, 2.0, 5.0))
    assert not np.array_equal(other.at(0)["tokens"], mixture.at(0)["tokens"])
    single = Batches(sources([50, 500, 5]), 1, 1, (1.0, 2.0, 5.0))
    for number in (65_535, 65_536, 65_999):  # the last of a block, and the first of the next
        step, row = divmod(number, 1000)
        np.testing.assert_array_equal(single.at(number)["tokens"][0], mixture.at(step)["tokens"][row])


def test_without_weights_sources_are_joined():
    """An epoch has every sequence of every source once; a batch has the given width, or that of its longest row."""
    own = PaddedExamples(examples([3, 8, 5]).finish())
    joined = Batches([*sources([4, 7]), own], 7, 3, padding=9)
    assert joined.num_windows == 14
    first = np.concatenate([joined.at(step)["tokens"][:, 0] for step in range(2)])
    assert sorted(first) == sorted([0, 1, 2, 3, *range(1000, 1007), 0, 3, 11])
    batch = Batches([own], 3, 0, width=20, padding=9).at(0)
    assert batch["tokens"].shape == batch["labels"].shape == (3, 20)
    assert (batch["tokens"][:, 7:] == 9).all() and (batch["labels"][:, 7:] == IGNORED).all()
    assert Batches([own], 3, 0).at(0)["tokens"].shape == (3, 7)


def test_wrong_mixtures_are_rejected():
    """Empty sources; weights that are not positive or not one per source."""
    for parts, weights, words in (
        ([], None, "got no source"),
        ([PaddedExamples(ExampleList(8, "drop").finish())], None, "none in source 1"),
        (sources([3, 4]), (1.0,), "one for each source"),
        (sources([3, 4]), (1.0, 0.0), "must be positive"),
        (sources([3, 4]), (1.0, float("nan")), "finite number"),
    ):
        with pytest.raises(ConfigError, match=words):
            Batches(parts, 2, weights=weights)
