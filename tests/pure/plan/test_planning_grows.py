"""Planning time depends on the distinct parts of a graph: equal layers repeat no work, and each costs the same."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from pure.plans import plan_graph, with_update
from tilewise.graph import GraphBuilder
from tilewise.graph.draft import ValueNumbers
from tilewise.ir.counts import counts
from tilewise.models.decoder import model
from tilewise.models.decoder.architecture import LayerKind
from tilewise.models.decoder.sharding import BATCH
from tilewise.models.llama import LlamaConfig
from tilewise.plan.bind import entries
from tilewise.plan.schedule import RootTensors
from tilewise.plan.shapes import LocalShapes


def define_layers(layers, unlike=""):
    """A small Llama's graph; with `unlike`, each layer has its own window, or MLP width."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    builder = GraphBuilder("llama")
    if unlike != "width":
        kinds = tuple(replace(k, window=i + 1) for i, k in enumerate(config.decoder.layers))
        decoder = replace(config.decoder, layers=kinds) if unlike else config.decoder
        model.training_parts(decoder, 16, 32, "bf16").build(builder)
        return builder
    x = builder.input([16, 32, 64], "bf16", name="x", labels=[BATCH, None, None])
    positions = builder.constant(
        np.zeros((16, 32), np.int32), name="positions", labels=[BATCH, None], storage="scalars"
    )
    for i in range(layers):
        decoder = replace(config.decoder, intermediate_size=96 + 32 * i)
        kind = decoder.layers[0]
        x = model.decoder_layer(builder, x, positions, path=f"layers.{i}", decoder=decoder, kind=kind)
    builder.loss(builder.mean(builder.cast(x, "f32")))
    return builder


def plan_layers(layers, axes, unlike=""):
    """Its plan, without native code."""
    return plan_graph(with_update(define_layers(layers, unlike)), axes)


def count_calls(work):
    """How many functions are called, Python's own among them, while `work` runs."""
    seen = 0

    def count(frame, event, argument):
        nonlocal seen
        seen += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return seen


def count_work(monkeypatch, layers, axes):
    """How often layers are traced, differentiated, laid out and lowered for a plan, and local sizes computed."""
    calls = []
    compute = LocalShapes._sizes
    counts.reset()
    with monkeypatch.context() as patched:
        patched.setattr(LocalShapes, "_sizes", lambda self, *of: (calls.append(of), compute(self, *of))[1])
        plan_layers(layers, axes)
    return (counts.traced, counts.differentiated, counts.sharded, counts.lowered), len(calls)


@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}])
def test_more_layers_are_no_more_work(monkeypatch, axes):
    """Sixteen equal layers are lowered as often as eight; local sizes are computed once per shape, layout, device."""
    assert count_work(monkeypatch, 16, axes) == count_work(monkeypatch, 8, axes)


def test_missing_cache_of_sizes_is_detected(monkeypatch):
    """The twin: without the cache, more layers compute more."""
    monkeypatch.setattr(LocalShapes, "sizes", lambda self, spec, layout: self._sizes(spec, layout))
    monkeypatch.setattr(
        RootTensors,
        "bytes",
        lambda self, t: self.shapes.bytes_max(self.graph.spec(t), self.layout.compute[t]),
    )
    assert count_work(monkeypatch, 16, {})[1] > count_work(monkeypatch, 8, {})[1]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}])
def test_calls_grow_linearly_in_layers(axes):
    """Eight layers more cost as many function calls after sixteen as after eight, within one in fifty."""
    plan_layers(8, axes)  # fills the caches of this process
    calls = [count_calls(lambda n=n: plan_layers(n, axes)) for n in (8, 16, 24)]
    first, second = calls[1] - calls[0], calls[2] - calls[1]
    assert abs(second - first) <= first / 50


@pytest.mark.parametrize("unlike", ["window", "width"])
@pytest.mark.slow
def test_calls_grow_linearly_in_different_layers(unlike):
    """Where no template is used twice, each costs as many function calls as the ones before."""
    plan_layers(8, {}, unlike)
    calls = [count_calls(lambda n=n: plan_layers(n, {}, unlike)) for n in (8, 16, 24)]
    first, second = calls[1] - calls[0], calls[2] - calls[1]
    assert abs(second - first) <= first / 20


def test_templates_of_different_layers_are_made_once():
    """Eight more different layers are eight more templates to trace, differentiate, lay out and lower."""
    work = []
    for layers in (8, 16):
        counts.reset()
        plan_layers(layers, {}, "window")
        work.append((counts.traced, counts.differentiated, counts.sharded, counts.lowered))
    more = [b - a for a, b in zip(*work)]
    assert more == [8, 8, 16, 16]  # forward and backward are laid out and lowered


def count_pairs(layers):
    """How many entries of a plan depend on another one that shares its bytes."""
    (of,) = plan_layers(layers, {}, "width").program.classes
    return sum(map(len, of.aliases.values()))


def test_shared_bytes_grow_linearly_in_different_layers():
    """Templates of increasing sizes conflict with those before them, not with all."""
    pairs = [count_pairs(n) for n in (4, 8, 12)]
    assert pairs[2] - pairs[1] <= 1.1 * (pairs[1] - pairs[0])


@pytest.mark.slow
def test_quadratic_pairs_of_shared_bytes_are_detected(monkeypatch):
    """The twin: if all templates conflicted with each other, the count would grow quadratically."""

    def all_of(uses):
        every = {t.entries: t for live_intervals in uses for t in live_intervals}.values()
        return {
            t.entries: {o.entries[0] for o in every if o.begin < t.end and t.begin < o.end and o is not t}
            for t in every
        }

    monkeypatch.setattr(entries, "find_conflicts", all_of)
    pairs = [count_pairs(n) for n in (4, 8, 12)]
    assert pairs[2] - pairs[1] > 1.3 * (pairs[1] - pairs[0])


@pytest.mark.parametrize("unlike", ["", "window", "width"])
def test_definition_grows_linearly_in_layers(unlike):
    """A layer costs as many function calls after twenty others as after ten."""
    define_layers(10, unlike)
    calls = [count_calls(lambda n=n: define_layers(n, unlike)) for n in (10, 20, 30)]
    first, second = calls[1] - calls[0], calls[2] - calls[1]
    assert abs(second - first) <= first / 50


def count_comparisons(monkeypatch, layers):
    """How often kinds of layers are compared while layers with their own windows are described."""
    compared, is_equal = [], LayerKind.__eq__
    with monkeypatch.context() as patched:
        patched.setattr(LayerKind, "__eq__", lambda a, b: (compared.append(a), is_equal(a, b))[1])
        define_layers(layers, "window")
    return len(compared)


def test_layers_are_not_compared_with_all_others(monkeypatch):
    """Twice as many different layers take twice as many comparisons."""
    few, many = (count_comparisons(monkeypatch, n) for n in (10, 20))
    assert many <= 2 * few + 2


def test_quadratic_comparison_of_layers_is_detected(monkeypatch):
    """The twin: with a linear search for attributes, the count grows with the square."""
    seen = []

    def search(self, value):
        index = next((i for i, other in enumerate(seen) if other == value), len(seen))
        seen.extend([value] if index == len(seen) else [])
        return index

    monkeypatch.setattr(ValueNumbers, "number", search)
    few, many = (count_comparisons(monkeypatch, n) for n in (10, 20) if not seen.clear())
    assert many > 2 * few + 2
