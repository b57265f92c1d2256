"""Calls and thoughts in generated text, wherever its pieces are split; the rest is text."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.server.requests.reading import OutputFormat, Part, Reader, merged
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
    (
        "mistral",
        f'[TOOL_CALLS] [{_CALL[:-1]}, "id": "aB3456789"}}, {{"name": "time", "id": "0"}}]',
        [WEATHER, TIME],
    ),
    ("phi4_mini_json", f"functools[{_CALL}]", [WEATHER]),
    ("pythonic", '[weather(city="Paris {x}", days=[1, 2]), time()]', [WEATHER, TIME]),
    ("pythonic", "[ time( ) , weather( city='Paris {x}' ,days = [1, 2] ) ]", [TIME, WEATHER]),
    ("hermes", f'<tool_call>[{_CALL}, {{"name": "time", "id": "x"}}]</tool_call>', [WEATHER, TIME]),
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Paris {x}", "days": [1, 2]}, "type": "function"}',
        [WEATHER],
    ),
    (
        "llama3_json",
        '{"type": "function", "parameters": {"city": "Paris {x}", "days": [1, 2]}, "name": "weather"}',
        [WEATHER],
    ),
    (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"text": "a \\"} [ \\\\"}}</tool_call>',
        [("say", {"text": 'a "} [ \\'})],
    ),
    (
        "phi4_mini_json",
        'functools[{"name": "weather", "arguments": "{\\"city\\": \\"Paris {x}\\", \\"days\\": [1, 2]}"}]',
        [WEATHER],
    ),
]
BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "f", '{"a": "b', ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": </tool_call>so', "f", '{"a": ', "so"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,, }}</tool_call>', "f", '{"a": 1,, }', ""),
    ("mistral", '[TOOL_CALLS]f{"a": [1', "f", '{"a": [1', ""),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "b', "f", '{"a": "b', ""),
    ("pythonic", "[f(a=1, b=open('x'))]", "f", '{"a": 1', "open('x'))]"),
    ("pythonic", "[f(a=1, b=[2", "f", '{"a": 1', ""),
]
TEXTS = [
    ("hermes", "a < b and <tool_kit> is no call"),
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


def _read(format, pieces):
    reader = Reader(format)
    parts = [part for piece in pieces for part in reader.add(piece)]
    return merged([*parts, *reader.finish()])


def _cut(text, places):
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


def _calls(parts):
    """Names and arguments, joined."""
    calls = []
    for part in parts:
        if part.kind == "call":
            calls.append([part.name, ""])
        elif part.kind == "arguments":
            calls[-1][1] += part.text
    return calls


@pytest.mark.parametrize(("form", "text", "calls"), CALLS)
@settings(max_examples=10)
@given(places=st.lists(st.integers(0, 1 << 16), max_size=12))
def test_calls_are_found_wherever_pieces_are_split(form, text, calls, places):
    """Names and arguments, in order, or only the first call; text before them is text."""
    every, first = (
        _read(OutputFormat(tools=form, is_single=single), _cut(text, places)) for single in (False, True)
    )
    assert [(name, json.loads(text)) for name, text in _calls(every)] == calls
    assert [(name, json.loads(text)) for name, text in _calls(first)] == calls[:1]
    content, same = (
        "".join(part.text for part in parts if part.kind == "content") for parts in (every, first)
    )
    assert content.strip() in ("", "Let me see.", "Well.") and content == same
    assert (content.strip() != "") == text.startswith(("Let", "Well"))


@pytest.mark.parametrize(("form", "text", "name", "arguments", "content"), BROKEN)
@settings(max_examples=10)
@given(places=st.lists(st.integers(0, 1 << 16), max_size=6))
def test_truncated_calls_have_partial_arguments(form, text, name, arguments, content, places):
    """Not valid JSON, so that no client takes them for complete."""
    parts = _read(OutputFormat(tools=form), _cut(text, places))
    assert _calls(parts) == [[name, arguments]]
    assert "".join(part.text for part in parts if part.kind == "content") == content


@pytest.mark.parametrize(("form", "text", "calls"), CALLS)
def test_names_come_first_and_arguments_piece_by_piece(form, text, calls):
    """A call's name is a delta as soon as its arguments begin, or at its end where the name comes last."""
    reader, reported = Reader(OutputFormat(tools=form)), []
    for place, letter in enumerate(text):
        reported += [(place, part) for part in reader.add(letter)]
    first = next(place for place, part in reported if part.kind == "call")
    pieces = [part for _, part in reported if part.kind == "arguments"]
    assert all(not part.text for _, part in reported if part.kind == "call")
    if '"type": "function", "parameters"' in text or '"arguments": "' in text or "[TOOL_CALLS] [" in text:
        assert len(pieces) == len(calls)
    elif calls[0][1]:
        end = text.index("}" if form != "pythonic" else "]")
        assert first < end and len(pieces) > 2


