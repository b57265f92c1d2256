"""llama.cpp opens the GGUF files that Tilewise writes, and continues prompts with the same tokens.

llama.cpp rounds activations to bf16 or to 8 bits, so its logits differ slightly. Tokens must be equal
wherever the best two logits differ by more than that.
"""

from __future__ import annotations

import bisect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from native.models.families import CASES, our_logits
from tilewise import LLM, SamplingParams
from tilewise.cli.main import _run
from tilewise.data import train_tokenizer
from tilewise.formats.quantise import quantise, quantised_format

pytestmark = pytest.mark.soak
NUM_TOKENS = 24
MINUTES_TO_BUILD = 60
TEXTS = ["def f(x):\n    return", "class Stack:\n    pass\n" * 8, "import"] * 5
PROMPT = "def f(x):\n    return class Stack:\n    pass # é 日本" * 2
SIZES = {"hidden_size": 96, "intermediate_size": 64}
_PHI3 = {"num_attention_heads": 6, "num_key_value_heads": 3}
CHANGES = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    **dict.fromkeys(("phi3", "phi3-longrope", "phi3-partial"), _PHI3),
}
# llama.cpp has no windows and biases of these; the command line's tests cover that they are rejected
UNSUPPORTED = ("mistral-window", "qwen2-windows", "qwen3-biases")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
FILES = [case for case in CASES if case.family in FAMILIES and case.name not in UNSUPPORTED]
TOLERANCE = {"bf16": 0.03, "q8_0": 0.1, "q4_0": 0.1}  # of logits, root mean square
TRAINING = """
[model]
vocab_size = 512
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
tie_word_embeddings = false
[data]
path = "texts"
held_out_percent = 0.0
context = 128
[train]
steps = 250
batch = 4
[optimizer]
lr = 3e-3
warmup_steps = 20
[output]
directory = "out"
"""
SCRIPT = """
import json, sys
import llama_cpp, numpy as np
path, prompt, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = llama_cpp.Llama(path, n_ctx=256, n_threads=1, verbose=False, logits_all=True)
ids = model.tokenize(prompt.encode(), add_bos=True, special=True)
model.eval(ids)
made = []
while len(made) < count:
    made.append(int(np.argmax(model.scores[model.n_tokens - 1])))
    model.eval(made[-1:])
print(json.dumps({"ids": ids, "made": made, "logits": np.array(model.scores[: len(ids)]).tolist()}))
"""


@pytest.fixture(scope="session")
def llama_python(tmp_path_factory):
    """A Python of its own that has llama-cpp-python, compiled here unless pip has it in its cache."""
    folder = tmp_path_factory.mktemp("llama")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "llama-cpp-python", "numpy"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run(install, check=True, env=environment, timeout=60 * MINUTES_TO_BUILD)
    return python


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A model directory of every family, with a tokenizer."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=320)
    root = tmp_path_factory.mktemp("models")
    for number, case in enumerate(FILES):
        sizes = {**SIZES, "vocab_size": tokenizer.get_vocab_size(), **CHANGES.get(case.name, {})}
        changed = replace(case, changes={**case.changes, **sizes})
        changed.model().to(torch.bfloat16).save_pretrained(root / f"m{number}")
        tokenizer.save(str(root / f"m{number}" / "tokenizer.json"))
    return {case.name: root / f"m{number}" for number, case in enumerate(FILES)}, tokenizer


def rounded(directory, kind):
    """A directory whose weights are those that a GGUF file of this type means."""
    if kind == "bf16":
        return directory
    target = directory.with_name(f"{directory.name}-{kind}")
    target.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (target / name).write_bytes((directory / name).read_bytes())
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            bits = 8 if kind == "q8_0" or "embed" in name or "lm_head" in name else 4
            blocks = quantise(tensor.astype(np.float32), bits, 32)
            tensors[name] = quantised_format(bits, 32).dequantise(blocks).astype(ml_dtypes.bfloat16)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("name", [case.name for case in FILES])
def test_llama_cpp_continues_with_the_same_tokens(llama_python, directories, tmp_path, name, kind):
    """Its tokens of the prompt are equal, its logits close, and its greedy tokens those of the best logit."""
    places, tokenizer = directories
    assert _run(["checkpoint", "convert", str(places[name]), str(tmp_path / "a.gguf"), "--type", kind]) == 0
    command = [llama_python, "-c", SCRIPT, tmp_path / "a.gguf", PROMPT, str(NUM_TOKENS)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ids, made = answer["ids"], answer["made"]
    assert ids == tokenizer.encode(PROMPT).ids
    ours = our_logits(rounded(places[name], kind), [*ids, *made], "f32")
    difference = ours[: len(ids)] - np.array(answer["logits"])
    error = np.sqrt(np.mean(difference**2) / np.mean(ours**2))
    ours = ours[len(ids) - 1 : -1]
    best = np.sort(ours, axis=1)
    is_clear = best[:, -1] - best[:, -2] > 2 * np.abs(difference).max()
    is_equal = ours.argmax(axis=1) == np.array(made)
    num_first = NUM_TOKENS if is_equal.all() else int(np.argmin(is_equal))
    print(f"{name} {kind}: error {error:.4f}, the first {num_first} tokens equal, {is_clear.sum()} clear")
    assert error < TOLERANCE[kind] and is_equal[is_clear].all() and is_equal.sum() > NUM_TOKENS // 2


def test_a_trained_model_has_the_same_greedy_text(llama_python, tmp_path):
    """A model that knows a file by heart continues it with the same tokens in all types."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text(
        Path(bisect.__file__).read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "train.toml").write_text(TRAINING, encoding="utf-8")
    assert _run(["train", str(tmp_path / "train.toml")]) == 0
    prompt = "def bisect_right(a, x, lo=0"
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    for kind in TOLERANCE:
        file = tmp_path / f"{kind}.gguf"
        assert (
            _run(["checkpoint", "convert", str(tmp_path / "out" / "model"), str(file), "--type", kind]) == 0
        )
        command = [llama_python, "-c", SCRIPT, file, prompt, str(NUM_TOKENS)]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        with LLM(file, dtype="bf16") as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.prompt_token_ids == answer["ids"]
        assert list(output.outputs[0].token_ids) == answer["made"]
