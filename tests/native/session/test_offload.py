"""State, weights and activations in files: the same bits, the planned transfers, and less memory."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from ranks.small_llama import change_where, skip
from support.task_order import validate_order
from tilewise import models
from tilewise.checkpoint.shards import save_tensors
from tilewise.core.errors import CheckpointError, InternalError, NotFinite, PlanError, ResourceError
from tilewise.plan.picture import draw_plan
from tilewise.session import GraphInstance, passes
from tilewise.session.assemble import assemble_program
from tilewise.strategy import OFFLOADS, DistributionStrategy

SIZES = {"model_type": "gpt2", "vocab_size": 1024, "n_embd": 128, "n_layer": 6, "n_head": 4}
BATCH, SEQ, STEPS = 8, 32, 3


def graph_of(dtype="f32", batch=BATCH, **changes):
    """A small GPT-2 with AdamW, in which every weight is large enough for offloading."""
    graph = tw.ComputeGraph("gpt2")
    models.build_training_graph(graph, models.config_from_dict({**SIZES, **changes}), batch, SEQ, dtype)
    graph.optimize(tw.optim.AdamW())
    return graph


@cache
def planned(offload, dtype="f32", **options):
    return graph_of(dtype).plan({}, offload=offload, workers_per_device=1, **options)


def batch_of(number, batch=BATCH):
    ids = np.random.default_rng(number).integers(0, SIZES["vocab_size"], (batch, SEQ + 1)).astype(np.int32)
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


def trained(model, steps=STEPS, first=0):
    losses = []
    for number in range(first, first + steps):
        result = model.step(batch_of(number), 1e-3)
        losses.append((result.loss, result.grad_norm))
    return losses, {name: array.tobytes() for name, array in model.state_dict().items()}


def run(plan, tmp_path, steps=STEPS):
    """Like `trained` for a new model, with the bytes moved in one step."""
    with GraphInstance(plan, offload_directory=tmp_path) as model:
        model.initialize(seed=0)
        trace = trained(model, steps)
        return trace, model.file_traffic()


@cache
def expected_of(dtype="f32"):
    with graph_of(dtype).instantiate() as model:
        model.initialize(seed=0)
        return trained(model)


CASES = [
    ("f32", {"offload": "optimizer"}),
    ("f32", {"offload": ("activations", "parameters"), "accumulation": 4, "recompute": "selective"}),
    ("bf16", {"offload": OFFLOADS, "accumulation": 2}),
    ("bf16", {"offload": "activations", "workers_per_device": 2}),
]


@pytest.mark.parametrize(("dtype", "options"), CASES, ids=str)
def test_steps_are_equal_with_the_planned_transfers(dtype, options, tmp_path):
    """To the bit, on one device; the bytes read and written are the plan's."""
    plan = (
        graph_of(dtype).plan({}, **options)
        if "workers_per_device" in options
        else planned(dtype=dtype, **options)
    )
    trace, moved = run(plan, tmp_path)
    assert trace == expected_of(dtype)
    ((read, written),) = plan.file_traffic()
    assert (moved["bytes_read"], moved["bytes_written"]) == (STEPS * read, STEPS * written)
    assert read > 0 and written > 0 and moved["busy_ns"] > 0


@pytest.mark.parametrize(
    "strategy",
    [DistributionStrategy.ddp(2), DistributionStrategy.fsdp(8)],
    ids=["ddp", "empty shards"],
)
def test_every_device_has_a_file(strategy, tmp_path):
    """Several devices: each reads and writes only its own share."""
    graph = graph_of()
    graph.set_distribution(strategy)
    plan = graph.plan(offload=OFFLOADS, workers_per_device=1)
    trace, moved = run(plan, tmp_path)
    assert trace == expected_of()
    assert moved["bytes_read"] == STEPS * sum(read for read, _ in plan.file_traffic())


def test_state_moves_between_file_and_memory(tmp_path):
    """A model resumes from the state of one that stores it elsewhere."""
    with GraphInstance(planned("none")) as model:
        model.initialize(seed=0)
        trained(model, 2)
        middle = model.state_dict()
        end = trained(model, 1, 2)
    with GraphInstance(planned(("optimizer", "parameters")), offload_directory=tmp_path) as model:
        model.load_state_dict(middle)
        assert trained(model, 1, 2) == end


def test_weights_in_a_file_serve_a_forward_pass(tmp_path):
    """Without an optimizer, a layer's weights are read when it runs."""
    results = []
    for offload in ("none", "parameters"):
        graph = tw.ComputeGraph("gpt2")
        models.build_training_graph(graph, models.config_from_dict(SIZES), BATCH, SEQ, "bf16")
        plan = graph.plan({}, offload=offload)
        with GraphInstance(plan, offload_directory=tmp_path) as model:
            model.initialize(seed=1)
            model.forward(**batch_of(0))
            results.append(model.get_tensor("loss").tobytes())
    assert results[0] == results[1]
    assert plan.file_traffic("forward")[0][0] > 0


