"""The proof with one cursor per class of devices agrees with the proof with one cursor per device,
on real plans and mutants.

`Program.finish` uses a cursor per device up to 16 devices, and beyond that if a class is not in
lockstep. Idle devices in their own class bring a small plan above that number, and so to the other
proof, without a change of its behaviour.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import config, training_graph

from native.programs.plan_mutations import mutate, with_instructions
from tilewise.core.errors import PlanError
from tilewise.ir.program import DeviceBinding, DeviceClass, TileProgram
from tilewise.session.assemble import native_program

MESHES = {
    "dp2": {"dp": 2},
    "tp4": {"tp": 4},
    "dp2tp2": {"dp": 2, "tp": 2},
    "tp8": {"tp": 8},
    "dp4tp4": {"dp": 4, "tp": 4},
}


@pytest.fixture(scope="module", params=MESHES)
def program(request) -> TileProgram:
    """The program of a small Llama, with shared KV heads on a wide mesh."""
    graph = training_graph(config(num_hidden_layers=1), "f32")
    return graph.plan(MESHES[request.param], batch_splits=16).program


def by_class(program: TileProgram) -> str:
    """The error of the proof by class; empty if it succeeds."""
    idle = DeviceClass((), (), {}, dict.fromkeys(program.classes[0].calls, ()))
    some = program.devices[0]
    binding = DeviceBinding(len(program.classes), some.numbers, some.groups)
    padded = (*program.devices, *[binding] * (17 - len(program.devices)))
    return refusal(replace(program, classes=(*program.classes, idle), devices=padded))


def refusal(program: TileProgram) -> str:
    """The error of `finish`, which checks every device up to 16 devices."""
    try:
        native_program(program, ())
    except PlanError as error:
        return str(error)
    return ""


def class_per_device(program: TileProgram) -> TileProgram:
    classes = tuple(program.classes[d.class_id] for d in program.devices)
    return replace(
        program,
        classes=classes,
        devices=tuple(replace(d, class_id=i) for i, d in enumerate(program.devices)),
    )


def test_both_proofs_accept_real_plans(program):
    """By class, by device, and by class with a class per device."""
    assert len(program.devices) <= 16
    assert refusal(program) == by_class(program) == by_class(class_per_device(program)) == ""


@pytest.mark.slow
def test_both_proofs_reject_the_same_mutants(program):
    """A class that is not in lockstep is checked device by device; a class of one device always is in lockstep."""
    seen: Counter = Counter()
    for seed in range(40):
        what, mutant = mutate(seed, program)
        expected, shared = bool(refusal(mutant)), by_class(mutant)
        alone = by_class(class_per_device(mutant))
        assert bool(alone) == expected, (seed, what, alone)
        assert bool(shared) == expected, (seed, what, shared)
        seen[expected, bool(shared)] += 1
    assert seen[True, True] >= 5 and seen[False, False] >= 5, seen


@pytest.mark.parametrize("program", ["tp4"], indirect=True)
def test_a_wrong_post_of_a_later_device_is_rejected_by_class(program):
    """Device 0 posts another signal only on the second device of a class: no wait of the first detects it."""
    of = program.classes[program.devices[0].class_id]
    number, position, instruction = next(
        (t, i, x)
        for t, template in enumerate(of.templates)
        for i, x in enumerate(template.instructions)
        if x.label.startswith("linear:self_attn.v_proj") and x.label.endswith("/all_gather")
    )
    raises = list(instruction.notifies)
    raises[1] = raises[1]._replace(per_index=False)
    instructions = list(of.templates[number].instructions)
    instructions[position] = replace(instruction, notifies=tuple(raises))
    mutant = with_instructions(program, program.devices[0].class_id, number, tuple(instructions))
    assert refusal(mutant)
    assert by_class(mutant)


def test_classes_with_shared_kv_heads_are_in_lockstep():
    """Two devices with the same KV head wait for each other: they are distinguished by the first on an axis."""
    graph = training_graph(config(num_hidden_layers=1), "f32")
    program = graph.plan({"dp": 4, "tp": 8}, batch_splits=16).program
    assert len(program.devices) > 16 > len(program.classes)
    assert refusal(program) == ""


@pytest.mark.parametrize("axes", [{"fsdp": 17}, {"fsdp": 5, "tp": 4}], ids=str)
def test_gathers_of_shards_are_proved_device_by_device(axes):
    """Such classes are not in lockstep: a post missing on one of more than 16 devices is still found."""
    batch = axes.get("dp", 1) * axes["fsdp"]
    graph = training_graph(config(num_hidden_layers=1, vocab_size=1200), "f32", batch)
    program = graph.plan(axes, batch_splits=batch).program
    assert len(program.devices) > 16 and refusal(program) == ""
    class_id = program.devices[-1].class_id
    number, position, copy = next(
        (t, i, x)
        for t, template in enumerate(program.classes[class_id].templates)
        for i, x in enumerate(template.instructions)
        if x.label.startswith("all_gather_parameters:") and x.label.endswith("/offer")
    )
    instructions = list(program.classes[class_id].templates[number].instructions)
    instructions[position] = replace(copy, notifies=copy.notifies[:-1])
    mutant = with_instructions(program, class_id, number, tuple(instructions))
    assert "waiting for ever" in refusal(mutant)
