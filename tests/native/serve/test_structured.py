"""Texts that follow schemas, expressions, choices and grammars, with a model of random weights."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from native.serve.serving_models import TEXTS, save_model
from tilewise.core import ConfigError
from tilewise.serve import LLM, SamplingParams, StructuredOutputsParams
from tilewise.serve.structured import Grammar

SCALARS = ("string", "integer", "number", "boolean", "null", "enum", "const", "pattern")
CHOICES = ["é", 'a"b\\', "x\ny", "/", "日本", "a.b", "\x07", "ab"]


@pytest.fixture(scope="module")
def llm(model_dir):
    with LLM(model_dir, dtype="f32", max_num_seqs=8) as made:
        yield made


def random_schema(rng, depth=2):
    """A random schema whose texts are bounded."""
    kind = rng.choice(SCALARS if depth == 0 else (*SCALARS, "object", "object", "array", "anyOf"))
    if kind == "string":
        low = rng.randint(0, 2)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 4)}
    if kind in ("integer", "number"):
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["a", "b c", 'q"', 1, 2.5, None, True, [1, "x"]], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice([0, "é", {"k": [1]}, False])}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-z]{1,3}$", "^(ab|cd){2}$", "^[0-9]{4}-[01][0-9]$"]),
        }
    if kind == "array":
        low = rng.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(rng, depth - 1),
            "minItems": low,
            "maxItems": low + rng.randint(0, 2),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    names = rng.sample(["a", "name", "größe", "x y", "z"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def write(llm, schemas):
    """A text for each."""
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=200,
            seed=number,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        )
        for number, schema in enumerate(schemas)
    ]
    return [output.outputs[0] for output in llm.generate(["import"] * len(schemas), params)]


def count_valid(llm, count):
    """Number of schemas whose text ended; each of those texts is valid under its schema."""
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(count)]
    num_ended = 0
    for schema, text in zip(schemas, write(llm, schemas)):
        if text.finish_reason == "stop":
            jsonschema.validate(json.loads(text.text), schema)
            num_ended += 1
    return num_ended


def test_texts_are_valid_under_their_schemas(llm):
    """For 530 random schemas every text is valid, except the few that 200 tokens cut."""
    assert count_valid(llm, 530) >= 500


def test_without_the_grammar_texts_are_invalid(llm, monkeypatch):
    """The twin: a mask that allows everything is detected."""
    monkeypatch.setattr(Grammar, "allowed", lambda self: np.ones(1 << 20, np.uint8))
    monkeypatch.setattr(Grammar, "take", lambda self, token: None)
    schemas = [{"type": "boolean"}] * 3
    assert [text.text in ("true", "false") for text in write(llm, schemas)] == [False] * 3


def one(llm, seed=0, temperature=1.0, **kind):
    params = SamplingParams(
        temperature=temperature,
        max_tokens=120,
        seed=seed,
        structured_outputs=StructuredOutputsParams(**kind),
    )
    return llm.generate("import", params)[0].outputs[0]


@pytest.mark.parametrize("seed", range(3))
def test_each_kind(llm, seed):
    """Expressions match the whole text, choices are exact, grammars derive it, objects parse."""
    completion = one(llm, seed, regex=r"[a-c]{3}[0-9]{1,4}x?")
    assert re.fullmatch(r"[a-c]{3}[0-9]{1,4}x?", completion.text) and completion.finish_reason == "stop"
    assert one(llm, seed, choice=CHOICES).text in CHOICES
    grammar = 'start: "a" b "c"\nb: "x" | "yy" b'
    assert re.fullmatch("a(yy)*xc", one(llm, seed, grammar=grammar).text)
    completion = one(llm, seed, json_object=True, disable_any_whitespace=True)
    assert completion.text.startswith("{")
    assert completion.finish_reason == "length" or isinstance(json.loads(completion.text), dict)


def test_whitespace_pattern(llm):
    """`whitespace_pattern` matches everything between parts of JSON."""
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    completion = one(llm, json=schema, whitespace_pattern="  ")
    assert "  " in completion.text
    assert re.fullmatch(r"\[(  )?(true|false)(  )?,(  )?(true|false)(  )?\]", completion.text)


@pytest.mark.parametrize(("regex", "beginning"), [("no", "no"), ("a+", "a" * 20)])
def test_a_complete_grammar_ends_a_text_before_min_tokens(llm, regex, beginning):
    """`min_tokens` suppresses end tokens; if the grammar allows nothing else, the text still ends."""
    grammar = StructuredOutputsParams(regex=regex)
    params = SamplingParams(temperature=0, min_tokens=20, max_tokens=30, structured_outputs=grammar)
    assert llm.generate("import", params)[0].outputs[0].text.startswith(beginning)


def test_structured_texts_do_not_depend_on_other_requests(llm):
    """Alone, among others, and as several texts of one prompt: the same tokens."""
    kinds = (
        {"regex": "[a-f]{30}"},
        {"json": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 9}},
        {"choice": CHOICES},
    )
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=60, seed=5, structured_outputs=StructuredOutputsParams(**k), n=n
        )
        for k in kinds
        for n in (1, 3)
    ]
    prompts = [TEXTS[number % 3] for number in range(len(params))]
    together = [output.outputs for output in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, each)[0].outputs for prompt, each in zip(prompts, params)]
    assert together == alone
    assert len({text.text for text in together[1]}) > 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"regex": "(a{1000}){1000}"}, "too many expressions"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"grammar": 'root ::= "a"'}, "Lark's syntax.*; got line 1, column 7: Expected"),
        ({"regex": r"\d+("}, r"Rust's syntax.*; got the regular expression \\d\+\(: unclosed group; correct"),
        ({"regex": "(?=a)a+"}, r"look-around, .* is not supported; correct or simplify it"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": {"$ref": "http://example.org/schema.json"}}, "does not fetch|not present"),
        ({"json": {"enum": [str(number) for number in range(100_000)]}}, "too big"),
        ({"json": {"$ref": "#"}}, "matches no text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_grammars_are_rejected_before_any_work(llm, kind, words):
    """The caller gets the reason, and the engine gets no request."""
    with pytest.raises(ConfigError, match=words):
        one(llm, **kind)
    assert one(llm, choice=["ok"]).text == "ok"


def test_a_grammar_that_becomes_too_complex_ends_only_its_request(llm):
    """Limits apply in steps, too: one request fails, the other's text is unchanged."""
    params = SamplingParams(max_tokens=20, seed=2)
    bomb = SamplingParams(structured_outputs=StructuredOutputsParams(regex="c(a{1000}){1000}"))
    expected = llm.generate("import", params)[0].outputs
    requests = llm.engine.requests(["import", "import"], [params, bomb])
    queue = []
    llm.engine.submit(requests, queue.append)
    llm.generate("x", SamplingParams(max_tokens=60, ignore_eos=True))  # longer than both
    (error,) = [event for event in queue if isinstance(event, BaseException)]
    assert isinstance(error, ConfigError) and "limits of work" in str(error)
    tokens = [event.token for event in queue if not isinstance(event, BaseException)]
    assert tokens == expected[0].token_ids


def test_a_model_without_an_end_token_is_rejected(tmp_path):
    """A grammar cannot end there."""
    with (
        LLM(save_model(tmp_path / "endless", eos_token_ids=()), dtype="f32") as endless,
        pytest.raises(ConfigError, match="need an end token"),
    ):
        one(endless, choice=["a"])
