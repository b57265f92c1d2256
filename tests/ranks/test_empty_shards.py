"""Weights with fewer panels than devices: devices without a panel store, update and send nothing of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil, prod

import numpy as np
import pytest
from small_llama import (
    batches,
    change_every,
    change_first,
    config,
    drop_partial,
    swap_partials,
    training_graph,
)
from test_sharded_state import CHOICES, SEQ, compare, is_small, named

import tilewise as tw
from pure.pairwise import Case, pairwise_cases
from tilewise.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from tilewise.core.errors import InternalError, LayoutError
from tilewise.core.mesh import DeviceMesh
from tilewise.models import llama
from tilewise.nn import rms_norm
from tilewise.plan.prove import prove_plan
from tilewise.session import verify_strategy
from tilewise.strategy import DistributionStrategy

PANEL = 32
FEW = {
    **CHOICES,
    "mesh": [
        (1, 3, 1),
        (1, 4, 1),
        (1, 5, 1),
        (1, 6, 1),
        (2, 3, 1),
        (2, 4, 1),
        (3, 3, 1),
        (1, 8, 1),
        (1, 12, 1),
        (1, 3, 2),
        (1, 4, 2),
        (2, 3, 2),
    ],
    "microbatches": [1, 2, 3],
}
NOT_SMALL = [  # what everyday tests must have: reduce, recompute, offload, type; several microbatches, dp and tp
    ((1, 5, 1), 1, "microbatch", True, 1, 1, "f32", False, "none", "none"),
    ((1, 3, 2), 3, "microbatch", True, 1, 1, "bf16", True, "full", "none"),
    ((2, 3, 1), 2, "step", False, 1, 1, "bf16", False, "selective", "optimizer"),
    ((1, 6, 1), 2, "microbatch", True, 0, 1, "f32", True, "full", "parameters"),
]


@pytest.fixture(autouse=True)
def small_transfers(monkeypatch):
    """Offload tensors as small as here to files too."""
    monkeypatch.setattr("tilewise.strategy.offload._LEAST_BYTES", 256)


def few_panels(tied: bool = False, **changes: object) -> llama.LlamaConfig:
    """Weights of one panel of 32 rows (projection back), two (keys, values), three (the MLP) and four."""
    sizes = {"hidden_size": 32, "intermediate_size": 96, "vocab_size": 128, "head_dim": 16}
    return config(**{**sizes, "tie_word_embeddings": tied, **changes})


def planned(strategy: DistributionStrategy, batch: int = 8, dtype: str = "f32", **options: object):
    graph = training_graph(few_panels(), dtype, batch, SEQ)
    graph.set_distribution(strategy)
    return graph, graph.plan(**{"batch_splits": batch, "workers_per_device": 1, **options})


@cache
def pairwise() -> list[Case]:
    return pairwise_cases(FEW, is_small)


@pytest.mark.parametrize("case", NOT_SMALL, ids=named)
def test_shards_without_a_panel_equal_one_device(case):
    """Training over more devices than panels equals one device to the bit."""
    equal, text = compare(case, model=few_panels)
    assert equal, text


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(), ids=named)
def test_all_pairs_equal_one_device(case):
    """Every pair of mesh, microbatches, reduction, units, workers, type, ties, recomputation and files."""
    equal, text = compare(case, model=few_panels)
    assert equal, text


@pytest.mark.soak
def test_whole_product_equals_one_device():
    """Every combination except of prefetching, workers and files, which alternate."""
    turns = {name: FEW[name] for name in ("prefetch", "workers", "offload")}
    others = [[None] if name in turns else values for name, values in FEW.items()]
    for number, combination in enumerate(product(*others)):
        chosen = dict(zip(FEW, combination)) | {name: of[number % len(of)] for name, of in turns.items()}
        case = tuple(chosen.values())
        if is_small(case):
            equal, text = compare(case, model=few_panels)
            assert equal, f"{named(case)}: {text}"


def test_states_and_gradients_alone_equal_one_device():
    """ZeRO 1 cuts the same storage shards."""
    strategy = DistributionStrategy.shard_optimizer_states(4)
    model = few_panels()
    report = verify_strategy(
        training_graph(model, "bf16", 8, SEQ),
        strategy.mesh(),
        batches(model, 2, 8, SEQ),
        strategy=strategy,
        batch_splits=8,
        accumulation=2,
    )
    assert report.equal, report.text


def test_padding_of_a_panel_belongs_to_its_device():
    """A panel that is not full belongs to one device, with its padding."""
    model = few_panels(intermediate_size=80, num_hidden_layers=1)
    report = verify_strategy(
        training_graph(model, "f32", 4, SEQ),
        DeviceMesh({"fsdp": 4}),
        batches(model, 2, 4, SEQ),
        batch_splits=4,
    )
    assert report.equal, report.text


# ---- what moves, and what is kept ------------------------------------------------------------------------


def panels_of(plan: tw.Plan, tensor: int) -> list[int]:
    """Of a weight and its states, on every device."""
    spec, layout = plan.graph.spec(tensor), plan.layout.compute[tensor]
    ranges = [plan.shapes.on(d).range(spec, layout, 0) for d in range(plan.mesh.num_devices)]
    return [-(-(end - begin) // PANEL) for begin, end in ranges]


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"dp": 2, "fsdp": 4}], ids=str)
def test_device_without_a_panel_has_no_task(axes):
    """For a weight without a storage shard on a device: no row, no task and no touched byte there."""
    strategy = DistributionStrategy.hybrid(**axes)
    graph, plan = planned(strategy, dtype="bf16")
    devices, degree = plan.mesh.num_devices, axes["fsdp"]
    cut = [t for t in plan.graph.tensors if t.kind != "result" and "fsdp" in plan.layout.compute[t.id][0]]
    tensors = [t for t in cut if t.spec.name.endswith("layers.0.self_attn.o_proj.weight")]
    assert len(tensors) == 4  # the weight, its master, two moments
    for tensor in tensors:
        rows = [plan.entry(device, tensor.id).extent.constant for device in range(devices)]
        assert rows == [PANEL * n for n in panels_of(plan, tensor.id)]
        assert [bool(n) for n in rows[:degree]] == [False] * (degree - 1) + [True]
    with graph.instantiate(plan) as run:
        run.initialize(seed=0)
        run.trace(True)
        run.reset_transfers()
        run.step(batches(few_panels(), 1, 8, SEQ)[0], 1e-3)
        tasks, moved = run.timeline().tasks, run.transfers()
        for tensor in tensors:
            size = PANEL * tensor.spec.shape[1] * tensor.spec.dtype.itemsize
            for device in range(devices):
                memory = np.asarray(run._executor.buffer(device, plan.entry(device, tensor.id).offset, size))
                assert memory.any() == (device % degree == degree - 1)
    assert moved == plan.traffic()
    has = [bool(n) for n in rows]
    for label in (
        "all_gather_parameters:self_attn.o_proj.weight/offer",
        "linear_dw:self_attn.o_proj.weight/reduce_scatter",
    ):
        assert {task.device for task in tasks if task.kernel == label} == {
            d for d in range(devices) if has[d]
        }
    for per_device in (of for label, of in moved.items() if "dw:self_attn.o_proj.weight/reduce" in label):
        assert [bool(elements) for elements in per_device] == has
    text = plan.explain()
    for device in range(devices):
        assert f"{sum(task.device == device for task in tasks):,} tasks, reads " in text


@pytest.mark.parametrize("degree", [2, 8])
def test_memory_is_that_of_the_largest_shard(degree):
    """bf16 with AdamW: 2 bytes an element of the weight and 12 of states, of the device that has most panels."""
    graph, plan = planned(DistributionStrategy.fsdp(degree), dtype="bf16")
    with graph.instantiate(plan) as run:
        assert run.memory_usage() == plan.estimate_memory_usage()
    weights = [t for t in plan.graph.of_kind("parameter") if t.spec.storage == "packed"]
    shards = [max(panels_of(plan, t.id)) for t in weights]
    assert shards == [ceil(ceil(t.shape[0] / PANEL) / degree) for t in weights]
    share = sum(n * PANEL * t.shape[1] for n, t in zip(shards, weights))
    vectors = [prod(t.shape) for t in plan.graph.of_kind("parameter") if t.spec.storage == "vector"]
    usage = plan.estimate_memory_usage()[0]
    assert usage["parameters"] == 2 * (share + sum(vectors))
    assert usage["optimizer"] == 12 * (share + sum(vectors))
    assert (
        4 * (share + sum(vectors))
        <= usage["gradients"]
        < 4 * (share + sum(vectors)) + 64 * (len(vectors) + 2)
    )


def test_explanations_name_empty_shards():
    """How many weights have fewer panels than storage shards, and for one weight what the first device has."""
    _, plan = planned(DistributionStrategy.fsdp(4))
    words = plan.explain()
    assert (
        "16 weights, their gradients and optimizer states lie in 4 parts each, along fsdp; 5 vectors are not"
        in words
    )
    assert "12 of the weights have fewer than 4 panels of 32 rows: some devices have no part" in words
    assert "Device 0 holds nothing of it" in plan.why("layers.0.mlp.down_proj.weight")
    assert "Device 0 holds 32 rows" in plan.why("layers.0.self_attn.q_proj.weight")
    assert "fewer than" not in planned(DistributionStrategy.ddp(4))[1].explain()
    uneven = training_graph(few_panels(vocab_size=199), "f32", 8, SEQ).plan(
        {"fsdp": 4, "tp": 2}, batch_splits=8
    )
    assert 0 in panels_of(uneven, next(t.id for t in uneven.graph.tensors if "embed" in t.spec.name))
    assert "16 of the weights have fewer than 4 panels" in uneven.explain()


# ---- files -----------------------------------------------------------------------------------------------


def test_plan_with_empty_shards_round_trips(tmp_path):
    """Saved, loaded and remade it is the same, and runs to the same bits; its picture is drawn."""
    _, plan = planned(DistributionStrategy.fsdp(4), accumulation=2)
    plan.save(tmp_path / "step.plan")
    loaded = tw.Plan.load(tmp_path / "step.plan")
    assert loaded.digest() == plan.digest() and loaded.explain() == plan.explain()
    results = []
    for either in (plan, loaded):
        with tw.GraphInstance(either) as run:
            run.initialize(seed=0)
            run.trace(True)
            results.append([run.step(b, 1e-3).grad_norm for b in batches(few_panels(), 2, 8, SEQ)])
            either.save_picture(tmp_path / "step.html", run.timeline())
    assert results[0] == results[1]


@pytest.mark.slow
def test_checkpoint_continues_over_other_shards(tmp_path):
    """From one device over several meshes and back: equal to an uninterrupted run to the bit."""
    strategies = [
        DistributionStrategy.single(),
        DistributionStrategy.fsdp(8),
        DistributionStrategy.hybrid(dp=2, fsdp=4),
        DistributionStrategy.hybrid(fsdp=4, tp=2),
        DistributionStrategy.single(),
    ]
    steps, state, norms = batches(few_panels(), len(strategies), 8, SEQ), None, []
    for number, strategy in enumerate(strategies):
        graph, plan = planned(
            strategy, dtype="bf16", offload="optimizer" if number % 2 else "none", checkpoints=True
        )
        with graph.instantiate(plan) as run:
            if state is None:
                run.initialize(seed=0)
            else:
                run.load_state_dict(state.tensors)
            norms.append(run.step(steps[number], 1e-3).grad_norm)
            parts, mesh = run.copy_state(), dict(zip(plan.mesh.names, plan.mesh.sizes))
        for tensor, shards in plan.stored_parts.items():
            assert all(prod(shard.sizes) for shard in shards), plan.graph.spec(tensor).name
        state = load_checkpoint(
            save_checkpoint(tmp_path, TrainingState(number + 1, parts, mesh=mesh), {}), {}
        )
    graph, plan = planned(DistributionStrategy.single(), dtype="bf16")
    with graph.instantiate(plan) as run:
        run.initialize(seed=0)
        assert [run.step(b, 1e-3).grad_norm for b in steps] == norms
        for name, value in run.state_dict().items():
            assert np.array_equal(np.asarray(state.tensors[name]), value), name


# ---- faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("microbatches", "faults"),
    [(1, [("o_proj", drop_partial), ("o_proj", swap_partials)]), (2, [("k_proj", drop_partial)])],
    ids=["whole batch", "microbatches"],
)
def test_fault_on_the_only_holder_is_detected(microbatches, faults):
    """With parts of the wrong devices on the only storage shard the comparison fails."""
    case = ((1, 3, 1), microbatches, "microbatch", True, 1, 1, "f32", False, "none", "none")
    assert compare(case, model=few_panels)[0]
    for weight, fault in faults:
        change = change_first(f"linear_dw:self_attn.{weight}.weight/reduce_scatter", fault, device=-1)
        assert not compare(case, change, model=few_panels)[0], (weight, fault)


def of_the_first(instruction):
    """A copy from the first device, whose storage shard is empty."""
    operands = tuple(o._replace(member=0) if o.group >= 0 else o for o in instruction.operands)
    return replace(instruction, operands=operands)


def test_copy_of_another_shard_is_rejected():
    """A copy from a device that does not wait for the acknowledgement."""
    _, plan = planned(DistributionStrategy.fsdp(3), batch=6)
    fault = change_every("all_gather_parameters:self_attn.o_proj.weight/all_gather", of_the_first)
    with pytest.raises(InternalError, match="acknowledged"):
        prove_plan(fault(plan))


def test_exchanged_shards_are_detected():
    """Two devices of three have a panel of the keys; with them exchanged the comparison fails."""

    def exchange(instruction):
        operands = tuple(o._replace(member=3 - o.member) if o.member else o for o in instruction.operands)
        return replace(instruction, operands=operands)

    case = ((1, 3, 1), 1, "microbatch", True, 1, 1, "f32", False, "none", "none")
    label = "all_gather_parameters:self_attn.k_proj.weight/all_gather"
    assert not compare(case, change_every(label, exchange), model=few_panels)[0]


def test_graph_without_weights_is_rejected():
    """Vectors are not cut, so another tensor is needed."""
    graph = tw.ComputeGraph("vectors")
    x = graph.input([4, 64], "f32", name="x", labels=[tw.BATCH, None])
    graph.loss(graph.mean(rms_norm(graph, x, "norm", eps=1e-6)))
    graph.optimize(tw.optim.SGD())
    graph.set_distribution(DistributionStrategy.fsdp(2))
    with pytest.raises(
        LayoutError, match=r"vectors stay whole\); got no weight in 'vectors'; use a strategy without"
    ):
        graph.plan(batch_splits=4)
