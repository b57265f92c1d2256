"""Logits of quantised directories are, to the bit, those of the bf16 weights that they mean."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import tilewise as tw
from native.models.families import decoding_inputs, ids_of, our_logits
from support.quantised_layers import SCHEMES, awq, compressed, gptq
from tilewise import models
from tilewise.core import CheckpointError, ConfigError
from tilewise.models.gpt2 import GPT2Config
from tilewise.models.llama import LlamaConfig
from tilewise.models.phi3 import Phi3Config

CONFIG = LlamaConfig(131, 128, 256, 1, 4, num_key_value_heads=2, max_position_embeddings=64, dtype="float16")
FUSED = Phi3Config(131, 128, 256, 1, 4, num_key_value_heads=2, max_position_embeddings=64, rope_scaling=None)


def directories(folder, config, scheme, planted=0.0):
    """A quantised directory, and one of the bf16 weights that it means."""
    rng, tensors, plain = np.random.default_rng(0), {}, {}
    shapes = dict(models.parameter_shapes(config))
    for entry in models.file_layout(config).table:
        name, shape = entry.name, (entry.num_rows, *shapes[entry.parameters[0][0]][1:])
        if "_proj" not in name or len(shape) == 1:
            plain[name] = tensors[name] = rng.normal(0, 0.5, shape).astype(ml_dtypes.bfloat16)
            continue
        made, weight = scheme.layer(rng, *shape)
        layer = name.removesuffix(".weight")
        tensors.update({f"{layer}.{part}": np.ascontiguousarray(tensor) for part, tensor in made.items()})
        plain[name] = (weight + np.float32(planted)).astype(ml_dtypes.bfloat16)
        if scheme.name.startswith("gptq"):
            tensors[f"{layer}.bias"] = np.zeros(len(weight), np.float16)
    for name, content, more in (
        ("quantised", tensors, {"quantization_config": scheme.config}),
        ("plain", plain, {}),
    ):
        (folder / name).mkdir()
        safetensors.numpy.save_file(content, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps({**config.to_dict(), **more}))
    return folder / "quantised", folder / "plain"


SCATTERED = gptq(4, 64, 2, "scattered")


@pytest.fixture(scope="module")
def logits_of():
    """Loads a directory of `CONFIG` into one instance, and returns logits of a text."""
    ids = ids_of(5)
    graph = tw.ComputeGraph("llama")
    models.build_decoding_graph(graph, CONFIG, len(ids), len(ids), 1, "bf16", context=len(ids))
    with graph.instantiate(graph.plan()) as instance:

        def call(directory):
            instance.load_parameters(models.open_weights(directory, models.open(directory)))
            instance.forward(**decoding_inputs(ids, 1))
            return np.array(instance.get_tensor("logits"), np.float32)

        yield call


@pytest.mark.parametrize("scheme", [*SCHEMES, SCATTERED], ids=lambda scheme: scheme.name)
def test_logits_are_those_of_the_bf16_weights(logits_of, tmp_path, scheme):
    """Of every method."""
    quantised, plain = directories(tmp_path, CONFIG, scheme)
    logits = our_logits(quantised, ids_of(5), "bf16")
    assert np.array_equal(logits, logits_of(plain)) and logits.std() > 0


def test_logits_of_other_weights_differ(logits_of, tmp_path):
    """The comparison above fails for a planted fault: weights that are a little larger."""
    quantised, plain = directories(tmp_path, CONFIG, awq(32), planted=1e-3)
    assert not np.array_equal(our_logits(quantised, ids_of(5), "bf16"), logits_of(plain))


@pytest.mark.parametrize("mesh", [{"tp": 1}, {"tp": 2}])
def test_fused_weights_are_divided_by_rows(tmp_path, mesh):
    """Phi-3 has queries, keys and values in one quantised tensor; also on two devices."""
    quantised, plain = directories(tmp_path, FUSED, compressed(4, 32, "packed"))
    logits = our_logits(quantised, ids_of(5), "bf16", mesh)
    assert np.array_equal(logits, our_logits(plain, ids_of(5), "bf16"))


def test_directories_that_cannot_be_loaded_are_rejected(tmp_path):
    """Biases that the model has not, unless they are zero; transposed weights; unknown methods."""
    quantised, _ = directories(tmp_path, CONFIG, SCHEMES[0])
    tensors = safetensors.numpy.load_file(quantised / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    safetensors.numpy.save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.bias"):
        models.open_weights(quantised, models.open(quantised))
    gpt2 = GPT2Config(131, 32, 64, 1, 2)
    with pytest.raises(ConfigError, match="matrices"):
        models.open_weights(quantised, gpt2)
    other = {**CONFIG.to_dict(), "quantization_config": {"quant_method": "hqq"}}
    (quantised / "config.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match=r"hqq.*config\.json"):
        models.open(quantised)
