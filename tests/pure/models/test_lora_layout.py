"""Which modules have adapters: PEFT's rules, and the errors for settings that fit no module."""

import copy

import numpy as np
import pytest

from tilewise import models
from tilewise.checkpoint.adapters import LoraConfig
from tilewise.core import ConfigError
from tilewise.graph import GraphBuilder
from tilewise.models.gpt2 import GPT2Config
from tilewise.models.llama import LlamaConfig

TIED = LlamaConfig(64, 16, 24, 2, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
LLAMA = LlamaConfig(64, 16, 24, 2, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
GPT2 = GPT2Config(64, 16, 32, 2, 2, max_position_embeddings=16, bos_token_id=0, eos_token_ids=(0,))
PHI3 = models.config_from_dict({"model_type": "phi3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
                                "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                                "original_max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
                                "pad_token_id": 0})  # fmt: skip


def modules(config, **settings):
    """Names in the graph of adapted weights, without `.weight`."""
    layout = models.lora_layout(config, LoraConfig(**settings))
    return {name.removesuffix(".weight") for name in layout.adapters}


def test_defaults_are_queries_and_values():
    """As PEFT's mapping for these families; a fused projection is adapted as a whole."""
    assert modules(LLAMA) == {f"layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "qv"}
    assert modules(GPT2) == {f"layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "qkv"}


def test_all_linear_leaves_out_the_head_and_tables():
    """But a list may name the head of a model whose head is not tied."""
    names = modules(LLAMA, target_modules="all-linear")
    assert len(names) == 14 and not any("embed" in name or "lm_head" in name for name in names)
    assert modules(LLAMA, target_modules=("lm_head",)) == {"lm_head"}


def test_parts_of_a_fused_projection_share_one_a():
    """Phi-3 stores queries, keys and values as one tensor, so PEFT has one adapter for the three."""
    layout = models.lora_layout(PHI3, LoraConfig(target_modules=("qkv_proj",), r=4))
    tables = {tensor.name: tensor for tensor in layout.table}
    b = tables["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"]
    assert [rows for _, rows in b.parameters] == [32, 16, 16]
    assert (
        len({adapter.names(name)[0] for name, adapter in layout.adapters.items() if "layers.0" in name}) == 1
    )
    graph = GraphBuilder("phi", adapters=layout.adapters)
    models.build_training_graph(graph, PHI3, 2, 8)
    layout.freeze_base(graph)
    assert {t.spec.name for t in graph.freeze().trainable()} == {*layout.shapes}


def test_ranks_and_scales_follow_patterns():
    """A pattern is the end of a name; the first that matches counts."""
    layout = models.lora_layout(
        LLAMA,
        LoraConfig(
            r=4, alpha=8, rank_pattern={"layers.0.self_attn.q_proj": 16}, alpha_pattern={r"1\..*v_proj": 2}
        ),
    )
    by_name = {name: (a.rank, a.scale) for name, a in layout.adapters.items()}
    assert by_name["layers.0.self_attn.q_proj.weight"] == (16, 0.5)
    assert by_name["layers.1.self_attn.v_proj.weight"] == (4, 0.5)
    assert by_name["layers.1.self_attn.q_proj.weight"] == (4, 2.0)
    rs = models.lora_layout(LLAMA, LoraConfig(r=4, alpha=8, use_rslora=True))
    assert {a.scale for a in rs.adapters.values()} == {4.0}


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"target_modules": ("query",)}, "matches none"),
        ({"target_modules": ("embed_tokens",)}, "not linear"),
        ({"target_modules": ("q_proj", "lm_head")}, "tied to the embedding"),
        ({"target_modules": "all-linear", "exclude_modules": ".*"}, "matches none"),
        ({"modules_to_save": ("score",)}, "score"),
        ({"modules_to_save": ("embed_tokens",)}, "also the head"),
        ({"target_modules": ("q_proj",), "rank_pattern": {"q_proj": 0}}, "rank"),
    ],
)
def test_settings_that_fit_no_module(settings, words):
    """Each is an error before any work."""
    with pytest.raises(ConfigError, match=words):
        models.lora_layout(TIED, LoraConfig(**settings))


