"""Random small Llamas on random meshes equal one device to the bit."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from small_llama import batches, config, training_graph

import tilewise.core.dims
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import DeviceMesh
from tilewise.session import verify_strategy

shapes = st.fixed_dictionaries(
    {
        "num_hidden_layers": st.integers(1, 2),
        "hidden_size": st.integers(3, 80),
        "intermediate_size": st.integers(5, 120),
        "vocab_size": st.integers(130, 700),
        "head_dim": st.sampled_from([2, 6, 8, 16, 34]),
        "num_attention_heads": st.sampled_from([2, 4, 6, 8, 12]),
        "tie_word_embeddings": st.booleans(),
    }
)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    shapes,
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([{"dp": 2}, {"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 4}]),
    st.sampled_from([1, 2]),
    st.sampled_from([(8, 3), (8, 16), (16, 7), (8, 70)]),
    st.sampled_from(["f32", "bf16"]),
)
def test_random_models(sizes, group, axes, accumulation, data, dtype):
    """Sizes that fill no panel, k split or KV block; grouped and replicated heads; one step of each."""
    heads = sizes["num_attention_heads"]
    assume(heads % group == 0)
    model = config(**sizes, num_key_value_heads=heads // group)
    batch, seq = data
    graph = training_graph(model, dtype, batch, seq)
    try:
        graph.plan(axes, accumulation=accumulation)
    except LayoutError:
        assume(False)
    report = verify_strategy(
        graph, DeviceMesh(axes), batches(model, 2, batch, seq), accumulation=accumulation
    )
    assert report.equal, report.text


@pytest.mark.parametrize("heads,kv_heads,tp", [(6, 1, 2), (12, 2, 4), (6, 1, 4), (10, 2, 4)])
def test_groups_that_cannot_be_halved_are_rejected(heads, kv_heads, tp, monkeypatch):
    """A KV head's query heads spread only in powers of two; otherwise results really differ."""
    graph = training_graph(config(num_attention_heads=heads, num_key_value_heads=kv_heads), "f32", 8, 8)
    with pytest.raises(LayoutError, match="hold whole"):
        graph.plan({"tp": tp})
    if heads % tp == 0:  # else the shares of a KV head would not even be equal
        monkeypatch.setattr(tilewise.core.dims, "_keeps_groups", lambda *args: True)
        monkeypatch.setattr(
            "tilewise.strategy.pending_reductions.allowed_widths", lambda count: range(1, count + 1)
        )
        monkeypatch.setattr("tilewise.plan.settings.validate_pending_reductions", lambda *args: None)
        model = config(num_attention_heads=heads, num_key_value_heads=kv_heads)
        report = verify_strategy(graph, DeviceMesh({"tp": tp}), batches(model, 1, 8, 8))
        assert not report.equal


def test_groups_that_can_be_halved_equal_one_device():
    """Four query heads on one KV head, over two and four devices."""
    model = config(num_attention_heads=4, num_key_value_heads=1)
    graph = training_graph(model, "f32", 8, 8)
    for tp in (2, 4):
        report = verify_strategy(graph, DeviceMesh({"tp": tp}), batches(model, 1, 8, 8))
        assert report.equal, report.text
