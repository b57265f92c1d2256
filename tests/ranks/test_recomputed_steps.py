"""Steps that recompute: equal to saving to the bit, with the transfers and bytes of the plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_families import FAMILIES, small
from small_families import batches as batches_of
from small_llama import BATCH, SEQ, batches, change_first, config, drop_partial, merge_splits, training_graph

import tilewise as tw
from pure.pairwise import Case, pairwise_cases
from tilewise import models
from tilewise.core.mesh import DeviceMesh
from tilewise.nn import linear, rms_norm
from tilewise.session import verify_strategy

NAMES = ["layers.0", "layers.*/*norm*", "layers.*/*gate*"]
CHOICES = {
    "recompute": ["full", "selective", "names"],
    "family": ["llama", "gpt2", "gemma2", "qwen3", "bert"],
    "axes": ["dp=1", "dp=2", "tp=2", "dp=2,tp=2", "fsdp=2", "dp=2,fsdp=2"],
    "accumulation": [1, 2, 3],
    "dtype": ["f32", "bf16"],
}


PAIRWISE = pairwise_cases(CHOICES, lambda case: True)
EVERYDAY = PAIRWISE[:6]


def patterns_of(family: str, recompute: object) -> object:
    if recompute != "names":
        return recompute
    if family == "bert":
        return ["layers.1", "layers.*/*norm*"]
    return NAMES if family != "gpt2" else [*NAMES[:2], "layers.*/gelu*"]


def assert_equal(case: Case, steps: int) -> None:
    """The steps equal those of one device that saves all."""
    recompute, family, axes, accumulation, dtype = case
    model = small(family)  # type: ignore[arg-type]
    rows = 12 if accumulation == 3 else 8
    graph = tw.ComputeGraph(str(family))
    models.build_training_graph(graph, model, rows, 16, dtype)  # type: ignore[arg-type]
    graph.optimize(tw.optim.AdamW())
    report = verify_strategy(
        graph,
        DeviceMesh.parse(axes),  # type: ignore[arg-type]
        batches_of(model, steps, rows, 16),
        accumulation=accumulation,  # type: ignore[arg-type]
        batch_splits=rows,
        recompute=patterns_of(family, recompute),  # type: ignore[arg-type]
    )
    assert report.equal, report.text


@pytest.mark.parametrize("case", EVERYDAY, ids=str)
def test_recomputing_equals_saving(case):
    """Families, strategies, microbatches and types, in pairs."""
    assert_equal(case, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", PAIRWISE[6:], ids=str)
def test_recomputing_equals_saving_in_all_pairs(case):
    """The rest of them, for more steps."""
    assert_equal(case, 4)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in CHOICES["family"]])
def test_other_families(family, recompute):
    """Windows, scaled positions, fused projections."""
    assert_equal((recompute, family, "dp=2,tp=2", 2, "bf16"), 3)


@pytest.mark.parametrize(
    ("axes", "label", "fault"),
    [
        ({"tp": 2}, "recomputed linear:self_attn.o_proj.weight/reduce_scatter", drop_partial),
        ({}, "recomputed linear:self_attn.o_proj.weight", merge_splits),
    ],
    ids=["tp", "one"],
)
def test_planted_faults_are_detected(axes, label, fault):
    """A partial value that is dropped, or sums of another order, only when a layer runs again: gradients differ."""
    model = config()
    report = verify_strategy(
        training_graph(model, "f32"),
        DeviceMesh(axes),
        batches(model, 2),
        recompute="full",
        change=change_first(label, fault),
    )
    assert "NOT equal, first at step 1" in report.text and "norm[0]" not in report.text  # [0] is the loss


def test_padded_lengths():
    """Sequences of a symbolic length, at several lengths of one plan."""
    model = config()
    graph = training_graph(model, "bf16", 8, tw.Dim("seq", 1, 40))
    data = [batches(model, 1, 8, length)[0] for length in (40, 7, 23)]
    report = verify_strategy(graph, {"dp": 2}, data, accumulation=2, recompute="full")
    assert report.equal, report.text


@tw.layer
def scored(graph, x):
    """A layer with a sum over the batch inside, whose gradient uses the sum."""
    h = rms_norm(graph, x, "norm.weight", eps=1e-6)
    return graph.silu(graph.sum(linear(graph, h, "head", 5)))


def test_sum_inside_a_layer_is_added_up_once():
    """Its total is saved, not added up again; the gradient equals that of saving."""
    graph = tw.ComputeGraph("g")
    x = graph.input([4, 8], name="x", labels=[tw.BATCH, None])
    graph.loss(scored(graph, linear(graph, x, "first", 8), path="end"))
    graph.optimize(tw.optim.SGD())
    data = [{"x": np.random.default_rng(3).standard_normal((4, 8)).astype(np.float32)}] * 2
    report = verify_strategy(graph, {"dp": 2}, data, recompute="full")
    assert report.equal, report.text


def planned(axes, recompute):
    graph = training_graph(config(num_hidden_layers=4), "bf16")
    return graph, graph.plan(axes, recompute=recompute)


@pytest.mark.parametrize("recompute", ["full", NAMES], ids=str)
def test_transfers_and_bytes_equal_the_plan(recompute):
    """Counted at execution: transfers to the element, allocated bytes to the byte."""
    graph, plan = planned({"dp": 2, "tp": 2}, recompute)
    with graph.instantiate(plan) as running:
        running.initialize(0)
        running.reset_transfers()
        running.step(batches(config(), 1)[0], 1e-3)
        assert {k: v for k, v in running.transfers().items() if any(v)} == plan.traffic("step")
        assert running.memory_usage() == plan.estimate_memory_usage()


def test_transfers_of_recomputed_ops():
    """Over `tp`, `full` has one all-reduce more in every layer, the one after attention; `selective` has none."""
    saved, again, selective = (
        {label: sum(elements) for label, elements in planned({"tp": 2}, mode)[1].traffic("step").items()}
        for mode in ("none", "full", "selective")
    )
    more = {k: v for k, v in again.items() if k.startswith("recomputed ")}
    assert {k: v for k, v in again.items() if k not in more} == saved == selective
    assert [k.partition("/")[0] for k in more] == ["recomputed linear:self_attn.o_proj.weight"] * 2
    assert sum(more.values()) == 4 * 2 * BATCH * SEQ * config().hidden_size


def test_plan_that_recomputes_round_trips(tmp_path):
    """Saved and loaded; another choice is another digest, an equal one the same."""
    graph = training_graph(config(), "f32")
    plans = {mode: graph.plan({"dp": 2}, recompute=mode) for mode in ("none", "selective", "full")}
    assert len({plan.digest() for plan in plans.values()}) == 3
    assert graph.plan({"dp": 2}, recompute=["layers.*"]).digest() == plans["full"].digest()
    plans["full"].save(tmp_path / "step.plan")
    loaded = tw.Plan.load(tmp_path / "step.plan")
    assert loaded.digest() == plans["full"].digest()


LABELS = ["linear*", "attention", "rope", "silu_gate", "rms_norm", "linear:mlp.*", "*"]
names = st.lists(
    st.one_of(
        st.sampled_from(["layers.0", "layers.1", "layers.*"]),
        st.builds(
            "{}/{}".format, st.sampled_from(["layers.0", "layers.1", "layers.*"]), st.sampled_from(LABELS)
        ),
    ),
    max_size=3,
)


def gradients_after(recompute, axes):
    model = config(num_hidden_layers=2, hidden_size=32, intermediate_size=48, head_dim=4, vocab_size=128)
    graph = training_graph(model, "f32", 4, 12)
    with graph.instantiate(graph.plan(axes, recompute=recompute, workers_per_device=1)) as running:
        running.initialize(0, 0.1)
        values = []
        for batch in batches(model, 2, 4, 12):
            running.step(batch, 1e-3)
            values += [running.get_tensor(f"{n}.grad").tobytes() for n in running.parameter_names()]
        return values + [value.tobytes() for value in running.state_dict().values()]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(names, st.sampled_from([{}, {"tp": 2}]))
def test_any_names_equal_saving(recompute, axes):
    """Whatever ops of whatever layers run again."""
    assert gradients_after(recompute, axes) == gradients_after("none", {})
