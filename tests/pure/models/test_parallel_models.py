"""`ParallelModelBuilder` builds what the families' own builders build, for every family and purpose."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import models
from tilewise.core.dims import Dim
from tilewise.core.errors import ConfigError, ShapeError
from tilewise.graph import GraphBuilder
from tilewise.models import ParallelModelBuilder

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GIVEN = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "mistral": {**SIZES, "num_key_value_heads": 2, "sliding_window": 7},
    "qwen2": {**SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {**SIZES, "head_dim": 16},
    "gemma2": {**SIZES, "attn_logit_softcapping": 50.0, "sliding_window": 6},
    "gemma3_text": {**SIZES, "sliding_window_pattern": 2, "sliding_window": 6},
    "phi3": {**SIZES, "partial_rotary_factor": 0.5},
    "smollm3": {**SIZES, "num_key_value_heads": 2, "no_rope_layer_interval": 2},
    "olmo2": SIZES,
    "granite": {**SIZES, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 5, "n_head": 2, "n_inner": None},
    "bert": {**SIZES, "type_vocab_size": 2},
}
PURPOSES = {
    "training": {"batch": 2, "seq": Dim("seq", 1, 16)},
    "decoding": {"max_tokens": 8, "max_sequences": 2, "num_blocks": 3, "dtype": "f32"},
    "encoding": {"batch": 3, "seq": 8},
}


def config_of(family):
    return models.config_from_dict({"model_type": family, **GIVEN[family]})


def built(purpose, config):
    graph = GraphBuilder("model")
    getattr(models, f"build_{purpose}_graph")(graph, config, **PURPOSES[purpose])
    return graph.freeze()


def test_every_family_is_tested():
    """And no other."""
    assert set(GIVEN) == set(models.FAMILIES)


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("family", GIVEN)
def test_same_graph_for_any_number_of_threads(family, purpose):
    """Or the same error."""
    config = config_of(family)
    if purpose == ("decoding" if family == "bert" else "encoding"):
        for build in (ParallelModelBuilder, models.model_parts):
            with pytest.raises(ConfigError, match="needs a"):
                build(config, purpose, **PURPOSES[purpose])
        return
    expected = built(purpose, config)
    for threads in (1, 4):
        graph = GraphBuilder("model")
        ParallelModelBuilder(config, purpose, threads=threads, **PURPOSES[purpose]).build(graph)
        assert graph.freeze() == expected


def test_building_parts_by_hand():
    """Caches and layers as futures, assembled by hand; layers alone give the same graph."""
    config = config_of("qwen3")
    for with_caches in (True, False):
        builder, graph = (
            ParallelModelBuilder(config, "decoding", **PURPOSES["decoding"]),
            GraphBuilder("model"),
        )
        caches, layers = builder.create_kv_caches(), builder.create_layers()
        builder.assemble(graph, *([caches] if with_caches else []), layers)
        assert graph.freeze() == built("decoding", config)
    names = [spec.path for spec in caches.result()]
    assert names[:3] == [
        "layers.0.self_attn.k_cache",
        "layers.0.self_attn.v_cache",
        "layers.1.self_attn.k_cache",
    ]


def test_wrong_caches_and_missing_layers_are_rejected():
    """The graph is unchanged."""
    config, sizes = config_of("llama"), PURPOSES["decoding"]
    builder, graph = ParallelModelBuilder(config, "decoding", **sizes), GraphBuilder("model")
    other = ParallelModelBuilder(config, "decoding", **{**sizes, "num_blocks": 4})
    for groups, words in (
        ([other.create_kv_caches(), builder.create_layers()], "must declare the specified"),
        ([builder.create_kv_caches()], "a model has 5 layers; got 0"),
        ([builder.create_layers(), builder.create_layers()], "a unique path"),
        ([builder.create_layers().result()[1:]], "'layers.0', which is neither"),
    ):
        with pytest.raises(ShapeError, match=words):
            builder.assemble(graph, *groups)
        assert not graph.freeze().tensors
    with pytest.raises(ShapeError, match="must have KV caches"):
        ParallelModelBuilder(config, batch=1, seq=4).create_kv_caches()


@pytest.mark.parametrize(
    ("purpose", "sizes"),
    [
        ("training", {}),
        ("training", {"batch": 1, "seq": 4, "rows": 2}),
        ("writing", {"batch": 1, "seq": 4}),
        ("training", {"batch": 0, "seq": 4}),
        ("training", {"batch": 1, "seq": 1 << 30}),
    ],
)
def test_wrong_sizes_are_rejected(purpose, sizes):
    """When the builder is made."""
    with pytest.raises((ConfigError, ShapeError), match=r"\[models"):
        ParallelModelBuilder(config_of("llama"), purpose, **sizes)
    with pytest.raises(ShapeError, match="ModelParts already have sizes"):
        ParallelModelBuilder(models.model_parts(config_of("llama"), "training", batch=1, seq=4), batch=3)


WINDOWS = st.lists(st.sampled_from([None, *range(1, 12)]), min_size=1, max_size=8)


@settings(max_examples=25)
@given(WINDOWS, st.integers(1, 4), st.sampled_from(["training", "decoding"]))
def test_random_models(windows, threads, purpose):
    """Layers of any kinds, mixed."""
    kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
    config = models.config_from_dict(
        {
            "model_type": "gemma3_text",
            **SIZES,
            "num_hidden_layers": len(kinds),
            "layer_types": kinds,
            "sliding_window": max((w for w in windows if w), default=1),
        }
    )
    graph = GraphBuilder("model")
    ParallelModelBuilder(config, purpose, threads=threads, **PURPOSES[purpose]).build(graph)
    assert graph.freeze() == built(purpose, config)


def test_every_name_of_the_package_is_exported():
    """They are loaded on access; others are rejected."""
    assert all(getattr(models, name) is not None for name in models.__all__)
    assert set(models.__all__) <= set(dir(models)) and not hasattr(models, "no_such_name")
