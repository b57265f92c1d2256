"""Transfers and bytes, counted at execution, equal theory and plan exactly."""

from __future__ import annotations

import re
from math import prod

import pytest
from small_llama import BATCH, SEQ, batches, config, training_graph

from tilewise.kernels.packing import packed_elements
from tilewise.observe.overlap import kind_of
from tilewise.plan.collectives import gather_label, reduce_label


def run_step(axes):
    model = config()
    graph = training_graph(model, "bf16")
    plan = graph.plan(axes)
    with graph.instantiate(plan) as running:
        running.initialize(0)
        running.reset_transfers()
        running.step(batches(model, 1)[0], 1e-3)
        return plan, running.transfers()


@pytest.mark.parametrize(
    "axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 8}, {"pp": 2, "dp": 2}], ids=str
)
def test_counted_transfers_equal_the_plan(axes):
    """Every label's elements, on every device."""
    plan, counted = run_step(axes)
    assert {k: v for k, v in counted.items() if any(v)} == plan.traffic("step")


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_profiles_know_the_labels_of_transfers(axes):
    """Profiles count a task as a transfer, by its label, exactly if its instruction reads other devices."""
    plan = training_graph(config(), "bf16").plan(axes)
    moving = {label for program in plan.programs for label in plan.traffic(program)}
    labels = {
        instruction.label
        for of in plan.program.classes
        for template in of.templates
        for instruction in template.instructions
    }
    assert moving == {label for label in labels if kind_of(label) == "transfer"} and labels > moving


def num_parameters(plan):
    return sum(prod(t.spec.shape) for t in plan.graph.of_kind("parameter"))


@pytest.mark.parametrize("n,vocab", [(2, 512), (2, 128), (4, 512)])
def test_data_parallel_traffic(n, vocab):
    """2 Ψ (n - 1) / n elements per device, Ψ parameters (and one loss value). The tied table counts
    once per use, unless the ids and rows that are added to it are fewer bytes, as with the larger
    one: then (n - 1) / n of these. The gradient norm needs no transfer.
    """
    model = config(vocab_size=vocab)
    assert model.tie_word_embeddings
    plan = training_graph(model, "bf16").plan({"dp": n})
    moved = {label: sum(elements) for label, elements in plan.traffic("step").items()}
    parameters, tokens, rows = num_parameters(plan), BATCH * SEQ, 0
    if tokens * 2 < vocab * 4:
        rows = tokens * (1 + model.hidden_size)
    else:
        parameters += vocab * model.hidden_size
    total = sum(elements for label, elements in moved.items() if "cross_entropy" not in label)
    assert bool(rows) == (vocab == 512) and total == (2 * parameters + rows) * (n - 1)
    assert sum(elements for label, elements in moved.items() if "cross_entropy" in label) == 2 * (n - 1)
    assert not any("global_norm" in label for label in moved)


def norm_entries(plan, tile=512):
    """Rows of the table of squares: rows times column k splits of every gradient, each up to whole tiles."""
    total = 0
    for t in plan.graph.of_kind("parameter"):
        shape, labels = t.spec.shape, t.spec.labels
        k_splits = plan.graph.k_splits if len(shape) == 2 and labels[1] is not None else 1
        total += -(-shape[0] * k_splits // tile) * tile
    return total


@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallel_traffic(t):
    """Two all-reduces of b·s·h per layer forward and two backward: 8 bsh (t - 1) / t elements per
    device and layer. The gradient norm's table of squares crosses once: 2 (t - 1) / t of its entries.
    """
    model = config()
    plan = training_graph(model, "bf16").plan({"tp": t})
    moved = {label: sum(elements) for label, elements in plan.traffic("step").items()}
    one = BATCH * SEQ * model.hidden_size * (t - 1)  # over all devices, one half of an all-reduce
    in_layers = {
        label: elements for label, elements in moved.items() if "self_attn" in label or "mlp" in label
    }
    assert len(in_layers) == 8 and set(in_layers.values()) == {one * model.num_hidden_layers}
    layer = plan.class_of(0).templates
    forward = [i for i in layer[1].instructions if i.label.endswith("/reduce_scatter")]
    assert [i.label for i in forward] == [
        reduce_label(f"linear:{n}.weight") for n in ("self_attn.o_proj", "mlp.down_proj")
    ]
    assert gather_label("linear:mlp.down_proj.weight") in in_layers
    norm = sum(elements for label, elements in moved.items() if "global_norm" in label)
    assert norm == 2 * (t - 1) * norm_entries(plan)


@pytest.mark.parametrize(
    "axes,dtype", [({}, "bf16"), ({"dp": 2}, "f32"), ({"dp": 2, "tp": 2}, "bf16")], ids=str
)
def test_planned_bytes_are_allocated_bytes(axes, dtype):
    """Per device and in total, to the byte; the categories add up to the total. On one device, bf16
    with fp32 gradients, masters and moments takes 18 bytes per parameter.
    """
    graph = training_graph(config(), dtype)
    plan = graph.plan(axes)
    with graph.instantiate(plan) as running:
        usage = running.memory_usage()
    assert usage == plan.estimate_memory_usage()
    assert all(sum(v for k, v in device.items() if k != "total") == device["total"] for device in usage)
    if not axes and dtype == "bf16":
        num_bytes = sum(usage[0][k] for k in ("parameters", "gradients", "optimizer"))
        least = 18 * num_parameters(plan)
        assert least <= num_bytes <= least + 4096  # the loss, norms and alignment


@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}], ids=str)
def test_explained_tasks_equal_executed_ones(axes):
    """Tasks per device and program, as the native programs count them."""
    graph = training_graph(config(), "f32")
    plan = graph.plan(axes)
    text = plan.explain()
    with graph.instantiate(plan) as running:
        for name in plan.programs:
            explained = text.split(f"  {name}: ")[1].split("calls of templates")[1]
            for device in range(plan.mesh.num_devices):
                match = re.search(rf"device [\d, ]*\b{device}\b[\d, ]*: ([\d,]+) tasks", explained)
                assert int(match[1].replace(",", "")) == running._program.num_tasks(device, [], name)


def test_weights_are_laid_out_once_and_broadcast():
    """Loading on dp=4 copies every shared part from the first device; tp shards have nothing to copy."""
    model = config()
    for axes, copies in (({"dp": 4}, 3), ({"dp": 2, "tp": 2}, 2)):
        graph = training_graph(model, "f32")
        plan = graph.plan(axes)
        with graph.instantiate(plan) as running:
            running.initialize(0)
            counted = running.transfers()
            assert counted == plan.traffic("broadcast")
            weight = sum(counted["broadcast:layers.0.mlp.up_proj.weight"])
            rows = model.intermediate_size // axes.get("tp", 1)
            assert weight == copies * packed_elements(rows, model.hidden_size)
