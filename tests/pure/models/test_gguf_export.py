"""GGUF files: keys, tensors and tokenizers as llama.cpp's converter writes them, read back with its gguf package."""

import json

import ml_dtypes
import numpy as np
import pytest

from support.sentence_pieces import ENTRIES, encoded_pieces, sentence_piece_tokenizer
from tilewise import models
from tilewise.checkpoint import save_pretrained
from tilewise.checkpoint.gguf_vocabulary import parse_pieces, vocabulary_values
from tilewise.checkpoint.gguf_writer import GgufTensor, write_gguf
from tilewise.core import CheckpointError, ConfigError
from tilewise.data import train_tokenizer
from tilewise.files.reading import Unreadable
from tilewise.models.decoder import Rope, rope_table
from tilewise.models.gemma2 import Gemma2Config
from tilewise.models.gemma3 import Gemma3Config
from tilewise.models.gguf import gguf_tensors, gguf_values
from tilewise.models.gpt2 import GPT2Config
from tilewise.models.llama import LlamaConfig
from tilewise.models.mistral import MistralConfig
from tilewise.models.phi3 import Phi3Config
from tilewise.models.qwen2 import Qwen2Config
from tilewise.models.qwen3 import Qwen3Config

gguf = pytest.importorskip("gguf")
SIZES = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 30.0}
FACTORS = {"long_factor": [2.0] * 8, "short_factor": [1.5] * 8}
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 9}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3": LlamaConfig(**SIZES, rope_scaling=LLAMA3, rope_theta=500000.0, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, rope_scaling=YARN),
    "qwen3": Qwen3Config(**SIZES, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "phi3": Phi3Config(
        **SIZES,
        sliding_window=11,
        original_max_position_embeddings=32,
        rope_scaling={"rope_type": "longrope", **FACTORS},
    ),
    "gemma2": Gemma2Config(**SIZES, **GEMMA),
    "gemma3": Gemma3Config(**{**SIZES, "num_hidden_layers": 6}, **GEMMA, sliding_window_pattern=3),
}


def tensors_of(config, seed=0):
    """Random weights by the family's names."""
    rng = np.random.default_rng(seed)
    weights = {
        name: rng.normal(0, 0.5, shape).astype(ml_dtypes.bfloat16)
        for name, shape in models.parameter_shapes(config)
    }
    return {name: np.asarray(tensor) for name, tensor in models.stored_tensors(config, weights)}


def read_back(path):
    """Key-values, and the numbers and types of tensors."""
    reader = gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in tensor.shape)[::-1]
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        tensors[tensor.name] = (tensor.tensor_type.name, numbers)
    return values, tensors


def expected_tensors(config, tensors, kind, names):
    """What llama.cpp's converter writes of a model's tensors, with its own names."""
    types = gguf.GGMLQuantizationType
    expected = {}
    for name, tensor in tensors.items():
        values = tensor.astype(np.float32)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if f".{part}." in name and config.model_type in ("llama", "mistral"):
                values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if "gemma" in config.model_type and name.endswith("norm.weight"):
            values = values + np.float32(1)
        wide = "q8_0" if kind == "q4_0" and stored in ("token_embd.weight", "output.weight") else kind
        of = types.F32 if values.ndim == 1 else types[wide.upper()]
        expected[stored] = (of.name, gguf.dequantize(gguf.quantize(values, of), of).reshape(values.shape))
    return expected


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_have_the_names_order_and_numbers_of_llama_cpp(tmp_path, name, kind):
    """Of every family and type, to the bit; a changed weight shows."""
    config = CONFIGS[name]
    tensors = tensors_of(config)
    write_gguf(tmp_path / "a.gguf", gguf_values(config, kind), list(gguf_tensors(config, tensors, kind)))
    values, written = read_back(tmp_path / "a.gguf")
    number = next(n for n, of in gguf.MODEL_ARCH_NAMES.items() if of == values["general.architecture"])
    expected = expected_tensors(
        config, tensors, kind, gguf.get_tensor_name_map(number, config.num_hidden_layers)
    )
    extra = {"llama3": {"rope_freqs.weight"}, "phi3": {f"rope_factors_{x}.weight" for x in ("long", "short")}}
    assert set(written) == set(expected) | extra.get(name, set())
    assert all(
        written[n][0] == of and np.array_equal(written[n][1], numbers)
        for n, (of, numbers) in expected.items()
    )
    tensors[next(n for n in tensors if "down_proj" in n)][0, 0] = 100
    planted = expected_tensors(
        config, tensors, kind, gguf.get_tensor_name_map(number, config.num_hidden_layers)
    )
    assert sum(not np.array_equal(planted[n][1], written[n][1]) for n in planted) == 1


