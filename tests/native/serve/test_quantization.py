"""`--quantization`: weights of products are rounded while they are loaded, by the same formula on every mesh."""

import json
from contextlib import closing
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from native.serve.serving_models import TEXTS, load, save_model
from support.quantised_layers import awq
from tilewise import LLM, SamplingParams, models
from tilewise.checkpoint import QuantisedTensor
from tilewise.core import ConfigError, PartialBlocks, PlanError
from tilewise.formats.quantise import quantise, quantised_format
from tilewise.settings import EngineSettings

GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=2)


def answers(directory, **settings):
    """Tokens and their probabilities."""
    with LLM(directory, max_num_seqs=4, **{"dtype": "bf16", **settings}) as llm:
        outputs = [one.outputs[0] for one in llm.generate(TEXTS, GREEDY)]
    return [
        (one.token_ids, [{k: v.logprob for k, v in step.items()} for step in one.logprobs]) for one in outputs
    ]


def rounded(source, target, bits, block):
    """A copy of a directory whose products have the bf16 weights that rounding gives."""
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj" in name or name == "lm_head.weight":
            blocks = quantise(tensor.astype(np.float32), bits, block)
            tensors[name] = quantised_format(bits, block).dequantise(blocks).astype(ml_dtypes.bfloat16)
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    safetensors.numpy.save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
def test_texts_are_those_of_the_rounded_weights(tmp_path, quantization, bits):
    """With their probabilities, to the bit, on one device and on two; other weights give others."""
    model_dir = save_model(tmp_path / "model", intermediate_size=128)  # both devices hold whole blocks
    expected = answers(rounded(model_dir, tmp_path / "rounded", bits, 32))
    assert answers(model_dir, quantization=quantization) == expected
    assert answers(model_dir, quantization=quantization, tensor_parallel_size=2) == expected
    assert answers(model_dir) != expected


def test_products_are_quantised_and_nothing_else(tmp_path, caplog):
    """Norms and embeddings stay, and so do weights whose inputs are not a multiple of the group."""
    directory = save_model(tmp_path / "model", num_hidden_layers=1)
    config = models.open(directory)
    stored = models.open_weights(directory, config)
    weights = models.with_quantization(stored, config, "int4")
    quantised = {name for name, tensor in weights.items() if isinstance(tensor, QuantisedTensor)}
    assert quantised == {name for name in weights if "_proj" in name or name == "lm_head.weight"}
    assert {weights[name].format.name for name in quantised} == {"q4_0"}
    assert models.with_quantization(stored, config, None) is stored
    unchanged = models.with_quantization(stored, config, "int8:128")
    assert not any(isinstance(tensor, QuantisedTensor) for tensor in unchanged.values())
    assert "not a multiple of 128" in caplog.text


def test_settings_that_contradict_each_other_are_rejected(tmp_path, model_dir):
    """An unknown format, random weights, and files that are quantised already."""
    with pytest.raises(ConfigError, match="quantization must be one of int8, int4, int8:128"):
        EngineSettings(quantization="int2")
    with pytest.raises(ConfigError, match=r"quantization needs weights from files.*dummy"):
        EngineSettings(quantization="int8", load_format="dummy")
    tensors = safetensors.numpy.load_file(model_dir / "model.safetensors")
    for name in [name for name in tensors if name.endswith("mlp.up_proj.weight")]:
        made, _ = awq(32).layer(np.random.default_rng(0), *tensors.pop(name).shape)
        layer = name.removesuffix(".weight")
        tensors.update({f"{layer}.{part}": np.ascontiguousarray(tensor) for part, tensor in made.items()})
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": awq(32).config}))
    with pytest.raises(ConfigError, match=r"in bf16, f16 or f32.*up_proj.*int4_g32"):
        load(tmp_path, quantization="int8")


