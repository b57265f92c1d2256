"""Saving a training state and a model from devices: each writes its own parts, and none gathers another's."""

from __future__ import annotations

import tracemalloc
from functools import cache
from math import prod

import numpy as np
import pytest
from small_llama import batches, config, training_graph

from tilewise.checkpoint import (
    Box,
    PartedTensor,
    TrainingState,
    open_checkpoint,
    save_checkpoint,
    write_weights,
)
from tilewise.checkpoint.boxes import misfit
from tilewise.ir.graph import PANEL_ROWS
from tilewise.strategy import DistributionStrategy

STRATEGIES = {
    "one device": DistributionStrategy.single(),
    "ddp": DistributionStrategy.ddp(4),
    "tp": DistributionStrategy.tensor_parallel(8),
    "zero 1": DistributionStrategy.shard_optimizer_states(4),
    "zero 2": DistributionStrategy.shard_gradients(4),
    "fsdp": DistributionStrategy.fsdp(4),
    "fsdp in groups": DistributionStrategy.fsdp(4, 2),
    "all": DistributionStrategy.hybrid(dp=2, fsdp=2, tp=2),
}
MODEL = config(vocab_size=509, intermediate_size=90, tie_word_embeddings=False)  # shares of odd sizes


@cache
def plan_of(strategy, dtype, model=MODEL):
    graph = training_graph(model, dtype)
    graph.set_distribution(STRATEGIES[strategy])
    return graph, graph.plan(workers_per_device=1, checkpoints=True)


