"""GGUF files: what their headers say, as models, in parts, in directories; and what is rejected."""

from __future__ import annotations

import itertools
import struct

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from support.gguf_models import (
    add_values,
    blocks_of,
    finish,
    piece_vocabulary,
    rope_factors,
    short_pieces,
    small_model,
    write_model,
)
from tilewise import models
from tilewise.checkpoint import find_model, gguf_model, open_weights, write_weights
from tilewise.checkpoint.gguf.families import FAMILIES
from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.checkpoint.tensors import PartedTensor
from tilewise.core import CheckpointError, ConfigError, TilewiseError

ALIGNMENT = 32
VALUES = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=9),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A small Llama in one file, and its weights."""
    path = tmp_path_factory.mktemp("llama") / "m.gguf"
    return path, write_model(path, small_model("llama"), lambda name, values: Kind.Q8_0)


def _text(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def _tensor(name="t", dims=(32,), kind=0, offset=0):
    return _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ONE = (_tensor(),)


def _file(values=(), tensors=ONE, version=3, order="<", num_values=None, num_tensors=None, data=4096):
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        (len(values) if num_values is None else num_values),
    )
    return (
        b"GGUF" + struct.pack(f"{order}IQQ", version, *counts) + b"".join((*values, *tensors)) + bytes(data)
    )


ARRAY = _text("a") + struct.pack("<II", 9, 4)
INVALID = {
    "version 1": (_file(version=1), "versions 2 and 3 are read"),
    "big endian": (_file(order=">"), "big-endian"),
    "tensors": (_file(num_tensors=1 << 40), "1099511627776 tensors"),
    "key-values": (_file(num_values=1 << 63), "key-values, more than"),
    "missing tensors": (_file(num_tensors=60000, data=0), "ends within its header"),
    "key length": (_file([struct.pack("<Q", 1 << 62)]), "a key has 4611686018427387904 bytes"),
    "key": (_file([_text(b"\xff") + struct.pack("<IB", 0, 0)]), "a key is not UTF-8"),
    "key twice": (_file([_text("k") + struct.pack("<IB", 0, 0)] * 2), "'k' appears twice"),
    "value type": (_file([_text("k") + struct.pack("<IB", 13, 0)]), "unknown type 13"),
    "text length": (_file([_text("k") + struct.pack("<IQ", 8, 1 << 50)]), "has 1125899906842624 bytes"),
    "array length": (_file([ARRAY + struct.pack("<Q", 1 << 61)]), "2305843009213693952 entries"),
    "array of arrays": (_file([_text("a") + struct.pack("<IIQ", 9, 9, 1)]), "array of arrays"),
    "array type": (_file([_text("a") + struct.pack("<IIQ", 9, 99, 1)]), "unknown type 99"),
    "texts": (_file([_text("a") + struct.pack("<IIQ", 9, 8, 1 << 40)]), "texts"),
    "truth": (_file([_text("k") + struct.pack("<IB", 7, 2)]), "true or false"),
    "alignment": (_file([_text("general.alignment") + struct.pack("<II", 4, 3)]), "power of two"),
    "alignment 0": (_file([_text("general.alignment") + struct.pack("<II", 4, 0)]), "power of two"),
    "dims": (_file(tensors=[_tensor(dims=(2,) * 5)]), "5 dims, more than 4"),
    "size": (_file(tensors=[_tensor(dims=(1 << 40, 1 << 40))]), "invalid shape"),
    "empty": (_file(tensors=[_tensor(dims=(0, 4))]), "invalid shape"),
    "type": (_file(tensors=[_tensor(dims=(256,), kind=16)]), "iq2_xxs, which is not supported"),
    "new type": (_file(tensors=[_tensor(kind=999)]), "number 999"),
    "blocks": (_file(tensors=[_tensor(dims=(33, 2), kind=8)]), "whole blocks of 32"),
    "offset": (_file(tensors=[_tensor(offset=(1 << 64) - 32)]), "invalid shape .* or offset"),
    "end": (_file(tensors=[_tensor(offset=8192)]), "the download is incomplete"),
    "misplaced": (_file(tensors=[_tensor(offset=4)]), "multiple of the alignment"),
    "twice": (_file(tensors=[_tensor(), _tensor(offset=128)]), "'t' appears twice"),
    "overlap": (_file(tensors=[_tensor(), _tensor("u", offset=96)]), "overlaps"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_headers_are_rejected(case, tmp_path):
    """Each rule, with the name of what breaks it."""
    content, words = INVALID[case]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        open_weights(tmp_path / "m.gguf")


def test_the_valid_header_of_these_cases_is_accepted(tmp_path):
    """Without a planted fault, only the model is missing."""
    (tmp_path / "m.gguf").write_bytes(_file())
    assert [*gguf_model(tmp_path / "m.gguf").files.tensors()] == ["t"]
    with pytest.raises(ConfigError, match=r"general\.architecture must be one of llama, qwen2"):
        models.open(tmp_path / "m.gguf")


@given(
    values=st.dictionaries(st.from_regex(r"[a-z]{1,9}\.[a-z]{1,9}", fullmatch=True), VALUES),
    seed=st.integers(0, 99),
)
@settings(max_examples=12)
def test_files_have_what_the_gguf_package_wrote(tmp_path_factory, values, seed):
    """Key-values of every type, and tensors of every type that it can quantise."""
    rng, path = np.random.default_rng(seed), tmp_path_factory.mktemp("any") / "m.gguf"
    writer = GGUFWriter(path, "any")
    writer.add_custom_alignment(int(rng.choice([8, 32, 64])))
    add_values(writer, values)
    expected = {}
    for i, kind in enumerate((Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1)):
        rows = rng.standard_normal((int(rng.integers(1, 4)), 64)).astype(np.float32)
        is_plain = kind in (Kind.F32, Kind.F16)
        data = (
            rows.astype(np.float32 if kind == Kind.F32 else np.float16) if is_plain else blocks_of(rows, kind)
        )
        writer.add_tensor(f"t{i}", data, raw_dtype=None if is_plain else kind)
        expected[f"t{i}"] = (
            data.astype(np.float32) if is_plain else dequantize(data, kind).astype(ml_dtypes.bfloat16)
        )
    finish(writer)
    model = gguf_model(path)
    for key, value in values.items():
        ours = model.files.values[key]
        assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == value, key
    tensors = model.files.tensors()
    assert [*tensors] == [*expected]
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(tensors[name], np.float32), array.astype(np.float32))


def test_truncated_files_are_rejected(llama, tmp_path):
    """At any byte before the last tensor's end, in one line."""
    content = llama[0].read_bytes()
    end = max(info.end for info in gguf_model(llama[0]).files.infos.values())
    for length in np.random.default_rng(0).integers(5, end, 150):
        (tmp_path / "m.gguf").write_bytes(content[:length])
        with pytest.raises(CheckpointError) as caught:
            open_weights(tmp_path / "m.gguf")
        assert "\n" not in str(caught.value)


