"""Training any family from a configuration file, from nothing or from a model directory, and going on with it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from native.models.families import Case
from native.train.small_run import run, silent, write_texts
from tilewise import Engine, SamplingParams, models
from tilewise.checkpoint import open_weights, write_weights
from tilewise.core import CheckpointError, ConfigError, DeviceMesh
from tilewise.data import train_tokenizer
from tilewise.encode import Encoder
from tilewise.train import (
    Trainer,
    check_config,
    compare_strategy,
    make_model_config,
    make_plan,
    prepare_data,
    read_metrics,
)

SIZES = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8},
    "bert": {},
}
SHARED = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4}


def section(family):
    """`[model]` of a small model."""
    sizes = GPT2 if family == "gpt2" else {**SHARED, **SIZES[family]}
    return {"model_type": family, "vocab_size": 300, **sizes}


def configuration(texts, output, model, **data):
    """A run of twelve steps over two devices."""
    content = {
        "model": model,
        "data": {"path": str(texts), "context": 32, "held_out_percent": 20.0, **data},
        "train": {"steps": 12, "batch": 4, "leaves": 4, "dtype": "f32"},
        "optimizer": {"warmup_steps": 2, "lr": 1e-2},
        "distribution": {"strategy": "ddp", "mesh": {"dp": 2}},
        "output": {"directory": str(output), "checkpoint_every": 6},
    }
    return check_config(content, "a test")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*SIZES, "gpt2"])
def test_a_family_is_trained_and_opened_again(family, texts, tmp_path):
    """The loss falls; the directory is one that transformers opens, and that writes or encodes."""
    documents = "padded" if family in ("qwen3", "bert") else "packed"
    run(configuration(texts, tmp_path, section(family), documents=documents))
    losses = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert np.mean(losses[-3:]) < losses[0] - 0.3
    directory = tmp_path / "model"
    if family == "bert":
        theirs = transformers.BertForMaskedLM.from_pretrained(directory)
        with Encoder(directory) as encoder:
            assert encoder.encode(["def f(x):"]).shape == (1, 32)
    else:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
        with Engine(directory, dtype="f32", tensor_parallel_size=2) as engine:
            assert list(engine.stream(["def f(x):"], SamplingParams(max_tokens=4)))
    assert theirs.num_parameters() == models.num_parameters(models.open(directory))


@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_verify_takes_any_family(family, texts, tmp_path):
    """`tilewise verify` compares a strategy of what the configuration names."""
    config = configuration(texts, tmp_path, section(family), documents="padded")
    assert compare_strategy(config, DeviceMesh({"dp": 2, "tp": 2}), 2, lambda text: None).equal


def test_training_starts_from_a_model_directory(texts, tmp_path):
    """Its weights and its tokenizer; the first loss is that of the model, and the last one lower."""
    tokenizer = train_tokenizer([path.read_text() for path in sorted(texts.rglob("*.py"))], vocab_size=290)
    model = Case("start", "qwen2", {"num_key_value_heads": 2, "eos_token_id": 0}).model(vocab_size=290)
    model.save_pretrained(tmp_path / "start")
    tokenizer.save(str(tmp_path / "start" / "tokenizer.json"))
    config = configuration(texts, tmp_path / "run", {"path": str(tmp_path / "start")})
    run(config)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    batch = prepare_data(config, silent()).batches.at(0)
    tokens, labels = (torch.tensor(batch[name], dtype=torch.long) for name in ("tokens", "labels"))
    with torch.no_grad():
        logits = model(tokens).logits
    first = torch.nn.functional.cross_entropy(logits.reshape(-1, 290), labels.reshape(-1)).item()
    assert losses[0] == pytest.approx(first, rel=1e-4) and losses[-1] < first
    assert open_weights(tmp_path / "run" / "model").keys() == open_weights(tmp_path / "start").keys()
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["model_type"] == "qwen2"


def test_a_directory_that_is_no_model_is_refused_before_memory_is_taken(
    texts, tmp_path, monkeypatch, thread_count
):
    """Weights that do not belong to the configuration, and numbers in them that are none; no thread is left behind."""
    tokenizer = train_tokenizer([path.read_text() for path in sorted(texts.rglob("*.py"))], vocab_size=290)
    model = Case("start", "qwen2", {"num_key_value_heads": 2, "eos_token_id": 0}).model(vocab_size=290)
    model.save_pretrained(tmp_path / "start")
    tokenizer.save(str(tmp_path / "start" / "tokenizer.json"))
    config = configuration(texts, tmp_path / "run", {"path": str(tmp_path / "start")})
    data, (graph, plan) = prepare_data(config, silent()), make_plan(config)
    weights = {name: np.array(tensor) for name, tensor in open_weights(tmp_path / "start").items()}
    weights["model.norm.weight"][0] = np.nan
    write_weights(tmp_path / "start", weights.items())
    threads = thread_count()
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        Trainer(config, data, graph, plan)
    assert thread_count(threads) <= threads
    weights.pop("model.norm.weight")
    write_weights(tmp_path / "start", weights.items())
    monkeypatch.setattr(graph, "instantiate", lambda plan: pytest.fail("memory was taken"))
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        Trainer(config, data, graph, plan)


def test_settings_beside_a_path_are_refused(tmp_path):
    """The directory says everything about the model."""
    with pytest.raises(ConfigError, match="no settings of its own, got 'hidden_size'"):
        check_config({"model": {"path": "x", "hidden_size": 3}}, "a test")
    with pytest.raises(ConfigError, match="model_type must be one of"):
        configuration(tmp_path, tmp_path, {"model_type": "mamba"}).what_must_match()
    with pytest.raises(ConfigError, match="begins and ends documents with id 0"):
        make_model_config(configuration(tmp_path, tmp_path, {**section("llama"), "eos_token_id": 5}))
