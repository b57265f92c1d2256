"""Model directories in both directions with `transformers`, and equal text."""

from __future__ import annotations

import inspect
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from tilewise.checkpoint import open_weights, save_pretrained
from tilewise.data import train_tokenizer
from tilewise.generate import Sampling
from tilewise.models.llama import LlamaConfig
from tilewise.serve import Engine
from tilewise.session import assemble

PROMPTS = [
    "def main(argv):\n    ",
    "import os",
    "class Reader:\n    def read(self, size=-1):\n        return self._buffer",
]
GREEDY = Sampling(max_tokens=64)


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-pair tokenizer of 512 entries."""
    return train_tokenizer([inspect.getsource(module) for module in (inspect, np.lib.stride_tricks)], 512)


def hf_config(**changes):
    """A small Llama for transformers."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    return transformers.LlamaConfig(**{**sizes, **changes})


def write_theirs(directory, tokenizer, seed=0, **changes):
    """A seeded model written by transformers, with weights so large that the top two logits differ clearly."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(hf_config(**changes)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 0.2 if "embed" not in name else 1.0)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def their_greedy(model, ids, count):
    """Greedy tokens of transformers, and the smallest margin between the top two logits."""
    margin = np.inf
    out = list(ids)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([out])).logits[0, -1]
            top = torch.topk(logits, 2).values
            margin = min(margin, float(top[0] - top[1]))
            out.append(int(logits.argmax()))
    return out[len(ids) :], margin


def our_tokens(directory, prompts, sampling=GREEDY, **options):
    """New tokens per prompt, and the first row of logits of the last call."""
    with Engine(directory, **{"dtype": "bf16", "max_num_seqs": len(prompts), **options}) as engine:
        tokens = [[] for _ in prompts]
        for delta in engine.stream(prompts, sampling):
            tokens[delta.sequence].append(delta.token)
        return tokens, engine.model.instance.get_tensor("logits")[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 8},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["grouped", "tied", "llama3-rope"],
)
def test_a_directory_of_transformers_here(tmp_path, tokenizer, changes):
    """fp32 logits within 1e-4 of the largest, 64 equal greedy tokens, for a prompt read in chunks."""
    model = write_theirs(tmp_path / "model", tokenizer, seed=1, **changes)
    ids = tokenizer.encode(PROMPTS[2]).ids
    expected, margin = their_greedy(model, ids, 64)
    assert margin > 1e-3
    tokens, last = our_tokens(tmp_path / "model", [PROMPTS[2]], dtype="f32", max_num_batched_tokens=7)
    assert tokens == [expected]
    with torch.no_grad():
        logits = model(torch.tensor([ids + expected[:-1]])).logits[0, -1].numpy()
    assert np.abs(last - logits).max() <= 1e-4 * np.abs(logits).max()


@pytest.mark.parametrize("dtype", [np.float32, "bf16"], ids=["f32", "bf16"])
def test_our_directory_in_transformers(tmp_path, tokenizer, dtype):
    """transformers opens our directory: equal configuration, every tensor to the bit, equal text."""
    theirs = write_theirs(tmp_path / "theirs", tokenizer)
    config = LlamaConfig.from_pretrained(tmp_path / "theirs")
    weights = open_weights(tmp_path / "theirs")
    as_stored = ml_dtypes.bfloat16 if dtype == "bf16" else dtype
    save_pretrained(
        tmp_path / "ours",
        config.to_dict(),
        ((n, np.asarray(w).astype(as_stored)) for n, w in weights.items()),
        tokenizer,
    )
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    state = theirs.state_dict()
    for name, tensor in again.state_dict().items():
        expected = state[name].bfloat16().float() if dtype == "bf16" else state[name]
        assert torch.equal(tensor, expected), name
    ids = tokenizer.encode(PROMPTS[0]).ids
    assert our_tokens(tmp_path / "ours", [PROMPTS[0]], dtype="f32")[0] == [their_greedy(again, ids, 64)[0]]


def test_a_dropped_partial_value_changes_the_bits(tmp_path, tokenizer, monkeypatch):
    """Two devices compute the logits of one to the bit; without one partial value they do not."""
    write_theirs(tmp_path / "model", tokenizer)
    expected, dropped = our_tokens(tmp_path / "model", [PROMPTS[0]], dtype="f32")[1], []
    two_devices = {"dtype": "f32", "tensor_parallel_size": 2}
    assert np.array_equal(our_tokens(tmp_path / "model", [PROMPTS[0]], **two_devices)[1], expected)

    class Dropping(assemble.Program):
        def add_instr(self, device, template, instruction, first_signal):
            if instruction.label == "linear:self_attn.o_proj.weight/reduce_scatter" and device == 0:
                *others, last, _ = instruction.operands
                instruction = replace(instruction, operands=(*others, last, last))
                dropped.append(instruction)
            super().add_instr(device, template, instruction, first_signal)

    monkeypatch.setattr(assemble, "Program", Dropping)
    logits = our_tokens(tmp_path / "model", [PROMPTS[0]], **two_devices)[1]
    assert dropped and not np.array_equal(logits, expected)
