"""Sampling settings from generation_config.json and the caller."""

import pytest

from tilewise.core import ConfigError
from tilewise.generate import Sampling, combine_settings

SAMPLES = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("file", "options", "expected"),
    [
        ({}, {}, {}),
        ({}, {"temperature": 0.8}, {"temperature": 0.8}),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 5}, {}, {}),  # do_sample false: greedy
        ({"do_sample": False, **{"temperature": 0.6}}, {}, {}),
        ({"do_sample": True}, {}, {"temperature": 1.0, "top_k": 50}),
        (SAMPLES, {}, {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}),
        ({**SAMPLES, "top_k": 0}, {}, {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}),
        (SAMPLES, {"temperature": 0.0}, {"repetition_penalty": 1.1}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}),
        (SAMPLES, {"top_k": 3, "top_p": 1.0, "repetition_penalty": 1.0}, {"temperature": 0.6, "top_k": 3}),
        ({"max_new_tokens": 9, "max_length": 99}, {}, {"max_tokens": 9}),
        ({"max_length": 30}, {}, {"max_tokens": 20}),
        ({"max_length": 5}, {"max_tokens": 7}, {"max_tokens": 7}),
        ({"min_length": 15}, {}, {"min_tokens": 5}),
        ({"min_length": 3}, {}, {}),
        ({"min_length": 15, "min_new_tokens": 2}, {}, {"min_tokens": 2}),
        ({}, {"min_tokens": 200}, {"min_tokens": 200, "max_tokens": 200}),
        ({"max_new_tokens": 300}, {"min_tokens": 200}, {"min_tokens": 200, "max_tokens": 300}),
        ({"stop_strings": "x"}, {}, {"stop": ("x",)}),
        ({"stop_strings": ["x", "y"]}, {"stop": ()}, {}),
        ({"bad_words_ids": [[1], [2, 3]]}, {}, {"bad_words_ids": ((1,), (2, 3))}),
        ({"do_sample": True, "num_return_sequences": 3, "top_k": 0}, {}, {"temperature": 1.0, "n": 3}),
        ({"num_return_sequences": 3}, {"seed": 5}, {"seed": 5}),
        ({"eos_token_id": 3, "bos_token_id": 1}, {}, {}),
    ],
)
def test_caller_takes_precedence_over_the_file(file, options, expected):
    """As transformers applies the file's settings; the log lists those taken from the file."""
    sampling, taken = combine_settings(file, options, 10)
    assert sampling == Sampling(**expected)
    left = {name: value for name, value in expected.items() if name not in options and value != 200}
    assert {name: getattr(sampling, name) for name in taken} == left


def test_long_prompts_and_unknown_settings_are_rejected():
    """The file's length includes the prompt; if no token is left, none is generated."""
    with pytest.raises(ConfigError, match=r"max_length 10; got 10 tokens"):
        combine_settings({"max_length": 10}, {}, 10)
    with pytest.raises(ConfigError, match="a setting must be one of"):
        combine_settings({}, {"heat": 1}, 1)