def test_files_lower_memory_by_their_size():
    """The plan's figures: less memory, and its explanation."""
    memory = {o: planned(o).estimate_memory_usage()[0] for o in ("none", *OFFLOADS)}
    for offload in OFFLOADS:
        assert memory[offload]["total"] < memory["none"]["total"]
        assert memory[offload]["offloaded"] > 0
    assert memory["optimizer"]["optimizer"] < memory["none"]["optimizer"] / 20
    assert memory["parameters"]["parameters"] < memory["none"]["parameters"] / 20
    assert memory["activations"]["activations"] < memory["none"]["activations"] / 2
    plan = planned(OFFLOADS)
    text = plan.explain()
    read, written = (bytes_ / 2**20 for bytes_ in plan.file_traffic()[0])
    assert f"step reads {read:.2f} MiB and writes {written:.2f} MiB" in text
    assert re.search(
        r"offloaded: [\d.]+ MiB in a file of each device\n +\d+ weights, \d+ activations, \d+ opt", text
    )
    name = next(t.spec.name for t in plan.graph.of_kind("parameter") if t.id in plan.layout.files)
    assert "in the device's file" in plan.why(name)


LIMITED = """
import hashlib, json, resource, sys
sys.path.insert(0, sys.argv[1])
from native.session.test_offload import batch_of, graph_of
from tilewise.core.errors import ResourceError
from tilewise.session import GraphInstance

graph = graph_of(vocab_size=1024, n_embd=256, n_layer=18)  # large next to workers' scratch and what Python reads into
kinds = {"memory": "none", "files": ("optimizer", "activations")}
plans = {where: graph.plan({}, offload=kind, workers_per_device=1) for where, kind in kinds.items()}
needs = {where: plan.total_bytes for where, plan in plans.items()}
limit = needs["memory"] * 2 // 3
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
if sys.argv[3] == "limited":
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit,) * 2)
    try:
        GraphInstance(plans["memory"])
        refused = False
    except ResourceError:
        refused = True
else:
    refused = None
with GraphInstance(plans["files" if refused else "memory"], offload_directory=sys.argv[2]) as model:
    model.initialize(seed=0)
    losses = [model.step(batch_of(number), 1e-3).loss for number in range(2)]
    digest = hashlib.sha256()
    for name in model.lasting_names():
        digest.update(model.get_tensor(name))
found = {"refused": refused, "needs": needs, "limit": limit, "losses": losses, "digest": digest.hexdigest()}
print(json.dumps(found))
"""


def with_small_stacks():
    """Make thread stacks small, because all of their 8 MiB count."""
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))


@pytest.mark.slow
def test_offloading_trains_within_two_thirds_of_the_memory(tmp_path):
    """With optimizer and activations in a file, a model trains to the same bits in less memory than it needs."""
    results = {}
    here = str(Path(__file__).parents[2])
    for kind in ("limited", "free"):
        command = [sys.executable, "-c", LIMITED, here, str(tmp_path), kind]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, preexec_fn=with_small_stacks
        )
        assert done.returncode == 0, done.stderr
        results[kind] = json.loads(done.stdout)
    assert results["limited"]["refused"] is True
    assert results["limited"]["needs"]["memory"] >= 1.5 * results["limited"]["limit"]
    assert (results["limited"]["losses"], results["limited"]["digest"]) == (
        results["free"]["losses"],
        results["free"]["digest"],
    )


# ---- what is brought ahead of updates --------------------------------------------------------------------------------


def put_back_of(plan):
    """Calls that write a prefetched state back, each with the calls that read it."""
    made = {o: op for op in plan.graph.ops for o in op.outputs}
    for op in plan.graph.ops:
        if op.op == "call" and op.attrs["template"].startswith("put_back"):
            half = len(op.inputs) // 2
            yield op, [made[t] for t in op.inputs[half:]]


