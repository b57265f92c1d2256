"""Calls and thoughts are found in what models write, wherever its pieces are cut; what is none of them is text."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.server.requests.reading import Part, Reader, Way, merged
from tilewise.server.requests.tool_parsers import FORMATS

WEATHER = ("weather", {"city": "Paris {x}", "days": [1, 2]})
TIME = ("time", {})
_CALL = '{"name": "weather", "arguments": {"city": "Paris {x}", "days": [1, 2]}}'
CALLS = [
    ("hermes", f"<tool_call>\n{_CALL}\n</tool_call>", [WEATHER]),
    (
        "hermes",
        f'Let me see.\n<tool_call>{_CALL}</tool_call>\n<tool_call>{{"name": "time"}}</tool_call>',
        [WEATHER, TIME],
    ),
    ("hermes", f"<tool_call>\n{_CALL}", [WEATHER]),
    ("llama3_json", _CALL.replace("arguments", "parameters"), [WEATHER]),
    ("llama3_json", f'<|python_tag|>{_CALL}; {{"name": "time", "parameters": {{}}}}', [WEATHER, TIME]),
    ("mistral", f"[TOOL_CALLS] [{_CALL}]", [WEATHER]),
    (
        "mistral",
        'Well.[TOOL_CALLS]weather[ARGS]{"city": "Paris {x}", "days": [1, 2]}[TOOL_CALLS]time{}',
        [WEATHER, TIME],
    ),
    ("phi4_mini_json", f"functools[{_CALL}]", [WEATHER]),
    ("pythonic", '[weather(city="Paris {x}", days=[1, 2]), time()]', [WEATHER, TIME]),
]
TEXTS = [
    ("hermes", "a < b and <tool_kit> is none"),
    ("hermes", '<tool_call>{"name": 7}</tool_call>'),
    ("hermes", "<tool_call>not json"),
    ("llama3_json", '{"no": "call"}'),
    ("llama3_json", 'Here: {"name": "weather", "parameters": {}}'),
    ("llama3_json", "{" * 5000),
    ("mistral", "[TOOL_"),
    ("phi4_mini_json", "functools[1"),
    ("pythonic", "[1, 2, __import__('os').system('true')]"),
    ("pythonic", "[weather(city=open('x'))]"),
    ("pythonic", "[" * 3000),
    ("pythonic", "see [1]"),
]


def _read(way, pieces):
    reader = Reader(way)
    parts = [part for piece in pieces for part in reader.add(piece)]
    return merged([*parts, *reader.finish()])


def _cut(text, places):
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize(("form", "text", "calls"), CALLS)
@given(places=st.lists(st.integers(0, 1 << 16), max_size=12))
def test_calls_are_found_wherever_pieces_are_cut(form, text, calls, places):
    """Names and arguments, in order; text before them is text."""
    found = _read(Way(tools=form), _cut(text, places))
    told = [(part.name, json.loads(part.text)) for part in found if part.kind == "call"]
    assert told == calls
    content = "".join(part.text for part in found if part.kind == "content").strip()
    assert content in ("", "Let me see.", "Well.") and (content != "") == text.startswith(("Let", "Well"))


@pytest.mark.parametrize(("form", "text"), TEXTS)
@given(places=st.lists(st.integers(0, 1 << 16), max_size=4))
def test_what_is_no_call_is_text(form, text, places):
    """All of it comes, unchanged."""
    found = _read(Way(tools=form), _cut(text, places))
    assert [part.kind for part in found] == ["content"] and found[0].text == text


@given(
    form=st.sampled_from(sorted(FORMATS)),
    pieces=st.lists(st.text(alphabet='<tool_call>/[]{}":, nameTOOLCALLSf', max_size=9)),
)
def test_nothing_that_a_model_writes_is_an_error(form, pieces):
    """Whatever comes, reading it ends; without calls nothing but blanks is lost."""
    found = _read(Way(tools=form, thinks=True), pieces)
    if not any(part.kind == "call" for part in found):
        told = "".join(part.text for part in found)
        assert "".join(told.split()) == "".join("".join(pieces).split())


THOUGHTS = [
    ("<think>\nhm\n</think>\n\nYes.", False, "hm\n", "Yes."),
    ("hm</think>Yes.", True, "hm", "Yes."),
    ("\n<think></think>Yes.", False, "", "Yes."),
    ("Yes.", False, "", "Yes."),
    ("<thin", False, "", "<thin"),
    ("<think>a < b </thin", False, "a < b </thin", ""),
]


@pytest.mark.parametrize(("text", "inside", "thought", "content"), THOUGHTS)
@given(places=st.lists(st.integers(0, 1 << 16), max_size=8))
def test_thoughts_are_told_apart(text, inside, thought, content, places):
    """Whether the model or the prompt begins them, and whether they end."""
    found = _read(Way(thinks=True, is_thinking=inside), _cut(text, places))
    assert "".join(part.text for part in found if part.kind == "reasoning") == thought
    assert "".join(part.text for part in found if part.kind == "content") == content


def test_calls_that_had_to_come():
    """A named function's text is its arguments, piece by piece; a list of calls is told when it is whole."""
    found = _read(Way(function="f"), ['{"a"', ": 1}"])
    assert found == [Part("call", "", "f"), Part("arguments", '{"a": 1}')]
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert _read(Way(calls=True), [text]) == [Part("call", '{"a": 1}', "f"), Part("call", "{}", "g")]
    assert _read(Way(calls=True), [text[:20]]) == [Part("content", text[:20])]
