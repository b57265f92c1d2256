"""bf16 products add terms in pairs: labels whose k splits begin at odd elements are rejected."""

from __future__ import annotations

import pytest

import tilewise as tw
from tilewise import models
from tilewise.core.errors import PlanError
from tilewise.nn import linear


def product(atom, size, dtype, *, is_summed):
    """A product that sums a labelled dim, or makes one, which its gradient sums."""
    label, cut = tw.DimLabel("x", atom), {"in_label": None, "out_label": None}
    graph = tw.ComputeGraph("pairs")
    cut["in_label" if is_summed else "out_label"] = label
    x = graph.input([8, size if is_summed else 16], name="x", labels=[tw.BATCH, label if is_summed else None])
    if not is_summed:
        x = linear(graph, x, "before", 16)  # whose gradient is the sum
    y = linear(graph, x if dtype == "f32" else graph.cast(x, dtype), "w", 6 if is_summed else size, **cut)
    graph.loss(graph.sum(y if dtype == "f32" else graph.cast(y, "f32")))
    return graph


@pytest.mark.parametrize("is_summed", [True, False])
@pytest.mark.parametrize("atom,size", [(3, 9), (1, 3), (3, 6), (7, 63)])
def test_k_splits_at_odd_elements_are_rejected(atom, size, is_summed):
    """In bf16, naming the label; fp32 accepts them."""
    with pytest.raises(
        PlanError, match=rf"at even elements.*got \d+ of {size} of 'x' in pieces of {atom}.*'linear:w'"
    ):
        product(atom, size, "bf16", is_summed=is_summed).plan()
    product(atom, size, "f32", is_summed=is_summed).plan()


@pytest.mark.parametrize("atom,size", [(2, 8), (1, 64), (6, 36), (9, 9)])
def test_even_cuts_are_accepted(atom, size):
    """Even pieces, single elements in even k splits, and one piece alone."""
    product(atom, size, "bf16", is_summed=True).plan()


def test_odd_head_sizes_are_rejected():
    """For a model, before weights are loaded; sums would be wrong."""
    config = models.config_from_dict(
        {"model_type": "gpt2", "vocab_size": 199, "n_embd": 36, "n_layer": 1, "n_head": 4}
    )
    graph = tw.ComputeGraph("gpt2")
    models.build_training_graph(graph, config, 2, 8, "bf16")
    with pytest.raises(
        PlanError, match=r"'heads' in pieces of 9.*use pieces \(heads\) of an even size, or f32"
    ):
        graph.plan()
