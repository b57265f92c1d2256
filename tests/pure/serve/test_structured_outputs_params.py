"""Arguments of structured outputs: one kind, well formed, of a bounded size."""

import contextlib

import pytest

from pure.hostile import FROM_JSON
from tilewise.core import ConfigError
from tilewise.serve import SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "one of json, json_object, regex, choice, grammar must be set; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"json": "{"}, "must be a JSON schema"),
        ({"json": {"a": float("nan")}}, "must be a JSON schema"),
        ({"json": "[" * 100_000}, "must be a JSON schema"),
        ({"json": {"maximum": 10**400}}, "readable by llguidance"),
        ({"regex": ""}, "non-empty"),
        ({"regex": "\ud800"}, "UTF-8"),
        ({"choice": []}, "must not be empty"),
        ({"choice": ["a", ""]}, "choice.1 must be non-empty"),
        ({"regex": "a", "disable_any_whitespace": True}, "need json or json_object"),
        (
            {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "excludes whitespace_pattern",
        ),
        ({"regex": "a" * 2_000_000}, "at most"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_arguments_are_named(arguments, words):
    """Before a model exists."""
    with pytest.raises(ConfigError, match=words):
        StructuredOutputsParams(**arguments)


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar", "whitespace_pattern", "json_object"])
def test_hostile_values_are_rejected_or_accepted(name):
    """Any value is valid or a ConfigError."""
    for value in FROM_JSON:
        with contextlib.suppress(ConfigError):
            StructuredOutputsParams(**{name: value})


def test_equal_arguments_are_equal():
    """A schema as a dictionary or as its text; lists as tuples: compiled once."""
    same = [StructuredOutputsParams(json=schema) for schema in ({"type": "null"}, '{"type": "null"}')]
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    assert len({StructuredOutputsParams(choice=["a", "b"]), StructuredOutputsParams(choice=("a", "b"))}) == 1


def test_ignore_eos_is_rejected():
    """It contradicts a structure that ends."""
    with pytest.raises(ConfigError, match="end with their grammar"):
        SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(ConfigError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})
