"""Shortening of values and texts in error messages."""

from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.validation import bare, cut, shown

WORDS = st.lists(st.text("abc.,'", min_size=1, max_size=12), min_size=1, max_size=40).map(" ".join)


@given(WORDS, st.integers(30, 80))
def test_text_is_cut_after_a_word(text, limit):
    """A text that is too long ends after a whole word and an ellipsis, within the limit; others are unchanged."""
    shortened = cut(text, limit)
    if len(text) <= limit:
        assert shortened == text
    else:
        start = shortened.removesuffix("…")
        assert start != shortened and len(shortened) <= limit and text.startswith(start + " ")


def test_long_word_is_cut():
    """A long value without spaces, or after a few words, is shown up to the limit."""
    assert cut("x" * 99, 10) == "x" * 9 + "…"
    assert cut("[a.b] " + "y" * 99, 20) == "[a.b] " + "y" * 13 + "…"


def test_values_are_shown_short():
    """`shown` names the type of what it cuts; `bare` has no quotes. Both are one line."""
    assert shown(list(range(99)), 20) == "[0, 1, 2, 3, 4, 5,… (of type list)"
    assert shown("one\ntwo") == "'one\\ntwo'" and bare("one\ntwo") == "one\\ntwo"
    assert bare("ab cd ef", 7) == "ab cd…"
