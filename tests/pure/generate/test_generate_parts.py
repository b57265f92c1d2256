"""The parts of generation that need no model: sampling, pages, text from tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core import ConfigError, NotFinite, ResourceError
from tilewise.data import train_tokenizer
from tilewise.generate import check_prompt
from tilewise.generate.blocks import BlockTable, num_blocks_for
from tilewise.generate.detokenizer import Detokenizer
from tilewise.generate.sampling import Sampling, pick_token
from tilewise.models.llama.model import BLOCK_SIZE

LOGITS = np.random.default_rng(0).standard_normal(100).astype(np.float32)
TOKENIZER = train_tokenizer(["hello world ä€😀 " * 10], vocab_size=280)


def _draws(sampling, count=2000):
    return np.array([pick_token(LOGITS, sampling, position) for position in range(count)])


def test_greedy_takes_the_first_maximum():
    """Temperature 0 is the likeliest token, the lower id on a tie."""
    assert pick_token(np.array([0.0, 3.0, 3.0], np.float32), Sampling(), 0) == 1


def test_draws_follow_the_probabilities():
    """Frequencies of draws match the softmax."""
    counts = np.bincount(_draws(Sampling(temperature=0.7), 4000), minlength=100)
    wanted = np.exp(LOGITS.astype(np.float64) / 0.7)
    wanted *= 4000 / wanted.sum()
    assert np.abs(counts - wanted).max() < 5 * np.sqrt(wanted.max())


def test_top_k_and_top_p_restrict_draws():
    """Only the k likeliest, and only the smallest set with probability p, are ever drawn."""
    order = np.argsort(-LOGITS)
    assert set(_draws(Sampling(temperature=1.0, top_k=3))) == set(order[:3])
    probability = np.exp(LOGITS[order].astype(np.float64))
    sums = np.cumsum(probability / probability.sum())
    nucleus = order[: int((sums < 0.3).sum()) + 1]
    assert set(_draws(Sampling(temperature=1.0, top_p=0.3))) == set(nucleus)


def test_draw_depends_on_seed_and_position_only():
    """The same seed and position draw the same token, others do not always."""
    sampling = Sampling(temperature=1.0, seed=3)
    assert pick_token(LOGITS, sampling, 9) == pick_token(LOGITS, sampling, 9)
    assert len({pick_token(LOGITS, Sampling(temperature=1.0, seed=seed), 9) for seed in range(20)}) > 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_no_numbers_pick_nothing(bad, temperature):
    """An overflow or damaged weights end in an error that names the token, not in text."""
    logits = LOGITS.copy()
    logits[7] = bad
    with pytest.raises(NotFinite, match="token 7 at position 9"):
        pick_token(logits, Sampling(temperature=temperature), 9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": "hot"},
        {"temperature": None},
        {"top_k": "3"},
        {"top_p": [0.9]},
        {"seed": None},
    ],
)
def test_values_out_of_range_are_refused(wrong):
    """Each setting has a range; the error names it."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab ä€😀한\n"), max_size=30))
def test_streamed_text_is_the_whole_text(text):
    """Pieces are whole characters, and together they are the decoded text."""
    ids = TOKENIZER.encode(text).ids
    detokenizer = Detokenizer(TOKENIZER, [])
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_end_token_has_no_text():
    """Special tokens are not shown."""
    assert Detokenizer(TOKENIZER, []).add(0) == ""


def test_incomplete_character_is_never_shown():
    """Bytes of an unfinished character stay back."""
    ids = TOKENIZER.encode("a\U0001f680").ids
    detokenizer = Detokenizer(TOKENIZER, [])
    assert "".join(detokenizer.add(token) for token in ids[:-1]) == "a"


def test_blocks_grow_and_return():
    """A sequence takes a block per 64 positions, and gives them back."""
    table = BlockTable(4)
    assert len(table.grow(0, 1)) == 1 and len(table.grow(0, BLOCK_SIZE)) == 1
    first = list(table.grow(0, BLOCK_SIZE + 1))
    other = table.grow(1, 2 * BLOCK_SIZE)
    assert not set(first) & set(other) and len({*first, *other}) == 4
    with pytest.raises(ResourceError, match="0 free"):
        table.grow(1, 3 * BLOCK_SIZE)
    table.release(0)
    assert set(table.grow(1, 4 * BLOCK_SIZE)) == {0, 1, 2, 3} and num_blocks_for(65) == 2


def test_prompt_must_leave_room():
    """A prompt that fills the context is refused, one token less is not."""
    check_prompt(63, 64)
    with pytest.raises(ConfigError, match="must leave room in the context of 64 tokens; got 64"):
        check_prompt(64, 64)
