"""Gathering a table's ids and rows where devices share a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_llama import batches, change_every, change_first, config, training_graph

import tilewise as tw
from tilewise import models
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import DeviceMesh
from tilewise.session import verify_strategy
from tilewise.strategy import DistributionStrategy

SEQ, VOCAB = 8, 448


def batch_of(axes) -> int:
    """Sequences, and batch splits, that devices can share."""
    return 12 if axes.get("dp", 1) * axes.get("fsdp", 1) % 3 == 0 else 8


def model_of(**changes: object):
    """Fewer tokens than the table has rows."""
    return config(**{"vocab_size": VOCAB, "num_hidden_layers": 1, **changes})


def repeated(axes, steps: int = 2):
    """Tokens of few different ids, so that a row gets tokens of every device."""
    data_of_steps = batches(model_of(), steps, batch_of(axes), SEQ)
    return [{**data, "tokens": data["tokens"] % 5 * 89} for data in data_of_steps]


def compare(axes, change=lambda plan: plan, **changes: object):
    batch = batch_of(axes)
    graph = training_graph(model_of(**changes), "f32", batch, SEQ)
    return verify_strategy(graph, DeviceMesh(axes), repeated(axes), batch_splits=batch, change=change)


def planned(axes, *, accumulation=1, **changes: object) -> tw.Plan:
    graph = training_graph(model_of(**changes), "f32", batch_of(axes), SEQ)
    graph.set_distribution(DistributionStrategy.for_mesh(DeviceMesh(axes)))
    return graph.plan(axes, batch_splits=batch_of(axes), accumulation=accumulation, workers_per_device=1)


def gathers(plan: tw.Plan) -> list[str]:
    return [op.label for op in plan.graph.ops if op.op == "all_gather"]


@pytest.mark.parametrize(
    ("axes", "tied"),
    [
        ({"dp": 2}, True),
        ({"dp": 3}, False),
        ({"dp": 4, "tp": 2}, True),
        ({"fsdp": 3}, True),
        ({"fsdp": 2, "tp": 2}, False),
        ({"dp": 2, "fsdp": 2, "tp": 2}, True),
    ],
    ids=str,
)
def test_rows_are_gathered_instead_of_the_table(axes, tied):
    """No part of the table's own gradient crosses, and results equal one device to the bit."""
    plan = planned(axes, tie_word_embeddings=tied)
    assert gathers(plan) == ["all_gather:tokens", "all_gather:embedding_dw:embed_tokens.weight"]
    assert not any(label.startswith("embedding_dw") for label in plan.traffic())
    report = compare(axes, tie_word_embeddings=tied)
    assert report.equal, report.text


def test_several_tables():
    """GPT-2 has a table of tokens and one of positions, which are fewer than the tokens of a step."""
    axes = {"fsdp": 2}
    model = models.config_from_dict(
        {
            "model_type": "gpt2",
            "vocab_size": VOCAB,
            "n_positions": SEQ,
            "n_embd": 64,
            "n_layer": 1,
            "n_head": 4,
        }
    )
    graph = training_graph(model, "bf16", batch_of(axes), SEQ)
    graph.set_distribution(DistributionStrategy.for_mesh(DeviceMesh(axes)))
    plan = graph.plan(axes, batch_splits=batch_of(axes))
    assert [label for label in gathers(plan) if "embedding_dw" in label] == [
        "all_gather:embedding_dw:embed_tokens.weight"
    ]
    report = verify_strategy(graph, DeviceMesh(axes), repeated(axes), batch_splits=batch_of(axes))
    assert report.equal, report.text


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"dp": 2}, {"accumulation": 2}),  # no sum has all tokens
        ({"dp": 2}, {"vocab_size": 65}),  # as many bytes, with the ids
        ({"fsdp": 2}, {"vocab_size": 64}),
        (
            {"dp": 2, "tp": 8},
            {"vocab_size": 512, "num_key_value_heads": 8},
        ),  # a device has an eighth of the table
        ({"tp": 2}, {}),  # the batch is whole
        ({}, {}),
    ],
    ids=str,
)
def test_table_crosses_where_that_is_less(axes, changes):
    """With as many tokens as rows on a device, with several microbatches, and where no device shares the batch."""
    assert gathers(planned(axes, **changes)) == []


