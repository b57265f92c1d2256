"""Recomputation of results that layers do not save: which ops, in which layers, with how much memory."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure.plans import plan_graph, with_update
from tilewise.core.dims import BATCH
from tilewise.core.errors import PlanError, TilewiseError
from tilewise.graph import GraphBuilder, Recomputation, differentiate, layer, recomputation, simplify
from tilewise.graph import recompute as recomputed
from tilewise.graph.gradients import differentiate_template
from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph
from tilewise.ir.validate import validate_graph
from tilewise.models import build_training_graph, config_from_dict
from tilewise.nn import linear, rms_norm

SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def define(family="llama", layers=3, dtype="bf16"):
    """A builder of a small model's training graph."""
    sizes = {**SIZES, "num_hidden_layers": layers}
    if family == "gpt2":
        sizes = {"vocab_size": 257, "n_embd": 64, "n_layer": layers, "n_head": 8}
    builder = GraphBuilder(family)
    build_training_graph(builder, config_from_dict({"model_type": family, **sizes}), 16, 32, dtype)
    return builder


def trained(recompute, family="llama", layers=3) -> Graph:
    """The graph with its gradients."""
    builder = define(family, layers)
    graph = simplify(builder.freeze())
    return recomputed(differentiate(graph, builder.draft.loss_id), Recomputation.of(recompute)).graph


def planned(recompute, axes=None, family="llama", layers=3, accumulation=1):
    """A plan, without native code."""
    graph = with_update(define(family, layers), recompute=recompute)
    return plan_graph(graph, axes or {}, accumulation)


def again(graph, key=".backward"):
    """Labels of the ops that templates whose keys contain `key` recompute."""
    ops = (op for k, t in graph.templates.items() if key in k for op in t.graph.ops)
    return [op.label.removeprefix("recomputed ") for op in ops if op.label.startswith("recomputed ")]


def saved(graph, name):
    """Labels of the ops whose results a layer saves."""
    call = next(op for op in graph.ops if op.label == name)
    inside = graph.templates[call.attrs["template"]].graph
    return [inside.ops[inside.tensors[t].producer].label for t in call.attrs["saved"]]


def test_default_recomputes_nothing():
    """It saves what gradients use."""
    assert trained("none") == trained([]) and again(trained("none")) == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "phi3"])
def test_full_saves_only_arguments(family):
    """All ops run again but the last product, whose result no gradient uses."""
    graph = trained("full", family)
    assert saved(graph, "layers.1") == []
    labels = [
        op.label for k, t in graph.templates.items() if k.endswith("decoder_layer") for op in t.graph.ops
    ]
    assert sorted(again(graph)) == sorted(labels[: labels.index("linear:mlp.down_proj.weight")])


def test_norm_after_the_last_product_needs_it():
    """Gemma's layers end in norms, whose gradients use their operands."""
    assert "linear:mlp.down_proj.weight" in again(trained("full", "gemma2"))


def test_selective_saves_products_and_attention():
    """Norms and gates run again; products and ops that would save no memory do not."""
    graph = trained("selective")
    assert {label.partition(":")[0] for label in again(graph)} == {"rms_norm", "silu_gate"}
    labels = saved(graph, "layers.0")
    assert (
        labels.count("rope") == 2 and labels.count("attention") == 2 and "linear:mlp.up_proj.weight" in labels
    )
    assert "linear:self_attn.q_proj.weight" not in labels
    assert "rope" in again(trained("selective", "qwen3"))  # behind a norm, whose gradient uses the product


def test_names_choose_layers_and_ops():
    """A pattern of layers; after a slash labels or names of ops. Layers with equal choices share a template."""
    graph = trained(["layers.[01]", "layers.*/silu*", "layers.*/rms_norm"], layers=5)
    assert saved(graph, "layers.0") == saved(graph, "layers.1") == []
    assert set(again(graph, ".named")) == {
        "silu_gate",
        "rms_norm:input_layernorm.weight",
        "rms_norm:post_attention_layernorm.weight",
    }
    backward = [op.attrs["template"] for op in graph.ops if op.label.endswith(".backward")]
    assert [key.rpartition(".")[2] for key in backward] == ["named"] * 3 + ["full"] * 2