@pytest.mark.parametrize(
    "dtype,offload,options",
    [
        ("f32", "optimizer", {}),
        ("bf16", OFFLOADS, {"accumulation": 4}),
        ("f32", OFFLOADS, {"recompute": "full"}),
    ],
    ids=str,
)
def test_states_are_prefetched_into_free_memory(dtype, offload, options, monkeypatch):
    """States are read before the gradients' norm is known, without additional memory or transfers."""
    plan = planned(offload, dtype, **options)
    monkeypatch.setattr(passes, "choose_prefetched", lambda *_: {})
    plain = graph_of(dtype).plan({}, offload=offload, workers_per_device=1, **options)
    assert [*put_back_of(plain)] == []
    assert plan.placement(0).regions["activations"] == plain.placement(0).regions["activations"]
    assert plan.arena_bytes[0] <= plain.arena_bytes[0]
    assert plan.file_traffic() == plain.file_traffic()
    norm = next(op.id for op in plan.graph.ops if op.op == "global_norm")
    states = [*put_back_of(plan)]
    assert states
    for back, prefetched in states:
        assert all(op.phase == "update" and op.id < norm < back.id for op in prefetched)


def test_prefetched_states_share_no_byte_with_live_values():
    """Their memory is that of activations after their last reader."""
    plan = planned("optimizer")
    buffers = [b for b in plan.placement(0).buffers if b.category == "activations"]
    put_back = {t for back, _ in put_back_of(plan) for t in back.inputs[len(back.inputs) // 2 :]}
    ours = [b for b in buffers if b.key[1] in put_back]
    assert (
        len(ours) == len(put_back)
        and sum(b.bytes for b in ours) > plan.placement(0).regions["activations"] // 2
    )
    others = 0
    for one in ours:
        for other in buffers:
            if other is one or other.end <= one.offset or one.end <= other.offset:
                continue
            assert other.last < one.first or one.last < other.first
            others += 1
    assert others > len(ours)


def test_a_plan_with_prefetches_is_restored_from_its_file(tmp_path):
    """The choice is in the plan: planning with its settings gives the same."""
    plan = planned("optimizer")
    plan.save(tmp_path / "plan")
    assert tw.Plan.load(tmp_path / "plan") == plan


def hold_to_order(plan):
    """Every two uses of the same bytes, one of them a write, are ordered."""
    program = assemble_program(plan)
    validate_order([program.tasks(device, [], "step") for device in range(plan.mesh.num_devices)])


@pytest.mark.parametrize("options", [{}, {"accumulation": 2, "offload": OFFLOADS}], ids=str)
def test_a_prefetch_waits_for_the_last_user_of_its_bytes(options):
    """Over the expanded tasks; entries without the other users of their bytes are detected."""
    plan = graph_of("bf16", n_layer=3).plan(
        {}, **{"offload": "optimizer", "workers_per_device": 1, **options}
    )
    hold_to_order(plan)
    put_back = {t for back, _ in put_back_of(plan) for t in back.inputs[len(back.inputs) // 2 :]}
    (of,) = plan.program.classes
    aliases = {n: others for n, others in of.aliases.items() if of.entries[n].key[1] not in put_back}
    assert len(aliases) < len(of.aliases)
    forged = replace(plan.program, classes=(replace(of, aliases=aliases),))
    with pytest.raises(InternalError, match="two uses of the same bytes"):
        hold_to_order(replace(plan, program=forged))


def test_a_picture_shows_prefetches_in_their_place():
    """Prefetches are drawn among the calls of the backward pass, and all other calls of the update after it."""
    plan = planned("optimizer")
    calls = draw_plan(plan).stages[0].calls
    phases = [call.phase for call in calls]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    ahead = [c for c in calls if c.phase == "backward" and c.name.startswith("fetch:")]
    last = max(op.id for op in plan.graph.ops if op.phase == "backward")
    assert (
        len(ahead)
        == len({op.id for _, prefetched in put_back_of(plan) for op in prefetched if op.id < last})
        > 0
    )


# ---- plans as files, faults, borders ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_saved_plan_runs_to_the_same_bits(tmp_path):
    """The file has the place of the devices' files; a forged one is rejected."""
    plan = graph_of().plan({}, offload=OFFLOADS)
    plan.save(tmp_path / "plan")
    loaded = tw.Plan.load(tmp_path / "plan")
    assert loaded.digest() == plan.digest() and loaded.file_bytes == plan.file_bytes
    assert run(loaded, tmp_path)[0] == expected_of()
    placement = plan.placement(0)
    half = {**placement.regions, "files": plan.file_bytes // 2}
    for forged in (
        replace(plan, layout=replace(plan.layout, files=plan.layout.files[1:])),
        replace(plan, layout=replace(plan.layout, files=(*plan.layout.files, 1 << 20))),
        replace(plan, placements=(replace(placement, regions=half),)),
    ):
        forged.save(tmp_path / "forged")
        with pytest.raises(PlanError):
            GraphInstance(tw.Plan.load(tmp_path / "forged"), offload_directory=tmp_path)


def shifted(instruction):
    """Half of the transfer comes from elsewhere."""
    half = instruction.extent.constant // 2 // 32 * 32
    rows, file = instruction.operands
    operands = (rows, file._replace(offset=file.offset + half))
    return replace(instruction, operands=operands, extent=instruction.extent._replace(constant=half))


@pytest.mark.parametrize(("kind", "change"), [("store", skip), ("fetch", skip), ("fetch", shifted)])
def test_a_planted_fault_is_detected(kind, change, tmp_path, monkeypatch):
    """The twin: missing or displaced transfers change the result."""
    monkeypatch.setattr(passes, "choose_prefetched", lambda *_: {})
    plan = graph_of().plan({}, offload="optimizer", workers_per_device=1)
    fault = change_where(lambda instruction: instruction.kernel.startswith(kind), change)
    with suppress(NotFinite):  # what was never written may be anything
        assert run(fault(plan), tmp_path)[0] != expected_of()


@pytest.mark.parametrize("kinds", ["disk", ["optimizer", "gradients"], 3])
def test_unknown_kinds_are_rejected(kinds):
    """Before anything is planned."""
    with pytest.raises(PlanError, match="optimizer, activations, parameters"):
        graph_of().plan({}, offload=kinds)


def test_offloading_without_gain_is_rejected():
    """A model whose states are all too small for a transfer."""
    graph = tw.ComputeGraph("tiny")
    sizes = {**SIZES, "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_positions": 8}
    models.build_training_graph(graph, models.config_from_dict(sizes), 2, 8, "f32")
    graph.optimize(tw.optim.AdamW())
    for offload in OFFLOADS:
        with pytest.raises(PlanError, match="no " + offload):
            graph.plan({}, offload=offload)


def test_directories_of_files(tmp_path):
    """They need not be UTF-8; unusable ones are rejected before a worker starts, unless none is needed."""
    odd = tmp_path / os.fsdecode(b"\xff\n")
    odd.mkdir()
    graph = graph_of()
    trace, _ = run(planned("optimizer"), odd)
    assert trace == expected_of() and list(odd.iterdir()) == []  # the files have no names
    graph.instantiate(planned("none"), offload_directory=odd / os.fsdecode(b"\xfe")).close()
    with pytest.raises(ResourceError, match="must be written completely"):
        graph.instantiate(planned("optimizer"), offload_directory=odd / os.fsdecode(b"\xfe"))
    with pytest.raises(ResourceError, match="must take a file"):
        graph.instantiate(planned("optimizer"), offload_directory=tmp_path / "none")
    with pytest.raises(PlanError, match="offload_directory"):
        graph.instantiate(planned("optimizer"), offload_directory=3)


def spilled_files(directory):
    """Descriptors of this process's unnamed files in a directory."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            where = os.readlink(link)
            if where.startswith(f"{directory}/") and "(deleted)" in where:
                yield int(link.name)


def test_a_failing_disk_is_an_error(tmp_path):
    """While the file is truncated each call raises an error; with a working disk the model continues."""
    with GraphInstance(planned(OFFLOADS), offload_directory=tmp_path.resolve()) as model:
        model.initialize(seed=0)
        state = model.state_dict()
        name = next(n for n in state if n.startswith("optimizer.exp_avg."))
        descriptor = min(spilled_files(tmp_path.resolve()))
        size = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, 0)
        for call in (
            lambda: model.get_tensor(name),
            model.state_dict,
            model.copy_state,
            lambda: model.differing_replicas(name) or model.get_tensor(name),
        ):
            with pytest.raises(ResourceError, match="must be read and written"):
                call()
        os.ftruncate(descriptor, size)
        model.load_state_dict(state)
        assert trained(model) == expected_of()


def test_weights_of_a_checkpoint_go_to_device_files(tmp_path):
    """A checkpoint is loaded into tensors in the devices' files; values that are not finite are rejected."""
    plan = planned(("parameters", "optimizer"), "bf16")
    with GraphInstance(plan, offload_directory=tmp_path) as model:
        model.initialize(seed=3)
        weights = {name: np.array(value) for name, value in model.parameters().items()}
        save_tensors(tmp_path / "whole.safetensors", weights)
        name = next(n for n in weights if n.endswith("up_proj.weight"))
        bad = {**weights, name: np.full_like(weights[name], np.inf)}
        save_tensors(tmp_path / "bad.safetensors", bad)
    with GraphInstance(plan, offload_directory=tmp_path) as model:
        report = model.load_parameters(tmp_path / "whole.safetensors")
        assert sum(report.bytes_read) == sum(value.nbytes for value in weights.values())
        for key, value in model.parameters().items():
            assert np.array_equal(np.array(value), weights[key])
        with pytest.raises(CheckpointError, match=re.escape(name)):
            model.load_parameters(tmp_path / "bad.safetensors")
