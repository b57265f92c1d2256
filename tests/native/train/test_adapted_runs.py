"""Runs that train adapters, or a part of a model: what they write, and how they resume."""

import json
from pathlib import Path
from shutil import copytree, rmtree

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from small_run import MODEL, make_config, run, silent, write_texts

from support.quantised_layers import gptq
from tilewise import models
from tilewise.checkpoint import latest_checkpoint, open_checkpoint, open_weights, save_pretrained
from tilewise.cli.main import _run
from tilewise.core import CheckpointError, ConfigError
from tilewise.data import load_corpus, train_tokenizer
from tilewise.train import Trainer, plan_run, prepare_data, run_training
from tilewise.train.train_config import load_config
from tilewise.train.trainer import make_plan

LORA = {"r": 4, "alpha": 8.0, "dropout": 0.2, "target_modules": "all-linear"}
BASE = {**MODEL, "model_type": "llama", "eos_token_id": 0}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"), 12)


@pytest.fixture(scope="module")
def base(texts, tmp_path_factory):
    """A model directory in fp32."""
    return save_base(tmp_path_factory.mktemp("models") / "base", texts, 0)


def save_base(directory, texts, seed):
    tokenizer = train_tokenizer([f.text for f in load_corpus(str(texts), 0.0).train], 300)
    config, rng = models.config_from_dict(BASE), np.random.default_rng(seed)
    weights = {n: rng.normal(0, 0.1, s).astype(np.float32) for n, s in models.parameter_shapes(config)}
    save_pretrained(directory, config.to_dict(), models.stored_tensors(config, weights), tokenizer)
    return directory


def tuned(texts, base, directory, mesh=None, **changes):
    """A run of six steps with a checkpoint after four."""
    model = {"model": {"path": str(base)}, "optimizer": {"warmup_steps": 0, "lr": 1e-2}}
    return make_config(texts, directory, mesh, **{**model, **changes})


def adapter_of(directory):
    return {
        n: np.array(t) for n, t in open_weights(directory / "adapter" / "adapter_model.safetensors").items()
    }


def same(a, b):
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


def with_steps(config, steps):
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_an_interrupted_run_resumes_to_the_bit(texts, base, tmp_path, mesh):
    """Four steps on one device, two on a mesh: the adapter of an uninterrupted run, with dropout and padded texts."""
    padded = {"documents": "padded", "held_out_percent": 0.0}
    whole = tuned(texts, base, tmp_path / "whole", lora=LORA, data=padded)
    run(whole)
    stop_after(plan_run(tuned(texts, base, tmp_path / "parts", lora=LORA, data=padded), False), 4)
    run(tuned(texts, base, tmp_path / "parts", mesh, lora=LORA, data=padded), resume=True)
    a, b = adapter_of(tmp_path / "whole"), adapter_of(tmp_path / "parts")
    assert same(a, b) and any(value.any() for name, value in a.items() if "lora_B" in name)


def stop_after(planned, steps):
    """Do some steps of a run and write a checkpoint, as Ctrl-C does."""
    data = prepare_data(planned.config, silent())
    with Trainer(planned.config, data, planned.graph, planned.plan) as trainer:
        for number in range(steps):
            trainer.step(number)
        trainer.save(Path(planned.config.output.directory) / "checkpoints", steps)
        trainer.finish_saving(silent())


