"""Pipelines without a clock: the frozen lists take the time, the memory and the bytes that theory says."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from pure.plans import plan_graph, with_update
from tilewise.core.errors import InternalError, LayoutError
from tilewise.graph import GraphBuilder
from tilewise.models import build_training_graph
from tilewise.models.llama import LlamaConfig
from tilewise.plan.passes import bytes_in_flight, idle_shares, walk_passes
from tilewise.plan.prove import prove_plan
from tilewise.plan.shapes import round_up
from tilewise.strategy import PipelineStages

SEQ, HIDDEN = 8, 32
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
SMALL = [(2, 4), (4, 8)]
LARGE = [(3, 9), (5, 20), (8, 64)]


def planned(
    stages,
    microbatches,
    schedule="1f1b",
    *,
    chunks=None,
    tied=False,
    axes=None,
    recompute="none",
    vocabulary=64,
    divided=None,
):
    """A plan of a Llama with one layer per virtual stage, or `divided` layers that the planner divides, of
    a batch of one sequence per microbatch and device.
    """
    chunks = CHUNKS.get(schedule, 1) if chunks is None else chunks
    virtual = stages * chunks
    model = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=divided or virtual,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    builder = GraphBuilder("llama")
    axes = {"pp": stages, **(axes or {})}
    batch = microbatches * axes.get("fsdp", 1)
    build_training_graph(builder, model, batch, SEQ, "f32")
    of = PipelineStages(schedule=schedule, chunks=chunks, layers=None if divided else (1,) * virtual)
    graph = with_update(builder, recompute=recompute, splits_backward=of.splits_backward)
    return plan_graph(graph, axes, microbatches, batch_splits=batch, stages=of)


def unit(planned_call, *, is_split):
    """The time of a call: 1 for a layer's forward pass, and 2 for its backward pass or 1 for each of its parts."""
    op = planned_call.segment.ops[0]
    if op.op != "call" or not op.label.startswith("layers."):
        return 0
    return 1 if op.phase == "forward" or is_split else 2


def shares(plan, *, is_split):
    return idle_shares(walk_passes(plan, lambda call: unit(call, is_split=is_split)))


@pytest.mark.parametrize(
    "stages,microbatches", [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)]
)
@pytest.mark.parametrize("schedule", CHUNKS)
def test_idle_time_is_that_of_theory(schedule, stages, microbatches):
    """The share of a step in which a stage is idle, as a fraction; the same for all stages."""
    if schedule == "interleaved":
        microbatches = microbatches // stages * stages
    is_split = schedule == "zero_bubble"
    plan = planned(stages, microbatches, schedule)
    parts = 3 if is_split else CHUNKS[schedule]
    expected = Fraction(stages - 1, parts * microbatches + stages - 1)
    assert shares(plan, is_split=is_split) == (expected,) * stages


def test_another_cost_has_another_idle_time():
    """The twin: if some microbatches take longer, the share differs."""
    plan = planned(2, 4)
    uneven = walk_passes(plan, lambda call: 3 * unit(call, is_split=False) if call.microbatch else 1)
    assert idle_shares(uneven) != shares(plan, is_split=False)