def test_kv_cache_of_int8(tmp_path):
    """Texts do not depend on devices, chunks or cached prefixes; the cache is smaller, and other numbers show."""
    model_dir = save_model(tmp_path / "model")
    cached = partial(answers, model_dir, kv_cache_dtype="int8")
    expected = cached()
    assert cached(tensor_parallel_size=2) == expected
    assert cached(max_num_batched_tokens=5) == expected
    assert cached(enable_prefix_caching=False) == expected
    assert answers(model_dir) != expected
    config = models.open(model_dir)
    sizes = [models.kv_bytes_per_token(config, 2, kind) for kind in ("int8", "auto")]
    assert sizes[0] / sizes[1] == (config.decoder.head_dim + 4) / (2 * config.decoder.head_dim)
    with closing(
        load(model_dir, dtype="bf16", max_num_seqs=1, max_model_len=64, kv_cache_dtype="int8")
    ) as model:
        assert model.cache_bytes == 64 * sizes[0]


def test_weights_whose_blocks_devices_cannot_share_are_expanded(tmp_path, caplog):
    """With a warning, and the same texts: half of 96 inputs is one and a half blocks."""
    model_dir = save_model(tmp_path / "model", intermediate_size=96)
    expected = answers(model_dir, quantization="int8")
    assert "expanded" not in caplog.text
    assert answers(model_dir, quantization="int8", tensor_parallel_size=2) == expected
    assert "2 quantised weights like layers.0.mlp.down_proj.weight are expanded to bf16" in caplog.text


def test_grouped_products(tmp_path):
    """Texts do not depend on devices, chunks, rows or cached prefixes; exact products give other probabilities, which
    are near; and weights of 8 bits have no other products.
    """
    model_dir = save_model(tmp_path / "model", intermediate_size=128)
    grouped = partial(answers, model_dir, quantization="int4", quantized_matmul="grouped")
    expected = grouped()
    assert grouped(tensor_parallel_size=2) == expected
    assert grouped(max_num_batched_tokens=5) == expected
    assert grouped(enable_prefix_caching=False) == expected
    exact = answers(model_dir, quantization="int4")
    assert exact != expected
    first = [[one[1][0] for one in side] for side in (exact, expected)]
    for one, other in zip(*first, strict=True):
        assert all(abs(one[token] - other[token]) < 0.1 for token in one if token in other)
    assert answers(model_dir, quantization="int8", quantized_matmul="grouped") == answers(
        model_dir, quantization="int8"
    )
    names = []
    for how in ("exact", "grouped"):
        with closing(load(model_dir, dtype="bf16", quantization="int4", quantized_matmul=how)) as model:
            names.append(model.name)
    assert names[0] != names[1]


def test_groups_that_devices_cannot_share_are_rejected(tmp_path):
    """They are not expanded, because that would change the text."""
    model_dir = save_model(tmp_path / "model", intermediate_size=96)
    settings = {"dtype": "bf16", "quantization": "int4", "tensor_parallel_size": 2}
    with pytest.raises(PlanError, match=r"whole blocks .* got 48 of 96.*, or quantized_matmul exact"):
        load(model_dir, quantized_matmul="grouped", **settings)

    def plan(formats):
        if formats:
            raise PartialBlocks("whole blocks", "mlp.down_proj.weight")

    names = [f"layers.{i}.mlp.down_proj.weight" for i in range(2)]
    mixed = dict(zip(names, ("q6_k", "q4_k"), strict=True))
    with pytest.raises(PartialBlocks):
        models.plan_in_formats(mixed, plan, is_grouped=True)
    assert models.plan_in_formats(mixed, plan)[1] == {}


def test_grouped_products_without_weights_of_4_bits(tmp_path, caplog):
    """A warning says that the setting has no effect."""
    model_dir = save_model(tmp_path / "model")
    for settings in ({"quantization": "int8", "dtype": "bf16"}, {"quantization": "int4", "dtype": "f32"}):
        caplog.clear()
        load(model_dir, quantized_matmul="grouped", **settings).close()
        assert "quantized_matmul grouped has no effect" in caplog.text
