"""Quantised safetensors directories: the numbers of every method, shapes, settings and errors."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.quantised_layers import SCHEMES, awq, compressed, fp8, gptq, write_directory
from tilewise.checkpoint import QuantisedTensor, model_files, open_weights
from tilewise.checkpoint.quantised_files import parse_quantisation, without_zero_biases
from tilewise.core import CheckpointError, ConfigError


def written(folder, scheme, n, k, seed=0, **changes):
    """A directory with one quantised layer, a bias and a norm; and the layer's weight."""
    tensors, weight = scheme.layer(np.random.default_rng(seed), n, k)
    tensors = {f"layers.0.up.{part}": tensor for part, tensor in {**tensors, **changes}.items()}
    others = {"layers.0.up.bias": np.ones(n, np.float32), "norm.weight": np.ones(3, np.float16)}
    return write_directory(folder, scheme, {**tensors, **others}), weight.astype(ml_dtypes.bfloat16)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEMES),
    st.sampled_from((8, 40, 136)),
    st.sampled_from((128, 256, 384)),
    st.integers(0, 99),
)
def test_weights_are_the_numbers_that_the_method_defines(tmp_path_factory, scheme, n, k, seed):
    """For every method, size and range of rows, to the bit; other tensors stay as they are."""
    directory, weight = written(tmp_path_factory.mktemp("model"), scheme, n, k, seed)
    files = open_weights(directory)
    assert set(files) == {"layers.0.up.weight", "layers.0.up.bias", "norm.weight"}
    tensor = files["layers.0.up.weight"]
    assert isinstance(tensor, QuantisedTensor) and tensor.shape == (n, k)
    first = seed % n
    some = tensor.rows(first, n - first).rows(0, min(5, n - first))
    assert np.array_equal(np.asarray(tensor), weight) and weight.std() > 0
    assert np.array_equal(some[:], weight[first : first + 5])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_changed_bit_of_the_codes_shows(tmp_path, scheme):
    """The comparison above fails for a planted fault, of every method."""
    tensors, _ = scheme.layer(np.random.default_rng(0), 8, 128)
    part = next(name for name in tensors if name in ("qweight", "weight_packed", "weight"))
    planted = np.ascontiguousarray(tensors[part])
    planted.reshape(-1).view(np.uint8)[5] ^= 16
    directory, weight = written(tmp_path / "a", scheme, 8, 128, **{part: planted})
    files = open_weights(directory)
    assert (np.asarray(files["layers.0.up.weight"]) != weight).sum() == 1


def test_a_block_lies_in_one_group(tmp_path):
    """Its size is the group's, larger for scales per row, and smaller if the row cuts the last group short."""
    cases = [
        (gptq(4, 128, 2), 256, "int4_g128"),
        (gptq(4, -1, 2), 1024, "int4_g512"),
        (awq(128), 160, "int4_g32"),
    ]
    cases += [(fp8("block"), 256, "fp8_e4m3_g128_f32"), (compressed(8, 64), 128, "int8_g64_bf16")]
    for number, (scheme, k, name) in enumerate(cases):
        directory, weight = written(tmp_path / str(number), scheme, 8, k)
        tensor = open_weights(directory)["layers.0.up.weight"]
        assert tensor.format.name == name and np.array_equal(np.asarray(tensor), weight)


def test_weights_that_no_block_expresses_are_expanded(tmp_path, caplog):
    """Act-order scatters the inputs of a group, or rows are not whole blocks. The bf16 numbers are the same."""
    cases = [(gptq(4, 64, 2, "scattered"), 128), (gptq(8, 32, 1, "scattered", "f32"), 128), (awq(-1), 40)]
    cases += [(compressed(4, 16), 48), (fp8("row", "float8"), 40)]
    for number, (scheme, k) in enumerate(cases):
        directory, weight = written(tmp_path / str(number), scheme, 8, k)
        tensor = open_weights(directory)["layers.0.up.weight"]
        assert tensor.format.name == "bf16" and "1 of 1 quantised weights are expanded" in caplog.text
        expected = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.array_equal(np.asarray(tensor), expected) and np.array_equal(tensor[3:7], expected[3:7])
        caplog.clear()


FAULTS = [
    (
        gptq(4, 32, 1),
        {"scales": np.ones((3, 8), np.float16), "qzeros": np.ones((3, 1), np.int32)},
        "4 groups of 32 along its 128 inputs",
    ),
    (gptq(4, 32, 1), {"scales": np.ones((4, 9), np.float16)}, r"scales of shape \[any, 8\]"),
    (gptq(4, 32, 1), {"scales": np.ones((4, 8), np.int32)}, "scales of dtype"),
    (gptq(4, 32, 1), {"qzeros": np.ones((4, 3), np.int32)}, "qzeros of shape"),
    (gptq(4, 32, 1), {"g_idx": np.full(128, 4, np.int32)}, "g_idx from 0 to 3"),
    (gptq(4, 32, 1), {"weight": np.ones((8, 128), np.float16)}, "quantised or not"),
    (awq(32), {"qweight": np.ones(5, np.int32)}, "qweight of shape"),
    (compressed(4, 32), {"weight_shape": np.array([8, 1 << 40])}, "num_bits"),
    (compressed(4, 32), {"weight_shape": np.array([9, 128])}, "its 8 outputs"),
    (compressed(4, 32), {"weight_scale": np.ones((8, 5), np.float16)}, "4 groups"),
    (fp8("tensor"), {"weight_scale": np.ones((2, 2), np.float32)}, "for the tensor or for its 8 rows"),
    (fp8("block"), {"weight_scale_inv": np.ones((1, 2), np.float32)}, r"weight_scale_inv of shape \[1, 1\]"),
]