def test_keys_describe_the_model():
    """Sizes, RoPE, windows and caps, under the architecture's name."""
    values = gguf_values(CONFIGS["qwen2"], "q8_0")
    assert (
        values["general.architecture"] == "qwen2"
        and values["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    )
    sizes = {
        "vocab_size": 70,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 2,
        "context_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 30.0,
    }
    assert {f"qwen2.{key}": value for key, value in sizes.items()}.items() <= values.items()
    gemma2, gemma3 = (gguf_values(CONFIGS[name], "bf16") for name in ("gemma2", "gemma3"))
    assert gemma2["gemma2.attention.sliding_window"] == 9 and gemma2["gemma2.attn_logit_softcapping"] == 50.0
    assert (
        gemma3["gemma3.attention.sliding_window_pattern"] == 3
        and gemma3["gemma3.rope.freq_base_swa"] == 10000.0
    )
    phi3 = gguf_values(CONFIGS["phi3"], "bf16")
    assert phi3["phi3.attention.sliding_window"] == 11 and phi3[
        "phi3.rope.scaling.attn_factor"
    ] == pytest.approx((1 + np.log(8) / np.log(32)) ** 0.5)


def test_frequencies_of_llama3_are_divisors():
    """1 for short wavelengths, the factor for long ones, as transformers scales them."""
    config = CONFIGS["llama3"]
    divisors = np.asarray(next(gguf_tensors(config, {}, "bf16")).values)
    plain, scaled = (
        np.arcsin(rope_table(rope, 16, 2, 64)[1, 8:].astype(np.float64))
        for rope in (Rope(500000.0, 256), config.decoder.ropes[0])
    )
    assert np.allclose(plain / scaled, divisors, rtol=1e-5)
    assert divisors.max() == 8 and divisors.min() == 1


REJECTED = [
    (GPT2Config(70, 32, 64, 1, 2), "must be of llama"),
    (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1), "sliding windows"),
    (Qwen3Config(**SIZES, attention_bias=True), "qkv_bias"),
    (LlamaConfig(**SIZES, hidden_act="gelu"), "activation gelu"),
    (LlamaConfig(**SIZES, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_scaling dynamic"),
    (LlamaConfig(**SIZES, rope_scaling={**YARN, "attention_factor": 2.0}), r"rope_scaling\.attention_factor"),
    (Qwen2Config(**SIZES, rope_scaling=LLAMA3), "rope_scaling llama3"),
    (Phi3Config(**{**SIZES, "head_dim": 8}), "heads of 32 elements together"),
    (Gemma2Config(**SIZES, **{**GEMMA, "query_pre_attn_scalar": 20}), "query_pre_attn_scalar 20"),
    (Gemma2Config(**SIZES, **GEMMA, attn_logit_softcapping=None), "softcaps"),
    (Gemma3Config(**SIZES, **GEMMA, layer_types=("full_attention", "sliding_attention")), "not in a period"),
]


@pytest.mark.parametrize(("config", "words"), REJECTED)
def test_models_that_llama_cpp_does_not_have_are_rejected(config, words):
    """By what it lacks; it would run another model."""
    with pytest.raises(ConfigError, match=words):
        gguf_values(config, "bf16")


def test_a_failed_file_leaves_nothing(tmp_path):
    """Weights that are not finite in the type; an existing file is kept."""
    target = tmp_path / "a.gguf"
    target.write_bytes(b"old")
    for kind, number in (("q8_0", np.nan), ("bf16", np.inf), ("q4_0", 1e8)):
        values = np.ones((2, 32), np.float32)
        values[1, 3] = number
        with pytest.raises(CheckpointError, match=rf"finite in {kind}; got others in 't'"):
            write_gguf(target, {}, [GgufTensor("t", kind, values)])
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"] and target.read_bytes() == b"old"


def save_model(directory, tokenizer, **more):
    """A model directory with this tokenizer."""
    config = LlamaConfig(**{**SIZES, "vocab_size": 300}, **more)
    save_pretrained(directory, config.to_dict(), tensors_of(config).items(), tokenizer)
    return directory


def test_a_byte_level_tokenizer_and_its_templates(tmp_path):
    """Tokens by id with their types, merges in order, special tokens, and chat templates."""
    tokenizer = train_tokenizer(
        ["def f(x):\n    return x"] * 9, vocab_size=270, special_tokens=["<s>", "</s>"]
    )
    directory = save_model(tmp_path / "model", tokenizer)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    values = vocabulary_values(directory, 300, None, [1, 0])
    vocabulary = tokenizer.get_vocab()
    tokens = values["tokenizer.ggml.tokens"]
    assert len(tokens) == 300 and all(tokens[id_] == text for text, id_ in vocabulary.items())
    assert tokens[299] == "[PAD299]" and values["tokenizer.ggml.token_type"][299] == 5
    assert values["tokenizer.ggml.token_type"][:3] == [3, 3, 1]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert values["tokenizer.ggml.merges"] == [" ".join(merge) for merge in merges] and merges
    assert (values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert (values["tokenizer.ggml.eos_token_id"], values["tokenizer.ggml.eot_token_id"]) == (1, 0)
    (directory / "tokenizer_config.json").write_text(
        '{"eos_token": "<s>"}'
    )  # which comes first if texts end by it
    again = vocabulary_values(directory, 300, None, [1, 0])
    assert (again["tokenizer.ggml.eos_token_id"], again["tokenizer.ggml.eot_token_id"]) == (0, 1)
    assert values["tokenizer.ggml.add_bos_token"] is False and "tokenizer.ggml.bos_token_id" not in values
    assert values["tokenizer.chat_template"] == "{{ messages }}"


def test_a_sentence_piece_tokenizer_has_the_scores_of_its_model(tmp_path):
    """Tokens that were added later are user-defined; without tokenizer.model there are no scores."""
    save_model(tmp_path / "model", sentence_piece_tokenizer())
    with pytest.raises(ConfigError, match=r"tokenizer\.model, which has the scores"):
        vocabulary_values(tmp_path / "model", 300, 1, [2])
    (tmp_path / "model" / "tokenizer.model").write_bytes(encoded_pieces(*ENTRIES, has_prefix=False))
    values = vocabulary_values(tmp_path / "model", 300, 1, [2])
    assert values["tokenizer.ggml.model"] == "llama" and values["tokenizer.ggml.add_space_prefix"] is False
    assert values["tokenizer.ggml.scores"][: len(ENTRIES)] == [score for _, score, _ in ENTRIES]
    assert values["tokenizer.ggml.token_type"][: len(ENTRIES)] == [kind for _, _, kind in ENTRIES]
    assert values["tokenizer.ggml.tokens"][len(ENTRIES)] == "<more>"
    assert values["tokenizer.ggml.token_type"][len(ENTRIES) :] == [4] + [5] * (299 - len(ENTRIES))
    (tmp_path / "model" / "tokenizer.model").write_bytes(encoded_pieces(*ENTRIES[:-3], ("other", 0.0, 1)))
    with pytest.raises(ConfigError, match="must have the same tokens; got 'other'"):
        vocabulary_values(tmp_path / "model", 300, 1, [2])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x0a\x50",
        b"\x0f\x00",
        b"\x80" * 11,
        b"\x08\x01",
        encoded_pieces(("a", float("nan"), 1)),
        encoded_pieces(("a", 0.0, 9)),
        encoded_pieces(("", 0.0, 1)),
        b"\x0a\x03\x0a\x01\xff",
    ],
)
def test_damaged_sentence_piece_models_are_rejected(data):
    """In one line."""
    with pytest.raises(Unreadable) as caught:
        parse_pieces(data)
    assert "\n" not in str(caught.value)


def test_tokenizers_that_files_cannot_describe_are_rejected(tmp_path):
    """Another division of texts, another kind of model."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    tokenizer = train_tokenizer(["def f(x)"] * 9, vocab_size=260)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("x+"), "isolated"), level])
    with pytest.raises(ConfigError, match=r"divided by \('x\+'"):
        vocabulary_values(save_model(tmp_path / "a", tokenizer), 300, None, [0])
    words = Tokenizer(kinds.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match="a WordLevel tokenizer"):
        vocabulary_values(save_model(tmp_path / "b", words), 300, None, [0])
