"""Adapters in one engine: each request has its own text, whatever other requests and adapters there are."""

import numpy as np
import pytest

from native.serve.serving_models import TEXTS
from tilewise import models
from tilewise.checkpoint.adapters import LoraConfig, save_adapter
from tilewise.core import CheckpointError, ConfigError
from tilewise.serve import LLM, Engine, SamplingParams

WAY = SamplingParams(max_tokens=10, temperature=0, logprobs=2)
PIRATE = {"r": 4, "alpha": 8, "target_modules": "all-linear"}
POET = {"r": 40, "alpha": 16, "target_modules": ("q_proj", "down_proj"), "use_rslora": True}


@pytest.fixture(scope="module")
def adapters(model_dir, tmp_path_factory):
    """Two adapters of the model, with other ranks and targets, by name."""
    config, root = models.open(model_dir), tmp_path_factory.mktemp("adapters")
    for seed, (name, settings) in enumerate({"pirate": PIRATE, "poet": POET}.items()):
        layout, rng = models.lora_layout(config, LoraConfig(**settings)), np.random.default_rng(seed)
        values = {n: rng.normal(0, 0.1, shape).astype(np.float32) for n, shape in layout.shapes.items()}
        save_adapter(root / name, layout.files(str(model_dir)), layout.stored(values))
    return {name: f"{name}={root / name}" for name in ("pirate", "poet")}


def texts(engine, prompts):
    """Tokens and their log probabilities, per prompt."""
    made = [[] for _ in prompts]
    for delta in engine.stream(prompts, WAY):
        figures = [(token, one.logprob) for token, one in delta.logprobs.items()]
        made[delta.sequence].append((delta.token, figures))
    return made


@pytest.mark.parametrize(
    "dtype, quantization",
    [("bf16", None), *(pytest.param(*c, marks=pytest.mark.slow) for c in (("f32", None), ("bf16", "int8")))],
)
def test_a_text_does_not_depend_on_other_adapters(model_dir, adapters, dtype, quantization):
    """A batch of all adapters and of the model alone equals engines with one of them, to the bit."""
    options = {"dtype": dtype, "max_num_seqs": 8, "max_num_batched_tokens": 16, "quantization": quantization}
    named = [(name, text) for text in TEXTS[:2] for name in ("", "poet", "pirate")]
    prompts = [{"prompt": text, "lora": name} if name else text for name, text in named]
    with Engine(model_dir, lora_modules=[*adapters.values()], **options) as engine:
        together = texts(engine, prompts)
        assert texts(engine, prompts) == together  # now with the blocks of the cache
    with Engine(model_dir, **options) as plain:
        assert texts(plain, TEXTS[:2]) == [together[0], together[3]]
    with Engine(model_dir, lora_modules=[adapters["poet"]], **options) as engine:
        alone = texts(engine, [{"prompt": text, "lora": "poet"} for text in TEXTS[:2]])
    assert alone == [together[1], together[4]]
    assert together[0] != together[1] != together[2] != together[0]


@pytest.mark.slow
def test_adapters_on_several_devices_and_with_guesses(model_dir, adapters):
    """Tensor parallelism and speculative decoding change no bit of an adapter's text."""
    prompts = [{"prompt": text, "lora": name} for text in TEXTS for name in ("pirate", "poet")] + TEXTS
    made = []
    for options in ({}, {"tensor_parallel_size": 2}, {"speculative_config": {"num_speculative_tokens": 3}}):
        with Engine(model_dir, lora_modules=[*adapters.values()], dtype="f32", **options) as engine:
            made.append(texts(engine, prompts))
    assert made[0] == made[1] == made[2]


def test_an_adapter_has_the_text_of_the_merged_model(model_dir, adapters, tmp_path):
    """In fp32 the same tokens as the model into which `checkpoint merge` has added it."""
    from tilewise.cli.main import _run

    path = adapters["poet"].partition("=")[2]
    assert _run(["checkpoint", "merge", str(model_dir), path, str(tmp_path / "merged")]) == 0
    with (
        LLM(tmp_path / "merged", dtype="f32") as merged,
        LLM(model_dir, dtype="f32", lora_modules=[adapters["poet"]]) as model,
    ):
        a = merged.generate(TEXTS, WAY)
        b = model.generate([{"prompt": text, "lora": "poet"} for text in TEXTS], WAY)
    assert [one.outputs[0].token_ids for one in a] == [one.outputs[0].token_ids for one in b]


def test_mistakes(model_dir, adapters, tmp_path):
    """Unknown names, wrong entries, adapters of other models or with whole modules: errors before any work."""
    with (
        Engine(model_dir, lora_modules=[adapters["poet"]]) as engine,
        pytest.raises(ConfigError, match="poet"),
    ):
        engine.stream([{"prompt": "x", "lora": "pirate"}], WAY)
    for entries in (["poet"], ["=x"], ["a=x", "a=y"], [3], "a=x"):
        with pytest.raises(ConfigError, match=r"lora_modules|a name of its own; got 'a' for x and y"):
            Engine(model_dir, lora_modules=entries)
    with pytest.raises(CheckpointError, match="adapter_config"):
        Engine(model_dir, lora_modules=[f"a={tmp_path}"])
    config = models.open(model_dir)
    layout = models.lora_layout(config, LoraConfig(modules_to_save=("norm",)))
    values = {n: np.zeros(shape, np.float32) for n, shape in layout.shapes.items()}
    save_adapter(tmp_path / "whole", layout.files(None), layout.stored(values))
    with pytest.raises(ConfigError, match="merge it"):
        Engine(model_dir, lora_modules=[f"a={tmp_path / 'whole'}"])