def test_part_of_a_tied_table_takes_no_memory(monkeypatch):
    """A part of the table next to the head's gradient would take memory; rows need none."""
    few = planned({"dp": 2}, vocab_size=64 * VOCAB).estimate_memory_usage()[0]["temporaries"]
    monkeypatch.setattr("tilewise.session.passes.gather_table_rows", lambda graph, layout, _: (graph, layout))
    many = planned({"dp": 2}, vocab_size=64 * VOCAB).estimate_memory_usage()[0]["temporaries"]
    table = 64 * VOCAB * model_of().hidden_size * 4
    assert many >= table and few < table // 4


def table_graph(shape, length=None) -> tw.ComputeGraph:
    graph, counts = tw.ComputeGraph("table"), [tw.BATCH, *[None] * (len(shape) - 1)]
    shape = shape if length is None else (shape[0], length)
    ids, labels = (
        graph.input(shape, "i32", name=n, labels=counts, storage="scalars") for n in ("ids", "labels")
    )
    table = graph.parameter([VOCAB, 32], "f32", name="table", labels=[tw.DimLabel("vocab"), None])
    head = graph.parameter([16, 32], "f32", name="head", labels=[tw.DimLabel("classes"), None])
    logits = graph.matmul(graph.embedding(ids, table), head, trans_b=True)
    graph.output(logits, "logits")
    loss, _ = graph.mean_cross_entropy(logits, labels)
    graph.loss(loss)
    return graph


def test_symbolic_lengths_are_not_gathered():
    """A plan gathers only with a fixed number of tokens."""
    graph = table_graph((8, SEQ), tw.Dim("length", 1, 16))
    graph.optimize(tw.optim.AdamW())
    assert gathers(graph.plan({"dp": 2}, batch_splits=8)) == []
    assert len(gathers(graph.plan({"dp": 2}, batch_splits=8, sizes={"length": SEQ}))) == 2


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"rules": {"batch": "dp", "vocab": "dp"}},
        {"rules": {"batch": "dp"}, "layouts": {"table": ("dp", None)}},
    ],
    ids=str,
)
def test_axis_shares_the_batch_or_the_vocabulary(options, is_trained):
    """A device that has some tokens and some rows cannot know which rows others use."""
    graph = table_graph((8, SEQ))
    if is_trained:
        graph.optimize(tw.optim.AdamW())
    graph.set_distribution(DistributionStrategy(tw.ParallelismMode.HYBRID, {"dp": 2}, **options))
    with pytest.raises(LayoutError, match=r"axis 'dp', which cuts the result of .*embedding.*'selected'"):
        graph.plan({"dp": 2}, batch_splits=8)


def other_member(instruction):
    """Peers' rows are copied from another device."""
    dst, src = instruction.operands
    return replace(instruction, operands=(dst, src._replace(member=0)))


def other_place(instruction):
    """They are copied to the first rows."""
    dst, src = instruction.operands
    return replace(instruction, operands=(dst._replace(offset=0), src))


def of_others(fault):
    """A fault in copies from members other than the first."""
    return lambda i: fault(i) if i.operands[1].member != 0 else i


@pytest.mark.parametrize(
    "axes,what,fault",
    [
        ({"dp": 2}, "all_gather:tokens", other_place),
        ({"dp": 2}, "all_gather:embedding_dw:embed_tokens.weight", other_member),
        ({"fsdp": 3}, "all_gather:tokens", other_member),
        ({"fsdp": 3}, "all_gather:embedding_dw:embed_tokens.weight", other_place),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_fault_in_gathered_rows_is_detected(axes, what, fault):
    """With another device's rows, or rows at another index."""
    assert not compare(axes, change_every(f"{what}/all_gather", of_others(fault))).equal


def test_rows_of_another_shard_are_detected():
    """A device that adds tokens to its storage shard at a wrong offset is detected."""

    def begin_elsewhere(instruction):
        split_rows, carries, _, padded = instruction.ints
        return replace(instruction, ints=(split_rows, carries, 32, padded))

    change = change_first("embedding_dw", begin_elsewhere, kernel="matmul_dw_f32")
    assert not compare({"fsdp": 2}, change).equal


@pytest.mark.parametrize("shape", [(96,), (8, 2, 3)], ids=str)
def test_ids_of_any_rank(shape):
    """Rows that every device uses, by one id per element of the batch and by a matrix of ids."""
    graph = table_graph(shape)
    graph.optimize(tw.optim.AdamW())
    rng = np.random.default_rng(3)
    ids, labels = (rng.integers(0, n, shape).astype(np.int32) for n in (4, 16))
    data = [{"ids": 100 * ids, "labels": labels}] * 2
    report = verify_strategy(graph, {"fsdp": 2}, data, batch_splits=8)
    assert report.equal, report.text