def test_equivalent_choices_are_one_template():
    """Choices of the same ops are the same template; other sets have their own keys."""
    labels = [op.label for k, t in trained("none").templates.items() for op in t.graph.ops]
    assert "silu_gate_backward" in labels
    graph = trained(["layers.0/silu_gate", "layers.1/silu*", "layers.2/rms_norm"])
    keys = [key for key in graph.templates if ".backward" in key]
    assert [key.partition(".backward")[2] for key in keys] == [".named", ".named#2"]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("some", r"none, selective, full; names go into a list; got 'some'"),
        (True, "a sequence of names; got True"),
        ({"layers.0": "full"}, "a sequence of names"),
        (["layers.0", 3], "a pattern of names must be printable text; got 3"),
        (["/silu"], "must be LAYERS or LAYERS/OPS; got '/silu'"),
        (["layers.*/"], "must be LAYERS or LAYERS/OPS; got 'layers.*/'"),
        (["layers.9"], r"match names of layers .*; got 'layers.9'; choose from layers.2, layers.1, layers.0"),
        (["layers.*", "blocks.*/silu"], r"match names of layers .*; got 'blocks.\*/silu'"),
        (["layers.*/gelu"], r"match labels of ops .*; got 'layers.\*/gelu'; choose from rms_norm:input"),
    ],
)
def test_choices_without_effect_are_rejected(choice, words):
    """An unknown word, another type, a pattern that matches nothing: the error names it."""
    with pytest.raises(PlanError, match=rf"\[graph.recompute\] .*{words}"):
        trained(choice)


def test_graph_without_layers_is_rejected():
    """Nothing would be recomputed; a missing loss is rejected too."""
    graph = GraphBuilder("flat")
    x = graph.input([4, 8], name="x", labels=[BATCH, None])
    loss = graph.mean(linear(graph, x, "w", 8))
    with pytest.raises(PlanError, match="that the loss depends on; got no layer in 'flat'"):
        recomputed(differentiate(graph.freeze(), loss.id), Recomputation.of("full"))


@pytest.mark.parametrize("recompute", ["full", ["layers.0", "layers.*/rms_norm*"]], ids=str)
def test_work_does_not_grow_with_depth(recompute):
    """For any number of layers the same templates are differentiated, laid out and lowered."""
    work = []
    for layers in (3, 8):
        counts.reset()
        planned(recompute, {"dp": 2}, layers=layers)
        work.append((counts.traced, counts.differentiated, counts.sharded, counts.lowered))
    assert work[0] == work[1]
    assert work[0][1] == 1


@pytest.mark.parametrize(("family", "axes"), [("llama", {}), ("gpt2", {"dp": 2, "tp": 2})], ids=str)
def test_activation_memory(family, axes):
    """Of twelve layers `full` keeps at most a quarter; other memory grows by one layer at most."""
    usage = {
        mode: planned(mode, axes, family, 12).estimate_memory_usage()[0]
        for mode in ("none", "selective", "full")
    }
    none, selective, full = (usage[mode]["activations"] for mode in usage)
    assert full <= 0.25 * none and full < 0.8 * selective < 0.8 * none
    assert usage["full"]["temporaries"] - usage["none"]["temporaries"] <= none / 12
    assert usage["full"]["total"] < usage["selective"]["total"] < usage["none"]["total"]


def test_plan_explains_what_layers_save():
    """By runs of equal layers, with the template that reads it."""
    text = planned(["layers.2", "layers.3"], layers=6).explain().splitlines()
    first = text.index("  layers save for the backward pass, per microbatch:") + 1
    assert text[first + 1] == "    layers.2 to layers.3, each: 0.00 MiB, for decoder_layer.backward.full"
    size = float(text[first].partition("each: ")[2].split()[0])
    assert size > 0.1 and text[first].startswith("    layers.0 to layers.1, each: ")
    assert text[first + 2].startswith("    layers.4 to layers.5, each: ")


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_recomputed_tensors_have_their_first_layouts(axes):
    """Every recomputed tensor has the layout of the first time, and the same records: sums are complete."""
    plan = planned("full", axes)
    graph, layout = plan.graph, plan.layout
    calls = {op.label: op for op in graph.ops if op.op == "call"}
    forward, backward = calls["layers.1"], calls["layers.1.backward"]
    inside = [graph.templates[op.attrs["template"]].graph for op in (forward, backward)]
    layouts = [layout.calls[op.id] for op in (forward, backward)]
    made = {op.label: op for op in inside[0].ops}
    num_records = 0
    for op in inside[1].ops:
        if op.label.startswith("recomputed ") and op.op != "rope":  # there are two of those
            before = made[op.label.removeprefix("recomputed ")]
            for old, new in zip(before.outputs, op.outputs):
                assert layouts[0].compute[old] == layouts[1].compute[new]
            mine = [
                [k[1] for k in lay.pending_reductions if k[0] == o.id]
                for lay, o in zip(layouts, (before, op))
            ]
            assert mine[0] == mine[1]
            num_records += len(mine[0])
    assert num_records == 1  # of the projection after attention


def with_gradients(graph, result):
    """The whole of a graph by hand, with `full`."""
    graph.loss(result if result.shape == (1,) else graph.mean(result))
    frozen = simplify(graph.freeze())
    return recomputed(differentiate(frozen, graph.draft.loss_id), Recomputation.of("full")).graph


@layer
def hinted(graph, x, *, axis):
    """Its inner result has a hinted layout."""
    h = rms_norm(graph, x, "norm.weight", eps=1e-6)
    h = graph.constrain(h, (axis,))
    return graph.add(x, linear(graph, graph.silu(linear(graph, h, "up", 8)), "down", 8))