def test_a_file_that_becomes_shorter_is_an_error(llama, tmp_path):
    """Reading it raises, and opening it again reads its new header."""
    path = tmp_path / "m.gguf"
    path.write_bytes(llama[0].read_bytes())
    weights = open_weights(path)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match="has become shorter"):
        for tensor in weights.values():
            np.asarray(tensor)
    with pytest.raises(CheckpointError, match="the download is incomplete"):
        open_weights(path)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text"])
def test_weights_are_those_before_conversion(family, kind, tmp_path):
    """Names, order of rows, and norms of every family; quantised matrices stay in their blocks."""
    model = small_model(family, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    expected = write_model(tmp_path / "m.gguf", model, lambda name, values: kind)
    weights = open_weights(tmp_path / "m.gguf")
    assert {*weights} == {*expected}
    for name, values in expected.items():
        ours = np.asarray(weights[name], np.float32).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(ours.view(np.uint16), values.view(np.uint16), err_msg=name)
        if values.ndim == 2 and kind in (Kind.Q8_0, Kind.Q5_0):
            assert isinstance(weights[name], QuantisedTensor), name
    config = models.open(tmp_path / "m.gguf")
    assert {*models.open_weights(tmp_path / "m.gguf", config)} == {
        n for n, _ in models.parameter_shapes(config)
    }


@given(first=st.integers(0, 127), count=st.integers(1, 128))
@settings(max_examples=40)
def test_rows_of_reordered_tensors(first, count, queries):
    """Any rows of queries, in blocks and in plain numbers, are those of the whole."""
    count = min(count, 128 - first)
    blocks, whole, halves, plain = queries
    np.testing.assert_array_equal(np.asarray(blocks.rows(first, count)), whole[first : first + count])
    from tilewise.checkpoint.boxes import Box

    part = halves.read_box(Box((first, 3), (count, 9)))
    np.testing.assert_array_equal(part, plain[first : first + count, 3:12])


@pytest.fixture(scope="module")
def queries(tmp_path_factory):
    """A matrix of queries as blocks and in parts, each with its numbers."""
    folder, pairs = tmp_path_factory.mktemp("queries"), []
    for kind in (Kind.Q4_1, Kind.F32):
        path = folder / f"{kind.name}.gguf"
        expected = write_model(
            path, small_model("llama", num_attention_heads=4), lambda name, values, k=kind: k
        )
        name = "model.layers.0.self_attn.q_proj.weight"
        tensor = open_weights(path)[name]
        assert isinstance(tensor, QuantisedTensor if kind == Kind.Q4_1 else PartedTensor)
        whole = np.asarray(tensor)
        np.testing.assert_array_equal(whole.astype(ml_dtypes.bfloat16), expected[name])
        pairs += [tensor, whole]
    return pairs


def test_models_in_parts(tmp_path):
    """Any part opens the whole model; a missing, renamed or foreign part is named."""
    model = small_model("llama", num_hidden_layers=2)
    expected = write_model(tmp_path / "m.gguf", model, lambda name, values: Kind.Q8_0, max_tensors=6)
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert len(parts) > 3 and parts[0].endswith(f"-00001-of-{len(parts):05d}.gguf")
    for place in (tmp_path, tmp_path / parts[0], tmp_path / parts[2]):
        assert {*open_weights(place)} == {*expected}
        assert models.open(place).num_hidden_layers == 2
    content = (tmp_path / parts[1]).read_bytes()
    (tmp_path / parts[1]).write_bytes((tmp_path / parts[2]).read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of.*split\.no and split\.count are \(2, "):
        open_weights(tmp_path)
    (tmp_path / parts[1]).unlink()
    with pytest.raises(CheckpointError, match=r"no such file"):
        open_weights(tmp_path)
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"its name must end in -NNNNN-of-"):
        open_weights(tmp_path / "other.gguf")


def test_directories_of_gguf_files(llama, tmp_path):
    """One model is opened, several are listed, projectors do not count, safetensors take precedence."""
    content = llama[0].read_bytes()
    for name in ("mmproj-m-F16.gguf", "m-Q4_K_M.gguf"):
        (tmp_path / name).write_bytes(content)
    for place in (tmp_path, tmp_path / "m-Q4_K_M.gguf"):
        assert find_model(place) == place
        assert models.open(place).model_type == "llama"
        assert {*open_weights(place)} == {*llama[1]}
    (tmp_path / "m-Q8_0.gguf").write_bytes(content)
    for call in (find_model, models.open, open_weights):
        with pytest.raises(ConfigError, match=r"'m-Q4_K_M\.gguf', 'm-Q8_0\.gguf'; name one of these files"):
            call(tmp_path)
    (tmp_path / "sha256-1234").write_bytes(content)  # a file without a suffix, as in other programs' stores
    assert {*open_weights(tmp_path / "sha256-1234")} == {*llama[1]}
    write_weights(tmp_path, [("w", np.ones(2, np.float32))])
    assert {*open_weights(tmp_path)} == {"w"}


def test_scalings_of_rope(tmp_path):
    """Divisors of Llama 3.1 become its fields, others stay divisors; yarn has its keys."""
    path, rope = tmp_path / "m.gguf", {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    sizes = {"head_dim": 64, "rope_parameters": rope}
    model = small_model("llama", **sizes)
    write_model(path, model, lambda name, values: Kind.F32)
    assert models.open(path).rope_scaling == {k: v for k, v in rope.items() if k != "rope_theta"}
    divisors = rope_factors(model.config)["rope_freqs.weight"]
    assert divisors[0] == 1 and divisors[-1] == 32 and len({*divisors.tolist()}) > 3
    rope["original_max_position_embeddings"] = 512
    write_model(path, small_model("llama", **sizes), lambda name, values: Kind.F32)
    scaling = models.open(path).rope_scaling
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1
    assert (
        np.float32(scaling["long_factor"]).tolist()
        == rope_factors(small_model("llama", **sizes).config)["rope_freqs.weight"].tolist()
    )


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_scores_of_the_largest_gemmas(family, layers, tmp_path):
    """Only models with this number of layers scale scores by the width over the heads."""
    for count, expected in ((2, 32), (layers, 24)):
        changes = {"hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": count}
        write_model(tmp_path / "m.gguf", small_model(family, **changes), lambda name, values: Kind.F32)
        config = models.open(tmp_path / "m.gguf")
        assert (config.query_pre_attn_scalar, config.head_dim) == (expected, 32)


def test_what_is_not_supported_is_named(llama, tmp_path):
    """Other architectures with the list, mixtures of experts, another size of values."""
    path = tmp_path / "m.gguf"
    for changes, words in {
        ("general.architecture", "mamba"): f"must be one of {', '.join(FAMILIES)}; got 'mamba'",
        ("llama.expert_count", 8): r"llama\.expert_count = 8 is not supported",
        ("llama.attention.value_length", 8): r"value_length must equal",
        ("llama.rope.dimension_count", 8): r"partial_rotary_factor.* must be 1",
        ("llama.rope.scaling.type", "other"): r"rope\.scaling\.type = 'other' is not supported",
        ("llama.block_count", "x"): r"llama\.block_count must be an integer",
    }.items():
        writer = GGUFWriter(path, "llama")
        values = {
            **{
                k: v for k, v in gguf_model(llama[0]).files.values.items() if isinstance(v, int | float | str)
            },
            **dict([changes]),
        }
        del writer.kv_data[0]["general.architecture"]
        add_values(writer, values)
        writer.add_tensor("token_embd.weight", np.zeros((300, 32), np.float32))
        finish(writer)
        with pytest.raises(TilewiseError, match=words):
            models.open(path)


def test_metadata_gives_settings_of_generation(tmp_path):
    """End tokens of texts, turns and messages; usual names of control tokens; recommended sampling."""
    from tilewise.checkpoint import load_generation_config, load_tokenizer_config

    pieces = [*short_pieces(), ("<|im_end|>", 0.0, 3), ("<|end|>", 0.0, 1), ("<|x|>", 0.0, 3)]
    last = len(pieces) - 1
    values = {
        **piece_vocabulary(pieces),
        "tokenizer.ggml.eot_token_id": last,
        "tokenizer.chat_template": "{{ a }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ b }}",
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }
    model = small_model("llama", vocab_size=len(pieces))
    write_model(tmp_path / "m.gguf", model, lambda name, values: Kind.Q8_0, vocabulary=values)
    settings_of_file = load_generation_config(tmp_path / "m.gguf", len(pieces))
    assert settings_of_file["eos_token_id"] == [2, last, last - 2]
    assert (settings_of_file["temperature"], settings_of_file["top_k"]) == (0.6, 20)
    assert settings_of_file["do_sample"] is True
    assert models.open(tmp_path / "m.gguf").eos_token_ids == (2, last, last - 2)
    config = load_tokenizer_config(tmp_path / "m.gguf")
    assert config.chat_templates == {"default": "{{ a }}", "tool_use": "{{ b }}"}
    assert config.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_dtypes_of_models(tmp_path):
    """f32 and f16 models keep their dtype; everything else is bf16."""
    for kinds, expected in (
        ((Kind.F32,), "float32"),
        ((Kind.F16,), "float16"),
        ((Kind.F16, Kind.F32), "float16"),
        ((Kind.BF16,), "bfloat16"),
        ((Kind.Q8_0, Kind.F16), "bfloat16"),
    ):
        turn = itertools.cycle(kinds)
        write_model(tmp_path / "m.gguf", small_model("llama"), lambda name, values, turn=turn: next(turn))
        assert models.open(tmp_path / "m.gguf").dtype == expected