def test_initial_values():
    """They depend on seed and name alone; b is zero unless `init` is false."""
    layout = models.lora_layout(LLAMA, LoraConfig(r=4))
    one, other = (
        layout.initial(1),
        models.lora_layout(LLAMA, LoraConfig(r=4, target_modules="all-linear")).initial(1),
    )
    for name, value in one.items():
        array = np.asarray(value)
        assert np.array_equal(array, np.asarray(other[name]))
        assert np.abs(array).max() <= (0.25 if "lora_A" in name else 0.0) and array.any() == (
            "lora_A" in name
        )
    false = models.lora_layout(LLAMA, LoraConfig(r=4, init=False)).initial(1)
    assert all(np.asarray(value).any() for value in false.values())


@pytest.mark.slow
def test_peft_selects_the_same_modules():
    """Random settings: the same modules, ranks and scales as PEFT's, for Llama and GPT-2."""
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    ends = {LLAMA: ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head", "norm"],
            GPT2: ["c_attn", "c_proj", "c_fc", "ln_f"]}  # fmt: skip
    for config, names in ends.items():
        theirs = transformers.AutoConfig.for_model(**config.to_dict())
        with torch.device("meta"):
            base = transformers.AutoModelForCausalLM.from_config(theirs)
        linear = [n for n in names if "norm" not in n and "ln" not in n]
        for _ in range(40):
            some = lambda of, most: tuple(rng.choice(of, rng.integers(1, most + 1), replace=False).tolist())  # noqa: E731
            targets = ["all-linear", some(linear, 3), f".*({'|'.join(some(linear, 2))})"][rng.integers(3)]
            excluded = some(linear[:2], 1) if rng.random() < 0.3 else None
            saved = some(names[-2:], 1) if rng.random() < 0.3 else ()
            ranks, alphas = {n: int(rng.integers(1, 9)) for n in some(linear, 1)}, {some(linear, 1)[0]: 3}
            own = {"r": 4, "exclude_modules": excluded, "rank_pattern": ranks, "alpha_pattern": alphas,
                   "modules_to_save": saved, "use_rslora": bool(rng.integers(2))}  # fmt: skip
            try:
                layout = models.lora_layout(config, LoraConfig(target_modules=targets, **own))
            except ConfigError as error:
                assert "matches none" in str(error)
                continue
            made = peft.get_peft_model(
                copy.deepcopy(base),
                peft.LoraConfig(
                    target_modules=targets if isinstance(targets, str) else list(targets),
                    task_type="CAUSAL_LM",
                    **{k: list(v) if isinstance(v, tuple) else v for k, v in own.items()},
                ),
            )
            expected = {n.replace(".default", "").replace(".modules_to_save", ""): tuple(p.shape)
                        for n, p in made.named_parameters() if p.requires_grad}  # fmt: skip
            stored = {t.name: t for t in layout.table}
            assert {*expected} == {*stored}, (targets, own)
            for name, module in made.named_modules():
                if hasattr(module, "lora_A"):
                    a = stored[f"{name}.lora_A.weight"].parameters[0][0]
                    scales = {x.scale for n, x in layout.adapters.items() if x.names(n)[0] == a}
                    assert [*scales] == [pytest.approx(module.scaling["default"])]


def test_weights_that_read_one_tensor_are_quantised_together():
    """A layer whose v_proj is in bf16 or trained has q_proj and k_proj in bf16, too."""
    names = [f"layers.{i}.self_attn.{n}_proj.weight" for i in range(2) for n in "qkvo"]
    formats = dict.fromkeys([*names, "layers.0.mlp.up_proj.weight", "embed_tokens.weight"], "q4_k")
    stays = models.formats_in_training(formats, frozenset({"layers.1.self_attn.v_proj.weight"}))
    assert list(stays) == [*names[:4], "layers.1.self_attn.o_proj.weight", "embed_tokens.weight"]
