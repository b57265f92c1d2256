"""Commands with a GGUF file as the model: text, evaluation, description, conversion."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from native.serve.serving_models import CHAT_TEMPLATE, TEXTS
from support.gguf_models import byte_level_vocabulary, small_model, write_model
from tilewise import models
from tilewise.checkpoint import load_tokenizer, open_weights
from tilewise.data import END_OF_TEXT, train_tokenizer
from tilewise.serve import LLM, SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama of several types in a file, the weights that it means, and its tokenizer."""
    path = tmp_path_factory.mktemp("model") / "m.Q8_0.gguf"
    tokenizer = train_tokenizer(TEXTS * 5, vocab_size=320)
    vocabulary = byte_level_vocabulary(tokenizer, "gpt-2", [END_OF_TEXT])
    vocabulary |= {"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": CHAT_TEMPLATE}
    vocabulary |= {"general.name": "Small\nLlama", "general.license": "mit"}
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "num_hidden_layers": 2}
    kinds = {"q_proj": Kind.Q4_0, "down_proj": Kind.F16, "o_proj": Kind.BF16}
    weights = write_model(
        path,
        small_model("llama", **sizes),
        lambda name, values: next((kind for part, kind in kinds.items() if part in name), Kind.Q8_0),
        vocabulary=vocabulary,
    )
    return path, weights, tokenizer


def test_a_converted_file_is_the_same_model(model, run, tmp_path):
    """The directory has the bits of the dequantised weights, and the tokenizer; both write the same."""
    path, weights, tokenizer = model
    code, _, problems = run("checkpoint", "convert", path, tmp_path / "out")
    assert code == 0, problems
    converted = open_weights(tmp_path / "out")
    assert {*converted} == {*weights}
    for name, values in weights.items():
        np.testing.assert_array_equal(np.asarray(converted[name]).view(np.uint16), values.view(np.uint16))
    assert models.open(tmp_path / "out") == models.open(path)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    text = "def f(x):\n  return ['ünï', 12]"
    theirs = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for written in (theirs, load_tokenizer(path, 320)):
        assert written.encode(text).ids == tokenizer.encode(text).ids
    outputs = []
    for place in (path, tmp_path / "out"):
        code, text, _ = run("generate", place, "def f", "--max-tokens", 12, "--temperature", 0)
        assert code == 0 and text
        outputs.append(text)
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_a_file_evaluates_as_its_converted_directory(model, run, tmp_path):
    """The same loss, to the last digit."""
    (tmp_path / "texts.py").write_text("def f(x):\n    return x\n" * 9)
    assert run("checkpoint", "convert", model[0], tmp_path / "out")[0] == 0
    results = []
    for place in (model[0], tmp_path / "out"):
        code, output, problems = run("evaluate", place, tmp_path / "texts.py", "--context", 32)
        assert code == 0, problems
        results.append([line for line in output.splitlines() if "tokens in" not in line])
    assert results[0] == results[1] and results[0]


def test_inspect_shows_types_and_metadata(model, run):
    """Bytes by type, what the file says of itself on one line each, the tokenizer."""
    path, _, tokenizer = model
    code, output, problems = run("inspect", path, "--bandwidth-gbps", 10, "--peak-tflops", 1)
    assert code == 0, problems
    lines = output.splitlines()
    assert "architecture: LlamaForCausalLM (llama)" in lines
    stored = next(line for line in lines if line.startswith("stored as: "))
    assert [part.split()[0] for part in stored.removeprefix("stored as: ").split(", ")] == [
        "bfloat16",
        "float16",
        "float32",
        "q4_0",
        "q8_0",
    ]
    assert r"name: Small\nLlama" in lines and "license: mit" in lines
    assert any(line.startswith("GGUF: 1 file, ") for line in lines)
    ends = [
        line
        for line in lines
        if line.startswith(f"tokenizer: gpt2 (gpt-2), {tokenizer.get_vocab_size()} tokens, texts end at ")
    ]
    assert len(ends) == 1 and ends[0].endswith("with chat template")


def test_conversations_use_the_template_of_the_file(model):
    """A chat is the completion of the rendered template, and stops at the file's end token."""
    path, _, tokenizer = model
    with LLM(str(path), dtype="f32", max_num_seqs=2) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=6)
        (answer,) = llm.chat([[{"role": "user", "content": "def f"}]], greedy)
        (expected,) = llm.generate(["user: def f\nassistant:"], greedy)
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        assert answer.prompt_token_ids == tokenizer.encode("user: def f\nassistant:").ids
        assert llm.engine.model.end_ids == {0}


def test_several_files_are_listed(model, run, tmp_path):
    """A directory of two quantisations names both."""
    for name in ("m-Q8_0.gguf", "m-Q4_0.gguf"):
        (tmp_path / name).write_bytes(model[0].read_bytes())
    code, _, problems = run("generate", tmp_path, "x")
    assert code == 2 and "'m-Q4_0.gguf', 'm-Q8_0.gguf'; name one of these files" in problems
