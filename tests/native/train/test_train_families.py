"""Training any family from a configuration file, from scratch or from a model directory, and using the result."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from native.models.families import Case
from native.train.small_run import run, silent
from tilewise import Engine, SamplingParams, models
from tilewise.checkpoint import cast_tensors, checkpoint_paths, open_checkpoint, open_weights, write_weights
from tilewise.cli.convert import convert_checkpoint
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
        "train": {"steps": 12, "batch": 4, "batch_splits": 4, "dtype": "f32"},
        "optimizer": {"warmup_steps": 2, "lr": 1e-2},
        "distribution": {"strategy": "ddp", "mesh": {"dp": 2}},
        "output": {"directory": str(output), "checkpoint_every": 6},
    }
    return check_config(content, "a test")


def save_start(directory, texts, dtype="float32"):
    """Save a model directory to train from; returns the model. `mixed` is bf16 with one fp32 weight."""
    tokenizer = train_tokenizer([path.read_text() for path in sorted(texts.rglob("*.py"))], vocab_size=290)
    model = Case("start", "qwen2", {"num_key_value_heads": 2, "eos_token_id": 0}).model(vocab_size=290)
    model = model.to(torch.bfloat16 if dtype == "mixed" else getattr(torch, dtype))
    if dtype == "mixed":
        model.model.norm = model.model.norm.to(torch.float32)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", [*SIZES, "gpt2"])
def test_a_trained_family_can_be_opened(family, texts, tmp_path):
    """The loss falls; transformers opens the directory, and it generates or encodes."""
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
def test_verify_accepts_any_family(family, texts, tmp_path):
    """`tilewise verify` compares a strategy of the configuration's model."""
    config = configuration(texts, tmp_path, section(family), documents="padded")
    assert compare_strategy(config, DeviceMesh({"dp": 2, "tp": 2}), 2, lambda text: None).equal


def test_training_starts_from_a_model_directory(texts, tmp_path):
    """Its weights and tokenizer; the first loss is the model's, and the last one lower."""
    model = save_start(tmp_path / "start", texts)
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


CARRIED = {
    "tokenizer_config.json": '{"eos_token": "<end>", "bos_token": "", "chat_template": "x", "padding_side": "left"}',
    "special_tokens_map.json": '{"eos_token": "<end>"}',
    "generation_config.json": '{"temperature": 0.6, "do_sample": true, "eos_token_id": [0, 1], "style": 3}',
    "chat_template.jinja": "{{ messages[0].content }}\n",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "tokenizer.model": "\u0000",
    "tekken.json": "{}",
    "modeling_start.py": "raise SystemExit",
}


@pytest.mark.parametrize(
    ("stored", "output_dtype"),
    [("bfloat16", "fp32"), ("float16", None), ("mixed", None), ("float32", "float16")],
)
def test_a_finetuned_model_keeps_its_files_and_dtypes(stored, output_dtype, texts, tmp_path):
    """Every other file is equal to the byte, config.json except for the dtype of `output.dtype`;
    weights are the fp32 masters rounded to their source dtypes; `checkpoint convert` writes the
    same, even without the source; and the model runs in its stored dtype.
    """
    start, out = tmp_path / "start", tmp_path / "run"
    save_start(start, texts, stored)
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"initializer_range": 0.017, "num_notes": 3}))
    for name, content in CARRIED.items():
        (start / name).parent.mkdir(exist_ok=True)
        (start / name).write_text(content)
    named = {"path": str(start), "ignore_config_fields": ["num_notes"]}
    base_config = configuration(texts, out, named, held_out_percent=0)
    changes = {
        "output": {"dtype": output_dtype, "directory": str(out)},
        "train": {"steps": 2, "batch": 4, "batch_splits": 4},
    }
    run(
        check_config(
            {**base_config.model_dump(exclude_defaults=True), **changes, "distribution": {}}, "a test"
        )
    )
    files = {
        path.relative_to(start).as_posix(): path.read_bytes()
        for path in start.rglob("*")
        if path.is_file() and path.name != "model.safetensors"
    }
    assert {*CARRIED, "config.json", "tokenizer.json"} == files.keys()
    dtypes = {name: tensor.dtype for name, tensor in open_weights(start).items()}
    shutil.rmtree(start)
    convert_checkpoint(out, tmp_path / "converted", None, None, silent())
    for directory in (out / "model", tmp_path / "converted"):
        for name in files.keys() - {"config.json"}:
            assert (directory / name).read_bytes() == files[name], name
        saved = json.loads((directory / "config.json").read_text())
        kind = {None: config["dtype"], "fp32": "float32", "float16": "float16"}[output_dtype]
        assert saved == json.loads(files["config.json"]) | {"dtype": kind}
        masters = open_checkpoint(checkpoint_paths(out / "checkpoints")[-1]).tensors
        written = open_weights(directory)
        assert written.keys() == dtypes.keys()
        for name, tensor in written.items():
            expected = dtypes[name] if output_dtype is None else np.dtype(getattr(ml_dtypes, kind, kind))
            master = np.asarray(masters[name.removeprefix("model.")])
            assert master.dtype == np.float32 and tensor.dtype == expected
            assert np.array(tensor).tobytes() == master.astype(expected).tobytes()
    with Engine(out / "model", ignore_config_fields=["num_notes"]) as engine:
        assert engine.model.dtype == ("f32" if kind == "float32" else "bf16")


def test_a_weight_beyond_its_dtype_is_an_error():
    """A float16 would be infinite; the message names the weight and the option."""
    weights = {"a": np.array([1.0, 70000.0], np.float32), "b": np.array([np.inf, 1e30], np.float32)}
    cast = cast_tensors(weights, {"a": "F16", "b": "BF16"})
    assert np.isinf(np.asarray(cast["b"])[0])
    with pytest.raises(CheckpointError, match=r"70000.* in 'a'; .*output\.dtype"):
        np.asarray(cast["a"])


def test_output_dtype_of_a_new_model(texts, tmp_path):
    """fp32 by default, bf16 with `output.dtype`, as in its config.json."""
    config = configuration(texts, tmp_path, section("llama"), held_out_percent=0).model_dump(
        exclude_defaults=True
    )
    changes = {"output": {"dtype": "bfloat16", "directory": str(tmp_path)}, "train": {"steps": 1, "batch": 8}}
    run(check_config({**config, **changes, "distribution": {}}, "a test"))
    assert {str(tensor.dtype) for tensor in open_weights(tmp_path / "model").values()} == {"bfloat16"}
    assert models.open(tmp_path / "model").dtype == "bfloat16"


def test_an_invalid_model_directory_is_rejected_before_allocation(texts, tmp_path, monkeypatch, thread_count):
    """Weights that do not match the configuration, or are not finite; no thread remains."""
    save_start(tmp_path / "start", texts)
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


def test_settings_next_to_a_path_are_rejected(tmp_path):
    """The directory determines the model."""
    with pytest.raises(ConfigError, match="excludes other settings of the model, got 'hidden_size'"):
        check_config({"model": {"path": "x", "hidden_size": 3}}, "a test")
    with pytest.raises(ConfigError, match="model_type must be one of"):
        configuration(tmp_path, tmp_path, {"model_type": "mamba"}).what_must_match()
    with pytest.raises(ConfigError, match="begins and ends documents with id 0"):
        make_model_config(configuration(tmp_path, tmp_path, {**section("llama"), "eos_token_id": 5}))