@pytest.mark.parametrize(("scheme", "changes", "words"), FAULTS)
def test_tensors_that_contradict_each_other_are_rejected(tmp_path, scheme, changes, words):
    """When a directory is opened, by name of the layer and the tensor."""
    with pytest.raises(CheckpointError, match=words) as caught:
        open_weights(written(tmp_path / "a", scheme, 8, 128, **changes)[0])
    assert "layers.0.up" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_tensor_is_rejected(tmp_path):
    """Every layer has all tensors of its method."""
    tensors, _ = awq(32).layer(np.random.default_rng(0), 8, 128)
    del tensors["scales"]
    with pytest.raises(CheckpointError, match=r"must have scales"):
        open_weights(
            write_directory(tmp_path / "a", awq(32), {f"a.{name}": t for name, t in tensors.items()})
        )


UNSUPPORTED = [
    (
        {"quant_method": "bitsandbytes"},
        "must be one of gptq, awq, compressed-tensors, fp8; got 'bitsandbytes'",
    ),
    ({**gptq(4, 32, 1).config, "bits": 3}, "bits: .*4 or 8; got 3"),
    ({**gptq(4, 32, 1).config, "group_size": 0}, "group_size 0"),
    ({**gptq(4, 32, 1).config, "checkpoint_format": "marlin"}, "gptq_v2.*got 'marlin'"),
    ({**gptq(4, 32, 1).config, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic settings"),
    ({**awq(32).config, "version": "gemv"}, "version"),
    ({**awq(32).config, "zero_point": False}, "zero_point"),
    ({**compressed(4, 32).config, "format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
    ({**compressed(4, 32).config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ({**fp8("block").config, "fmt": "e5m2"}, "fmt"),
    ({**fp8("block").config, "weight_block_size": [128]}, "weight_block_size"),
    ("gptq", "must be a dictionary"),
]


@pytest.mark.parametrize(("content", "words"), UNSUPPORTED)
def test_settings_that_are_not_supported_are_named(content, words):
    """A method, a number of bits, a layout of codes."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse_quantisation(content)
    assert "\n" not in str(caught.value)


def test_older_directories_have_their_settings_in_another_file(tmp_path):
    """quantize_config.json of AutoGPTQ, quant_config.json of AutoAWQ."""
    older = [
        (gptq(4, 32, 1), "quantize_config.json", {"bits": 4, "group_size": 32, "sym": True}),
        (
            awq(32),
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        ),
    ]
    for scheme, name, content in older:
        directory, weight = written(tmp_path / scheme.name, scheme, 8, 128)
        (directory / "config.json").write_text("{}")
        (directory / name).write_text(json.dumps(content))
        if name == "quantize_config.json":  # AutoGPTQ's name of the weights
            (directory / "model.safetensors").rename(directory / "gptq_model-4bit-32g.safetensors")
        assert np.array_equal(np.asarray(open_weights(directory)["layers.0.up.weight"]), weight)


def test_zero_biases_that_the_model_has_not_are_left_out(tmp_path):
    """AutoGPTQ writes them; others stay and are rejected later."""
    tensors, _ = awq(32).layer(np.random.default_rng(0), 8, 128)
    biases = {
        "a.bias": np.zeros(8, np.float16),
        "b.bias": np.ones(8, np.float16),
        "c.bias": np.zeros(8, np.float16),
    }
    both = {f"{layer}.{part}": tensor for layer in "abc" for part, tensor in tensors.items()}
    files = open_weights(write_directory(tmp_path / "a", awq(32), {**both, **biases}))
    assert set(without_zero_biases(files, {"c.bias"})) == {f"{x}.weight" for x in "abc"} | {
        "b.bias",
        "c.bias",
    }


def test_a_copied_configuration_has_no_quantisation(tmp_path):
    """Weights that are written with it are not quantised."""
    directory, _ = written(tmp_path / "a", awq(32), 8, 128)
    assert json.loads(model_files(copy_from=directory)["config.json"]) == {"model_type": "llama"}
    content = {"model_type": "llama", "quantization_config": awq(32).config}
    assert "quantization_config" not in json.loads(model_files(content)["config.json"])


@pytest.mark.slow
@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (128, False), (-1, True), (-1, False)])
@pytest.mark.parametrize("bits", [4, 8])
def test_files_of_the_compressed_tensors_library(tmp_path, bits, group, symmetric):
    """Its own packing and its own dequantisation give the same bf16 weight."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressor = pytest.importorskip("compressed_tensors.compressors").PackedQuantizationCompressor
    strategy = "channel" if group == -1 else "group"
    arguments = quantization.QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=None if group == -1 else group
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    torch.manual_seed(0)
    weight = torch.randn(24, 256)
    groups = weight.reshape(24, 1 if group == -1 else 256 // group, -1)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    top = 1 << bits
    scale = (high - low) / (top - 1) if not symmetric else torch.maximum(-low, high) / (top / 2)
    zero = (
        torch.zeros_like(low) if symmetric else (-low / scale - top / 2).round().clamp(-top / 2, top / 2 - 1)
    )
    state = {"weight": weight.to(torch.bfloat16), "weight_scale": scale.to(torch.bfloat16)}
    if not symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    packed = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(packed), scheme)["weight"].to(torch.float32).numpy()
    arrays = {
        f"a.{name}": t.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        if t.dtype == torch.bfloat16
        else t.numpy()
        for name, t in packed.items()
    }
    ours = open_weights(write_directory(tmp_path / "a", compressed(bits, group), arrays))["a.weight"]
    assert np.array_equal(np.asarray(ours).astype(ml_dtypes.bfloat16).astype(np.float32), expected)
