"""One device with one microbatch skips propagation: its layout is the one that propagation would find."""

import pytest

from pure.plans import with_update
from pure.small_gemma import GEMMA
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import DeviceMesh
from tilewise.graph import GraphBuilder, simplify
from tilewise.ir.batch import cut_batch
from tilewise.models import build_decoding_graph, build_training_graph
from tilewise.models.llama import LlamaConfig
from tilewise.strategy import DistributionStrategy, ParallelismMode, propagate, propagate_layouts

LLAMA = LlamaConfig(512, 64, 96, 2, num_attention_heads=4, num_key_value_heads=2)


def trained(config):
    """A training step with gradients and an update."""
    builder = GraphBuilder("model")
    build_training_graph(builder, config, 8, 32, "bf16")
    return with_update(builder)


def decoding(config):
    """A decoding step, with KV caches."""
    builder = GraphBuilder("model")
    build_decoding_graph(builder, config, max_tokens=8, max_sequences=2, num_blocks=4)
    return simplify(builder.freeze())


def found_by_propagation(graph, mesh, strategy):
    """The layout by propagation over every op."""
    batch = cut_batch(graph)
    every = propagate._Propagation(mesh, strategy, batch)
    outside = {t.id: every.ruled(t) for t in graph.tensors if t.kind != "result"}
    return every.lay_out(graph, outside, every.hints(graph))[0]


@pytest.mark.parametrize(
    ("define", "config"),
    [(trained, LLAMA), (trained, GEMMA), (decoding, LLAMA)],
    ids=["llama", "gemma", "decoding"],
)
def test_layout_equals_propagation(define, config):
    """Layouts, pending reductions, reshards, and those of layers."""
    graph = define(config)
    for axes in ({}, {"dp": 1, "tp": 1}):
        mesh = DeviceMesh(axes)
        strategy = DistributionStrategy.for_mesh(mesh)
        alone = propagate_layouts(graph, mesh, strategy, cut_batch(graph))
        assert alone == found_by_propagation(graph, mesh, strategy)


def test_other_layout_is_detected():
    """The twin: a layout of two devices is not that of one."""
    graph, mesh = trained(LLAMA), DeviceMesh({"dp": 2})
    alone = propagate_layouts(graph, DeviceMesh({}), DistributionStrategy.single(), cut_batch(graph))
    assert alone.compute != found_by_propagation(graph, mesh, DistributionStrategy.for_mesh(mesh)).compute


def test_names_and_layouts_are_checked():
    """Also on one device."""
    graph = trained(LLAMA)
    for layouts, words in (
        ({"no.such.*": ("dp", None)}, "matches none"),
        ({"*.q_proj.weight": ("dp", None, None)}, "at most one entry per dim"),
    ):
        strategy = DistributionStrategy(ParallelismMode.DDP, {"dp": 1}, {}, layouts)
        with pytest.raises(LayoutError, match=words):
            propagate_layouts(graph, DeviceMesh({"dp": 1}), strategy, cut_batch(graph))