def test_what_a_run_with_adapters_writes(texts, base, tmp_path):
    """Checkpoints have adapters alone; `convert` writes the run's adapter; a run may continue with it."""
    config = tuned(texts, base, tmp_path / "run", lora=LORA)
    result = run(config)
    assert result.model_dir == tmp_path / "run" / "adapter" and not (tmp_path / "run" / "model").exists()
    opened = open_checkpoint(latest_checkpoint(tmp_path / "run" / "checkpoints"))
    assert all("lora_" in name or name == "optimizer.step" for name in opened.tensors)
    assert _run(["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / "converted")]) == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "converted" / name).read_bytes() == (result.model_dir / name).read_bytes()
    more = tuned(
        texts, base, tmp_path / "more", lora={"path": str(result.model_dir), "dropout": 0.2}, steps=1
    )
    more = more.model_copy(update={"optimizer": more.optimizer.model_copy(update={"lr": 1e-30})})
    run(more)
    assert same(adapter_of(tmp_path / "more"), adapter_of(tmp_path / "run"))
    rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match="without an adapter"):
        run(config)


def quantised_and_plain(base, folder):
    """A quantised copy of a model, and one in bf16 with the numbers of its blocks."""
    config = {**json.loads((base / "config.json").read_text()), "hidden_size": 64, "intermediate_size": 128}
    rng, scheme, made, plain = np.random.default_rng(3), gptq(4, 32, 1), {}, {}
    for name, shape in models.parameter_shapes(models.config_from_dict(config)):
        stored = name if name.startswith("lm_head") else f"model.{name}"
        if "_proj" in name:
            tensors, weight = scheme.layer(rng, *shape)
            made.update({f"{stored.removesuffix('weight')}{part}": x for part, x in tensors.items()})
            plain[stored] = weight.astype(ml_dtypes.bfloat16)
        else:
            made[stored] = plain[stored] = rng.normal(0, 0.1, shape).astype(ml_dtypes.bfloat16)
    for kind, tensors, more in (
        ("quantised", made, {"quantization_config": scheme.config}),
        ("plain", plain, {}),
    ):
        copytree(base, folder / kind)
        (folder / kind / "config.json").write_text(json.dumps({**config, **more}))
        safetensors.numpy.save_file(
            {n: np.ascontiguousarray(x) for n, x in tensors.items()}, folder / kind / "model.safetensors"
        )
    return folder / "quantised", folder / "plain"


@pytest.mark.parametrize("mesh", [None, pytest.param({"fsdp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_a_quantised_base_stays_quantised(texts, base, tmp_path, mesh):
    """The adapter has the bits of one trained on the bf16 weights that the blocks mean, for less memory."""
    quantised, plain = quantised_and_plain(base, tmp_path)
    lora = {**LORA, "modules_to_save": ["lm_head"]}
    configs = [
        tuned(texts, path, tmp_path / name, axes, lora=lora, steps=3)
        for name, path, axes in (("a", quantised, mesh), ("b", plain, None), ("c", base, None))
    ]
    for config in configs[:2]:
        run(config)
    adapters = [adapter_of(tmp_path / name) for name in "ab"]
    assert same(*adapters)
    bytes_of = [make_plan(config)[1].estimate_memory_usage()[0]["parameters"] for config in configs[:2]]
    assert bytes_of[0] < bytes_of[1]
    adapters[0]["planted"] = adapters[0].popitem()[1]
    assert not same(*adapters)


@pytest.mark.slow
def test_a_frozen_part_keeps_the_bytes_of_its_source(texts, base, tmp_path):
    """The finished model has the fp32 bytes of frozen weights although the run computes in bf16, and so has a
    converted checkpoint; other weights at `model.path` are an error.
    """
    frozen = ["embed_tokens.*", "layers.0.*"]
    config = tuned(texts, base, tmp_path / "run", freeze=frozen)
    result = run(config)
    source = {n: np.array(t) for n, t in open_weights(base).items()}
    made = {n: np.array(t) for n, t in open_weights(result.model_dir).items()}
    changed = {name for name in source if source[name].tobytes() != made[name].tobytes()}
    assert changed == {n for n in source if "layers.1." in n or n in ("model.norm.weight", "lm_head.weight")}
    command = ["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / "converted")]
    assert _run(command) != 0
    other = save_base(tmp_path / "other", texts, 1)
    assert _run([*command, "--model", str(other)]) != 0
    assert _run([*command, "--model", str(base)]) == 0
    converted = {n: np.array(t) for n, t in open_weights(tmp_path / "converted").items()}
    assert same(converted, made)
    longer = with_steps(tuned(texts, other, tmp_path / "run", freeze=frozen), 8)
    with pytest.raises(CheckpointError, match="frozen"):
        run_training(plan_run(longer, True, may_change=["train.steps"]), silent())


@pytest.mark.parametrize(
    "text, words",
    [
        ("[lora]\nr = 8\n", "model.path"),
        ('[train]\nfreeze = ["embed*"]\n', "model.path"),
        ('[model]\npath = "base"\n[lora]\nrank = 8\n', "did you mean lora.r"),
        ('[model]\npath = "base"\n[lora]\ninit = "pissa"\n', "pissa"),
        ('[model]\npath = "base"\n[lora]\nuse_dora = true\n', "lora.use_dora of PEFT is not supported"),
        ('[model]\npath = "base"\n[lora]\ndropout = 1.0\n', "lora.dropout"),
        ('[model]\npath = "base"\n[lora]\npath = "a"\nr = 4\n', "lora.path determines"),
        ('[model]\npath = "base"\n[lora]\n[train]\nfreeze = ["a"]\n', "remove train.freeze"),
        ('[model]\npath = "base"\n[lora]\ntarget_modules = "(a+)+"\n', "regular expression"),
    ],
)
def test_mistakes_in_configurations(tmp_path, base, text, words):
    """Each is one line that names the key."""
    (tmp_path / "base").symlink_to(base)
    (tmp_path / "train.toml").write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        load_config(tmp_path / "train.toml")
    assert "\n" not in str(error.value)


def test_patterns_must_match(texts, base, tmp_path):
    """Before any work."""
    with pytest.raises(
        ConfigError, match=r"train\.freeze .* 'nothing\.\*'.*; use names like embed_tokens.weight"
    ):
        run(tuned(texts, base, tmp_path / "run", freeze=["nothing.*"]))
    with pytest.raises(ConfigError, match=r"train\.freeze must leave a parameter.* got \*, which match all"):
        run(tuned(texts, base, tmp_path / "run", freeze=["*"]))
    with pytest.raises(ConfigError, match="target_modules"):
        run(tuned(texts, base, tmp_path / "run", lora={"target_modules": ["c_attn"]}))
