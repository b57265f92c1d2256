"""Real plans with a mutation: a check finds it, or every order of the tasks gives the same result.

A wrong result that is the same each time is what the comparisons with one device find.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import change_where, config, training_graph

from native.programs.plan_mutations import change_call, mutate, with_template
from native.programs.symbolic_run import final_memory
from support.task_order import validate_order
from tilewise.core.errors import InternalError, PlanError
from tilewise.ir.program import COPIES, TileProgram
from tilewise.ir.validate import (
    validate_acknowledgements,
    validate_bindings,
    validate_values,
)
from tilewise.session import Plan
from tilewise.session.assemble import native_program
from tilewise.strategy import OFFLOADS

PLANS = {
    "dp2": ({"dp": 2}, {}, {}),
    "tp2": ({"tp": 2}, {}, {}),
    "dp2tp2": ({"dp": 2, "tp": 2}, {}, {}),
    "shared_kv": ({"tp": 4}, {}, {"num_key_value_heads": 2, "num_hidden_layers": 1}),
    "accumulated": ({"dp": 2}, {"accumulation": 2}, {}),
    "rings": ({"dp": 2}, {"accumulation": 3, "batch_splits": 6}, {}),
    "shards": ({"fsdp": 2}, {}, {}),
    "empty_shards": ({"fsdp": 4}, {}, {"num_hidden_layers": 1}),  # of two panels, over four devices
    "files": ({}, {"offload": OFFLOADS}, {"num_hidden_layers": 4}),
    "files_of_two": ({"dp": 2}, {"offload": ["optimizer", "parameters"], "accumulation": 2}, {}),
    "hybrid_shards": ({"dp": 2, "fsdp": 2}, {"accumulation": 2, "batch_splits": 8}, {}),
}

LARGE = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("tp2", "dp2tp2", "shared_kv", "hybrid_shards", "shards", "empty_shards")
]
SOME = ["accumulated", "rings", "files_of_two", *LARGE]


@cache
def planned(name: str) -> tuple[Plan, tuple, tuple]:
    """A plan of a small Llama, and the arguments of `validate_values` and `validate_bindings` in planning."""
    axes, options, changes = PLANS[name]
    model = config(tie_word_embeddings=False, **changes)
    batch_splits = options.get("batch_splits", 4)
    graph = training_graph(model, "f32", batch_splits, 8)
    with (
        mock.patch("tilewise.plan.prove.validate_values") as flow,
        mock.patch("tilewise.plan.prove.validate_bindings") as bindings,
    ):
        plan = graph.plan(axes, **{"batch_splits": batch_splits, **options})
    return plan, flow.call_args.args[1:], bindings.call_args.args[1:]


def found_by(name: str, program: TileProgram) -> str:
    """The check that rejects a program; empty if none does."""
    plan, context, meant = planned(name)
    try:
        validate_acknowledgements(program)
    except InternalError:
        return "acknowledgements"
    try:
        validate_bindings(program, *meant)
    except InternalError:
        return "bindings"
    try:
        validate_values(program, *context)
    except InternalError:
        return "values"
    try:
        native = native_program(program, plan.symbol_bounds)
    except PlanError:
        return "finish"
    try:
        for calls in plan.programs:
            validate_order([native.tasks(d, [], calls) for d in range(plan.mesh.num_devices)])
    except InternalError:
        return "order"
    return ""


@cache
def memory_of(name: str) -> Mapping[str, list[bytes]]:
    plan, *_ = planned(name)
    return {p: run(plan, plan.program, p, 0) for p in plan.programs}


def run(plan: Plan, program: TileProgram, name: str, seed: int) -> list[bytes]:
    placement = plan.placement(0)
    size = placement.file_begin + plan.file_bytes if plan.file_bytes else placement.arena_bytes
    return final_memory(program, name, size // 2, placement.regions["lasting"], seed)


def outcome(name: str, program: TileProgram) -> str:
    """What three random orders of all tasks give: the memory of the plan, another one, or several."""
    plan, *_ = planned(name)
    results = {p: [run(plan, program, p, seed) for seed in range(3)] for p in plan.programs}
    if any(other != first for first, *others in results.values() for other in others):
        return "several"
    return "harmless" if {p: r[0] for p, r in results.items()} == memory_of(name) else "wrong"


def kill(name: str, seeds: range) -> Counter:
    """The number of mutants that each check found, and of those that give one result in any order."""
    plan, counts = planned(name)[0], Counter()
    for seed in seeds:
        what, program = mutate(seed, plan.program)
        by = found_by(name, program)
        by = by or outcome(name, program)
        assert by != "several", f"seed {seed} of {name}: {what} is not found"
        counts[by] += 1
    print(name, dict(counts))
    return counts


@pytest.mark.parametrize("name", SOME)
def test_real_plans_pass(name):
    """The unmodified plan passes every check, and every order of its tasks gives the same memory."""
    assert found_by(name, planned(name)[0].program) == ""
    plan, *_ = planned(name)
    assert all(run(plan, plan.program, p, 1) == expected for p, expected in memory_of(name).items())


def test_a_reduction_missing_on_all_devices_is_found():
    """Each reduction with its record: nothing deadlocks, and all devices agree."""
    plan, context, _ = planned("dp2")
    dropped = 0
    for number, template in enumerate(plan.program.classes[0].templates):
        for record in (c for c in template.collectives if c.kind not in COPIES):
            program = plan.program
            for c, of in enumerate(program.classes):
                own = of.templates[number]
                label = own.instructions[record.first].label.split("/")[0]
                rest = (*own.instructions[: record.first], *own.instructions[record.last :])
                instructions = [replace(i, notifies=()) if i.label == label else i for i in rest]
                count = record.last - record.first
                others = [
                    o if o.first < record.first else o._replace(first=o.first - count, last=o.last - count)
                    for o in own.collectives
                    if o.first != record.first
                ]
                changed = replace(own, instructions=tuple(instructions), collectives=tuple(others))
                program = with_template(program, c, number, changed)
            native_program(program, plan.symbol_bounds)
            with pytest.raises(InternalError, match="a shared value must be completed"):
                validate_values(program, *context)
            dropped += 1
    assert dropped >= 8


def test_a_write_before_a_read_is_found():
    """Without tiles in acknowledgements, a peer's tile may be written while it is read."""
    plan, *_ = planned("tp2")
    without_tiles = change_where(lambda i: i.label.endswith("/ack"), lambda i: replace(i, operands=()))
    program = without_tiles(plan).program
    native = native_program(program, plan.symbol_bounds)
    with pytest.raises(InternalError, match=r"got '.*of call \d+ on device \d and '.*over bytes"):
        validate_order([native.tasks(d, [], "step") for d in range(2)], native.labels())


@pytest.mark.parametrize("name", ["dp2tp2", "accumulated", "files_of_two"])
def test_exchanged_bindings_are_found(name):
    """Two tensors of one shape in a call, or two calls: only this check distinguishes tensors."""
    program, count = planned(name)[0].program, 0
    for seed in range(30):
        made = change_call(random.Random(seed), program)
        if made is not None and made[1] != program:
            assert found_by(name, made[1]) == "bindings", made[0]
            count += 1
    assert count >= 10


@pytest.mark.parametrize("name", SOME)
def test_mutants_are_found(name):
    """Twelve mutants of each plan; at least half are found before anything runs."""
    counts = kill(name, range(12))
    assert counts["harmless"] + counts["wrong"] <= 6


@pytest.mark.soak
@pytest.mark.parametrize("name", PLANS)
def test_a_thousand_mutants_are_found(name):
    """As many of each plan; two thirds are found before anything runs."""
    counts = kill(name, range(100, 100 + -(-1000 // len(PLANS))))
    assert counts["harmless"] + counts["wrong"] < 30