def test_hints_hold_for_recomputed_tensors():
    """A hint inside a layer applies to the recomputed tensor as well."""
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x", labels=[BATCH, None])
    made = with_gradients(graph, hinted(graph, x, path="a", axis="dp"))
    backward = next(t.graph for k, t in made.templates.items() if ".backward" in k)
    (tensor,) = backward.hints
    assert backward.ops[backward.tensors[tensor].producer].label == "recomputed rms_norm:norm.weight"


@layer
def scored(graph, x):
    """A layer with a sum over the batch inside, which must not be added up twice."""
    h = rms_norm(graph, x, "norm.weight", eps=1e-6)
    return graph.silu(graph.sum(linear(graph, h, "head", 5)))


def test_sums_over_the_batch_run_once():
    """Their results are saved, though gradients use them."""
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x", labels=[BATCH, None])
    made = with_gradients(graph, scored(graph, linear(graph, x, "first", 8), path="end"))
    assert saved(made, "end") == ["sum"] and again(made) == ["rms_norm:norm.weight", "linear:head"]


@cache
def op_names():
    """Labels and names of a layer's ops, and patterns of them."""
    labels = [op.label for t in simplify(define(layers=1).freeze()).templates.values() for op in t.graph.ops]
    return [*sorted({*labels, *(label.partition(":")[0] for label in labels)}), "linear:mlp.*", "*norm*", "*"]


LAYERS = [f"layers.{i}" for i in range(4)]
layer_patterns = st.sampled_from([*LAYERS, "layers.*", "layers.[12]", "*.3", "*"])
op_patterns = st.deferred(lambda: st.sampled_from(op_names()))


@settings(max_examples=40, deadline=None)
@given(st.lists(layer_patterns, max_size=2), st.lists(st.tuples(layer_patterns, op_patterns), max_size=4))
def test_any_names_choose_their_ops(layers_chosen, inside):
    """Exactly the named ops that gradients need are recomputed; layers with equal ones share a template."""
    graph = trained([*layers_chosen, *(f"{a}/{b}" for a, b in inside)], layers=4)
    validate_graph(graph)
    calls = {op.label: op for op in graph.ops if op.op == "call"}
    forward = next(t for k, t in graph.templates.items() if k.endswith("decoder_layer"))
    used = set(differentiate_template(forward).imports)
    keys = {}
    for name in LAYERS:
        names = [b for a, b in inside if fnmatchcase(name, a)]
        if any(fnmatchcase(name, a) for a in layers_chosen):
            names = ["*"]
        expected = needed_by_names(forward, used, names)
        key = calls[f"{name}.backward"].attrs["template"]
        backward = graph.templates[key].graph
        mine = [op for op in backward.ops if op.label.startswith("recomputed ")]
        assert sorted(op.label for op in mine) == sorted(
            f"recomputed {forward.graph.ops[i].label}" for i in expected
        )
        producers = {forward.graph.tensors[t].producer for t in calls[name].attrs["saved"]}
        assert not producers & expected
        keys.setdefault(frozenset(expected), set()).add(key)
    assert all(len(same) == 1 for same in keys.values())
    assert len({*map(min, keys.values())}) == len(keys)


def needed_by_names(forward, used, patterns):
    """The definition, by brute force: a named op runs again if a gradient or such an op uses its result."""
    outside = {*forward.arguments, *forward.results}
    named = {
        op.id
        for op in forward.graph.ops
        if any(fnmatchcase(op.label, p) or fnmatchcase(op.op, p) for p in patterns)
    }
    ops: set[int] = set()
    while True:
        needed = used | {i for op in ops for i in forward.graph.ops[op].given}
        more = {i for i in named if needed & ({*forward.graph.ops[i].outputs} - outside)}
        if more == ops:
            return ops
        ops = more


def test_wrong_definition_is_detected():
    """The twin: another definition gives other ops."""
    forward = next(iter(simplify(define(layers=1).freeze()).templates.values()))
    used = set(differentiate_template(forward).imports)
    every = needed_by_names(forward, used, ["*"])
    assert every < {op.id for op in forward.graph.ops}
    assert needed_by_names(forward, used, ["silu*"]) < every


def test_wrong_backward_template_is_detected(monkeypatch):
    """A recomputing template is validated as others are."""
    making = recomputation._recomputing

    def broken(forward, *how):
        made = making(forward, *how)
        graph = made.template.graph
        ops = tuple(replace(op, inputs=op.inputs[::-1]) if op.op == "linear_dw" else op for op in graph.ops)
        return replace(made, template=replace(made.template, graph=replace(graph, ops=ops)))

    monkeypatch.setattr(recomputation, "_recomputing", broken)
    with pytest.raises(TilewiseError):
        trained("full")