@pytest.mark.parametrize("stages,microbatches", [(2, 4), (4, 8), (4, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_memory_in_flight_is_that_of_theory(schedule, stages, microbatches):
    """What a layer saves, times the microbatches in flight: p - s with 1F1B, all with GPipe. With zero bubble, what
    gradients of weights need stays for up to p microbatches, all else for p - s.
    """
    plan = planned(stages, microbatches, schedule)
    graph = plan.graph
    layer = next(op for op in graph.ops if op.label == "layers.0" and op.phase == "forward")
    read_later = {t for op in graph.ops if op.phase == "backward" for t in op.given}
    # of the last layer the head saves, too; a layer's own are its results and what it was given
    of_layer = [
        t for t in (*layer.given, *layer.outputs) if t in read_later and graph.tensors[t].kind == "result"
    ]
    saved = sum(round_up(plan.shapes.bytes_max(graph.spec(t), plan.layout.compute[t]), 64) for t in of_layer)
    for stage, in_flight in enumerate(bytes_in_flight(plan)[:-1]):
        ahead = min(microbatches if schedule == "gpipe" else stages - stage, microbatches)
        assert in_flight == ahead * saved or schedule == "zero_bubble"
        assert ahead * saved <= in_flight <= min(stages, microbatches) * saved or schedule == "gpipe"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_moved_elements_are_those_of_theory(schedule, tied):
    """Per microbatch and boundary an activation and its gradient; of a tied weight, itself and its gradient once."""
    stages, microbatches = 2, 4
    plan = planned(stages, microbatches, schedule, tied=tied)
    activation, boundaries = SEQ * HIDDEN, stages * CHUNKS[schedule] - 1
    moved = {label: sum(of) for label, of in plan.traffic("step").items() if label.startswith("move:")}
    weight = {label: count for label, count in moved.items() if "embed_tokens" in label}
    loss = {label: count for label, count in moved.items() if label == "move:cross_entropy"}
    assert sorted(weight.values()) == ([64 * HIDDEN] * 2 if tied else [])
    assert loss == {"move:cross_entropy": stages - 1}
    rest = sum(moved.values()) - sum(weight.values()) - sum(loss.values())
    assert rest == 2 * microbatches * boundaries * activation


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_outside_layers_wait_too(tied):
    """With zero bubble, the gradients of the head and of the embedding are in the second part, even if one
    moves to another stage.
    """
    plan = planned(2, 4, "zero_bubble", tied=tied)
    sums = [op for op in plan.graph.ops if op.op in ("linear_dw", "embedding_dw")]
    late = {op.op: plan.layout.stages.is_weight_part(op.id) for op in sums}
    assert late == {"linear_dw": True, "embedding_dw": True}
    moves = [op for op in plan.graph.ops if op.op == "move" and op.phase == "backward"]
    assert [plan.layout.stages.is_weight_part(op.id) for op in moves] == [False, True][: 1 + tied]


def test_weights_are_not_in_flight():
    """A stage's own copy of a tied head is not counted, which a step has once."""
    assert bytes_in_flight(planned(2, 4, tied=True)) == bytes_in_flight(planned(2, 4))


@pytest.mark.parametrize(
    "axes", [pytest.param({"fsdp": 2}, marks=pytest.mark.slow), {"tp": 2}], ids=["fsdp", "tp"]
)
def test_layers_are_divided_once(axes):
    """Near every vocabulary with which the last stage loses a layer, later passes do not divide differently."""
    divisions = set()
    for vocabulary in range(128, 2048, 256):
        plan = planned(2, 2, axes=axes, vocabulary=vocabulary, divided=6)
        layers = [op for op in plan.graph.ops if op.op == "call" and op.phase == "forward"]
        places = [plan.layout.stages.ops[op.id] for op in layers if op.label.startswith("layers.")]
        assert len(places) == 6 and places == sorted(places)
        divisions.add(places.count(0))
    assert len(divisions) > 1


def test_each_stage_has_its_own_layers():
    """Weights, states and gradients of all stages are those of one device, each once."""
    whole, plan = planned(2, 4, axes={"pp": 1}), planned(2, 4)

    def names(of, graph):
        own_tensors = [b.key[1] for b in of.buffers if b.category in ("parameters", "optimizer")]
        return sorted(graph.spec(t).name for t in own_tensors)

    one, stages = names(whole.placement(0), whole.graph), plan.placements
    of_stages = [names(of, plan.graph) for of in stages]
    assert sorted(n for of in of_stages for n in of) == one and all(len(of) < len(one) for of in of_stages)
    bytes_of = [sum(b.bytes for b in of.buffers if b.category == "gradients") for of in stages]
    assert sum(bytes_of) == sum(b.bytes for b in whole.placement(0).buffers if b.category == "gradients")
    assert plan.arena_bytes[0] != plan.arena_bytes[1]


def test_layers_are_divided_by_cost():
    """A head that costs as much as several layers takes their place; users may say otherwise."""
    model = LlamaConfig(
        vocab_size=4096,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    builder = GraphBuilder("llama")
    build_training_graph(builder, model, 4, SEQ, "f32")
    graph = with_update(builder)

    def numbers(**options):
        plan = plan_graph(graph, {"pp": 2}, 4, stages=PipelineStages(**options))
        stage_of = {op.label: plan.layout.stages.ops[op.id] for op in plan.graph.ops if op.phase == "forward"}
        stages = [stage_of[f"layers.{n}"] for n in range(8)]
        assert stages == sorted(stages)
        return [stages.count(0), stages.count(1)]

    assert numbers() == [8, 0]
    assert numbers(layers=(3, 5)) == [3, 5]
    assert numbers(layers="Et*3|(t)*4,tL") == [3, 5]
    assert numbers(first_stage_less_layers=2) == [3, 5]
    assert numbers(last_stage_less_layers=2) == [5, 3]
    for wrong, message in (
        ({"layers": (3, 4)}, "divided among 2 virtual stages, 8 in total; got 3, 4: 7 layers"),
        ({"layers": (8,)}, "got 8: 8 layers in 1 stages"),
        ({"layers": "Ett|tL"}, "got 2, 1: 3 layers in 2 stages"),
    ):
        with pytest.raises(LayoutError, match=message):
            numbers(**wrong)


def test_a_plan_with_a_dropped_send_is_rejected():
    """A list without one of its moves fails the checks of the planner; the whole passes them."""
    plan = planned(2, 4)
    prove_plan(plan)
    program = plan.program
    receiver = program.classes[1]
    moves = {n for n, t in enumerate(receiver.templates) if any(c.kind == "move" for c in t.collectives)}
    calls = receiver.calls["step"]
    dropped = next(n for n, call in enumerate(calls) if call.template in moves)
    lists = {**receiver.calls, "step": (*calls[:dropped], *calls[dropped + 1 :])}
    changed = replace(program, classes=(program.classes[0], replace(receiver, calls=lists)))
    with pytest.raises(InternalError, match="a value must be written before it is read"):
        prove_plan(replace(plan, program=changed))
