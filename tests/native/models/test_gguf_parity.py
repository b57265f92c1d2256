"""GGUF files of every family: the logits of the dequantised model, to the bit."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from native.models.families import CASES, LLAMA3, Case, ids_of, our_logits
from support.gguf_models import write_model
from tilewise import models
from tilewise.checkpoint import save_pretrained
from tilewise.encode import Encoder

BY_NAME = {case.name: case for case in CASES}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {**SMALL, "hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 515}
# four devices share whole blocks of 256
WIDE |= {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 512}
CALLS = (1, 2, 3, 4, 5, 8, 16, 33)
NAMES = [case.name for case in CASES if not case.name.startswith("mistral")]
NAMES.remove("qwen2-windows")  # files do not say which layers have windows
NAMES.remove("gpt2-relu")  # nor other activations
EVERYDAY = ("llama-llama3", "gemma3")
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
QUANTISED = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.IQ4_NL, Kind.MXFP4)
OF_256 = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS)


def _changes(case):
    """Sizes that are whole blocks, and the settings that files can say."""
    more = {**SMALL}
    if case.family == "gpt2":
        more = {"n_embd": 64, "n_head": 4}
    if case.family == "smollm3":  # every fourth layer has no positions
        more |= {"num_hidden_layers": 5, "no_rope_layers": None, "no_rope_layer_interval": 4}
    if case.family.startswith("gemma"):
        more["query_pre_attn_scalar"] = 16  # llama.cpp: the size of a head
    if case.name == "llama-llama3":
        more |= {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}}
    return more


def _mixed(kinds):
    """Each matrix in the next of some types."""
    count = itertools.count()
    return lambda name, values: kinds[next(count) % len(kinds)]


def _compare(case: Case, folder, kind_of, more, is_divided=False):
    """Write both models, and compare their logits; on request of 512 tokens in calls of 1 to 412, and on meshes."""
    model = case.model(**more)
    expected = write_model(folder / "model.gguf", model, kind_of)
    config = models.open(folder / "model.gguf")
    theirs = json.loads(model.config.to_json_string(use_diff=False)) | {"dtype": "bfloat16"}
    save_pretrained(folder / "bf16", theirs, expected.items())
    ids = ids_of(40)
    ours, expected_logits = (our_logits(folder / place, ids, "bf16") for place in ("model.gguf", "bf16"))
    assert np.isfinite(expected_logits).all() and np.abs(expected_logits).max() > 0.1
    np.testing.assert_array_equal(ours, expected_logits)
    if is_divided:
        text = ids_of(512)
        expected_logits = our_logits(folder / "bf16", text, "bf16")
        for mesh, calls in (
            ({"tp": 1}, (*CALLS, 512 - sum(CALLS))),
            ({"tp": 2}, ()),
            ({"tp": 4}, (100, 412)),
        ):
            ours = our_logits(folder / "model.gguf", text, "bf16", mesh, calls=calls)
            np.testing.assert_array_equal(ours, expected_logits, str((mesh, calls)))
    return config, models.open(folder / "bf16")


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_logits_of_families(name, tmp_path):
    """Every family with its scalings, biases, windows and ties, in plain and quantised types."""
    case = BY_NAME[name]
    config, theirs = _compare(case, tmp_path, _mixed((*PLAIN, *QUANTISED)), _changes(case))
    assert config.decoder == theirs.decoder


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PLAIN, *QUANTISED, *OF_256], ids=lambda kind: kind.name)
def test_logits_of_types(kind, tmp_path):
    """Every type of tensors, in all matrices of a Llama."""
    _compare(BY_NAME["llama"], tmp_path, lambda name, values: kind, WIDE, is_divided=True)


def test_a_model_without_undone_rows_is_noticed(tmp_path):
    """Logits differ if rows of queries stay in the file's order."""
    with pytest.raises(AssertionError, match="Mismatched"):
        from tilewise.checkpoint.gguf import families

        family = families.FAMILIES["llama"]
        families.FAMILIES["llama"] = replace(family, is_permuted=False)
        try:
            _compare(BY_NAME["llama"], tmp_path, lambda name, values: Kind.Q8_0, WIDE)
        finally:
            families.FAMILIES["llama"] = family


@pytest.mark.slow
def test_vectors_of_bert(tmp_path):
    """An encoder in Q8_0 has the vectors of its dequantised model; the file says how to pool them."""
    import torch
    import transformers

    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "##s"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = transformers.BertModel(
        transformers.BertConfig(vocab_size=len(words), **sizes), add_pooling_layer=False
    )
    vocabulary = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [*words[:4], "\u2581hello", "\u2581world", "s"],
        "tokenizer.ggml.token_type": [3] * 4 + [1] * 3,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
    }
    file = tmp_path / "m.gguf"
    weights = write_model(file, theirs, lambda name, values: Kind.Q8_0, vocabulary=vocabulary)
    config = json.loads(theirs.config.to_json_string(use_diff=False)) | {"dtype": "bfloat16"}
    with Encoder(file, dtype="bf16") as encoder:
        save_pretrained(tmp_path / "bf16", config, weights.items(), encoder.tokenizer)
        assert (encoder.pooling.mode, encoder.pooling.normalize) == ("cls", True)
        ours = encoder.encode(["hello worlds", "world"])
        with Encoder(tmp_path / "bf16", dtype="bf16", pooling=encoder.pooling) as original:
            np.testing.assert_array_equal(ours, original.encode(["hello worlds", "world"]))
    assert np.abs(ours[0] - ours[1]).max() > 1e-3