IDS = [
    (
        '[{"name": "f", "arguments": {"a": "id"}, "id": "aB3456789"}, {"name": "g", "arguments": {}}]',
        ["aB3456789", ""],
    ),
    ('[{"id": "aB3456789", "name": "f", "arguments": {"id": "123456789"}}]', ["aB3456789"]),
    ('[{"name": "f", "arguments": {}, "id": "too long an id"}]', [""]),
    ('[{"name": "f", "arguments": {"a": 1}, "id": "aB3456789"', ["aB3456789"]),
    ("f{}", [""]),
]


@pytest.mark.parametrize(("text", "ids"), IDS)
@settings(max_examples=10)
@given(places=st.lists(st.integers(0, 1 << 16), max_size=8))
def test_ids_written_by_a_mistral_model_are_kept(text, ids, places):
    """Nine letters and digits, before or after the arguments; other formats have none."""
    parts = _read(OutputFormat(tools="mistral"), _cut(f"[TOOL_CALLS]{text}", places))
    assert [part.id for part in parts if part.kind == "call"] == ids
    assert {part.id for part in _read(OutputFormat(tools="hermes"), [f"<tool_call>{text}"])} <= {""}


_PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "functools[", "<|python_tag|>", '{"name": "f", ']
_PIECES += [
    ', "id": "aB3456789"',
    '"arguments": {',
    '"a": 1',
    "}",
    "[",
    "]",
    "f(",
    "g[ARGS]{",
    "a=",
    "1",
    ", ",
    ")",
    '"',
    "\\",
    " ",
    "x",
    "\n",
]


@given(
    form=st.sampled_from(sorted(FORMATS)),
    thinks=st.booleans(),
    text=st.lists(st.sampled_from(_PIECES), max_size=14).map("".join),
    places=st.lists(st.integers(0, 1 << 16), max_size=6),
)
def test_result_does_not_depend_on_the_pieces(form, thinks, text, places):
    """A concatenated stream is the whole answer, whatever a model writes."""
    format = OutputFormat(tools=form, thinks=thinks)
    assert _read(format, _cut(text, places)) == _read(format, [text])
    assert _read(OutputFormat(calls=True), _cut(text, places)) == _read(OutputFormat(calls=True), [text])


@pytest.mark.parametrize(("form", "text"), TEXTS)
@settings(max_examples=10)
@given(places=st.lists(st.integers(0, 1 << 16), max_size=4))
def test_other_text_is_unchanged(form, text, places):
    """All of it is content."""
    parts = _read(OutputFormat(tools=form), _cut(text, places))
    assert [part.kind for part in parts] == ["content"] and parts[0].text == text


@given(
    form=st.sampled_from(sorted(FORMATS)),
    pieces=st.lists(st.text(alphabet='<tool_call>/[]{}":, nameTOOLCALLSf', max_size=9)),
)
def test_no_generated_text_is_an_error(form, pieces):
    """Parsing always ends; without calls only whitespace is lost."""
    parts = _read(OutputFormat(tools=form, thinks=True), pieces)
    if not any(part.kind == "call" for part in parts):
        parts_so_far = "".join(part.text for part in parts)
        assert "".join(parts_so_far.split()) == "".join("".join(pieces).split())


THOUGHTS = [
    ("<think>\nhm\n</think>\n\nYes.", False, "hm\n", "Yes."),
    ("hm</think>Yes.", True, "hm", "Yes."),
    ("\n<think></think>Yes.", False, "", "Yes."),
    ("Yes.", False, "", "Yes."),
    ("<thin", False, "", "<thin"),
    ("<think>a < b </thin", False, "a < b </thin", ""),
]


@pytest.mark.parametrize(("text", "inside", "thought", "content"), THOUGHTS)
@settings(max_examples=10)
@given(places=st.lists(st.integers(0, 1 << 16), max_size=8))
def test_thoughts_are_separated(text, inside, thought, content, places):
    """Whether the model or the prompt begins them, and whether they end."""
    parts = _read(OutputFormat(thinks=True, is_thinking=inside), _cut(text, places))
    assert "".join(part.text for part in parts if part.kind == "reasoning") == thought
    assert "".join(part.text for part in parts if part.kind == "content") == content


def test_required_calls():
    """A named function's text is its arguments, and a list of calls is parsed, piece by piece."""
    parts = _read(OutputFormat(function="f"), ['{"a"', ": 1}"])
    assert parts == [Part("call", "", "f"), Part("arguments", '{"a": 1}')]
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    calls = _read(OutputFormat(calls=True), [text])
    assert calls == [
        Part("call", "", "f"),
        Part("arguments", '{"a": 1}'),
        Part("call", "", "g"),
        Part("arguments", "{}"),
    ]
    assert _read(OutputFormat(calls=True), [text[:20]]) == []