def wrong_parts(plan, shards):
    """What is wrong with the writers: names of tensors that are not written once by devices that hold them."""
    wrong = []
    for tensor, parts in shards.items():
        spec, layout = plan.graph.spec(tensor), plan.layout.compute[tensor]
        boxes = [Box(part.begin, part.sizes) for part in parts]
        held_ranges = [
            [plan.shapes.on(part.device).range(spec, layout, dim) for dim in range(len(spec.shape))]
            for part in parts
        ]
        is_held = all([*zip(box.begin, box.end)] == ranges for box, ranges in zip(boxes, held_ranges))
        is_counted = all(part.num_bytes == prod(part.sizes) * 4 for part in parts)  # all kept is fp32
        if misfit(spec.shape, boxes) is not None or not is_held or not is_counted:
            wrong.append(spec.name)
    return wrong


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_part_is_written_once_by_a_device_that_holds_it(strategy, dtype):
    """Masters or fp32 weights, and both moments; devices write about equally much."""
    _, plan = plan_of(strategy, dtype)
    names = {plan.graph.spec(tensor).name for tensor in plan.stored_parts}
    parameters = [t.spec.name for t in plan.graph.of_kind("parameter")]
    first = "" if dtype == "f32" else "optimizer.master."
    kinds = (first, "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    assert names == {kind + name for name in parameters for kind in kinds}
    assert wrong_parts(plan, plan.stored_parts) == []
    each = plan.checkpoint_bytes
    elements = sum(prod(t.shape) for t in plan.graph.of_kind("parameter"))
    assert sum(each) == 3 * 4 * elements
    shared = [part.num_bytes for parts in plan.stored_parts.values() for part in parts]
    cut = [plan.graph.spec(t) for t in plan.stored_parts if plan.layout.compute[t][0][-1:] == ("fsdp",)]
    panels = sum(PANEL_ROWS * spec.shape[1] * 4 for spec in cut)
    assert max(each) - min(each) <= max(shared) + panels
    assert cut or max(each) < 1.15 * sum(each) / len(each)


def test_wrong_writers_are_detected():
    """The twin: one part by a device that does not hold it, one part twice, one omitted."""
    _, plan = plan_of("fsdp", "f32")
    tensor = next(t for t, parts in plan.stored_parts.items() if len(parts) == 4)
    one, other, *rest = plan.stored_parts[tensor]
    name = plan.graph.spec(tensor).name
    for parts in (
        (type(one)(other.device, one.begin, one.sizes, one.num_bytes), other, *rest),
        (one, one, other, *rest),
        (other, *rest),
        (type(one)(one.device, one.begin, one.sizes, 2 * one.num_bytes), other, *rest),
    ):
        assert wrong_parts(plan, {**plan.stored_parts, tensor: parts}) == [name]


def arenas(model):
    plan = model.plan
    return [
        np.array(model._executor.buffer(device, 0, plan.arena_bytes[0]))
        for device in range(plan.mesh.num_devices)
    ]


@pytest.mark.parametrize("strategy", ["one device", "zero 1", "all"])
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f32", marks=pytest.mark.slow)])
def test_copies_are_of_stored_parts(strategy, dtype):
    """Each device's bytes are those of the plan, and outside the devices' memory."""
    graph, plan = plan_of(strategy, dtype)
    with graph.instantiate(plan) as model:
        model.initialize(3)
        state, parts, before = model.state_dict(), model.copy_state(), arenas(model)
        assert list(parts) == list(state)
        each = [0] * plan.mesh.num_devices
        for name, tensor in parts.items():
            assert np.asarray(tensor).tobytes() == state[name].tobytes(), name
            for part in tensor.parts if isinstance(tensor, PartedTensor) else ():
                assert part.values.tobytes() == state[name][part.box.slices].tobytes()
                each[part.device] += part.values.nbytes
                part.values[...] = 7.0
        assert tuple(each) == plan.checkpoint_bytes
        for now, then in zip(arenas(model), before, strict=True):
            np.testing.assert_array_equal(now, then)


def written(strategies, dtype, root):
    """The state of each strategy after two steps, opened; and the first one's states after two and three."""
    data, files, states = batches(MODEL, 3), {}, []
    for name in strategies:
        graph, plan = plan_of(name, dtype)
        with graph.instantiate(plan) as model:
            model.initialize(3)
            for batch in data[:2]:
                model.step(batch, 1e-3)
            state = TrainingState(2, model.copy_state(), mesh=dict(zip(plan.mesh.names, plan.mesh.sizes)))
            files[name] = open_checkpoint(save_checkpoint(root / name, state, {})).tensors
            if name == strategies[0]:
                states.append(model.state_dict())
                model.step(data[2], 1e-3)
                states.append(model.state_dict())
    return files, states


def require_same(model, expected, *named):
    state_of = model.state_dict()
    for name, tensor in expected.items():
        is_same = state_of[name].tobytes() == tensor.tobytes()
        assert is_same, (name, *named)


SOME = ["zero 1", "all"]


@pytest.mark.parametrize(
    ("strategies", "dtype"),
    [
        (SOME, "bf16"),
        *(pytest.param([*STRATEGIES], dtype, marks=pytest.mark.slow) for dtype in ("bf16", "f32")),
    ],
    ids=["some", "all, bf16", "all, f32"],
)
def test_every_strategy_resumes_from_every_other(tmp_path, strategies, dtype):
    """Parameters and states after loading, and after one more step, equal those of the first one, to the bit."""
    files, (stopped, went_on) = written(strategies, dtype, tmp_path)
    batch = batches(MODEL, 3)[2]
    for after in strategies:
        graph, plan = plan_of(after, dtype)
        with graph.instantiate(plan) as model:
            for before, tensors in files.items():
                model.load_state_dict(tensors)
                require_same(model, stopped, before, after)
                model.step(batch, 1e-3)
                require_same(model, went_on, before, after)
            with pytest.raises(AssertionError):  # the twin: a state of another step
                require_same(model, stopped)


def peak_bytes(work):
    """The peak memory of Python and NumPy for a piece of work, and its result."""
    tracemalloc.start()
    try:
        result = work()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_saving_gathers_on_no_device(tmp_path):
    """Of a model in storage shards over eight devices one tensor at a time is assembled, outside
    the devices: saving takes no more memory than that, and no byte of any arena changes. The twin
    holds all tensors and takes more.
    """
    graph, plan = plan_of(
        "all", "f32", config(num_hidden_layers=5, hidden_size=192, tie_word_embeddings=False)
    )
    with graph.instantiate(plan) as model:
        model.initialize(3)
        before, sizes = arenas(model), [tensor.nbytes for tensor in model.parameters().values()]
        room = 2.5 * max(sizes)  # the tensor, a device's part that is unpacked, and Python's own
        assert sum(sizes) > 2 * room
        taken, _ = peak_bytes(lambda: write_weights(tmp_path, model.parameters().items()))
        assert taken < room
        gathered, _ = peak_bytes(
            lambda: write_weights(tmp_path, [(n, np.array(t)) for n, t in model.parameters().items()])
        )
        assert gathered > 2 * room
        state, parts = peak_bytes(model.copy_state)
        copies = sum(plan.checkpoint_bytes)
        room += 3000 * sum(
            map(len, plan.stored_parts.values())
        )  # Python's own, of each part: also in the manifest
        assert copies < state < copies + room < 1.5 * copies
        saved, _ = peak_bytes(lambda: save_checkpoint(tmp_path, TrainingState(0, parts, mesh={"dp": 8}), {}))
        assert saved < room
        for now, then in zip(arenas(model), before, strict=True):
            np.testing.assert_array_equal(now, then)
    assert open_checkpoint(tmp_path / "step-00000000").step == 0
