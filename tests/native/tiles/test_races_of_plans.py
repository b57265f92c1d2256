"""The race detector is silent on the product's own plans, and finds a missing acknowledgement in them."""

from dataclasses import replace

import pytest

from ranks.small_llama import config, training_graph
from tilewise.session.assemble import native_program
from tilewise.tiles.checker import find_race

MESHES = [
    pytest.param({"dp": 2, "tp": 2}, {"accumulation": 2}, marks=pytest.mark.slow),
    ({"dp": 2, "fsdp": 2}, {}),
    pytest.param({"fsdp": 2, "tp": 2}, {"recompute": "full"}, marks=pytest.mark.slow),
]


def race_of(program, bounds):
    """The first race of a training step."""
    return find_race(native_program(program, bounds), program, "step")


def without_acknowledgements(program):
    """A plan's program in which acknowledgements do not delay writers."""

    def change(instruction):
        return replace(instruction, operands=()) if instruction.label.endswith("/ack") else instruction

    classes = tuple(
        replace(
            of,
            templates=tuple(
                replace(t, instructions=tuple(map(change, t.instructions))) for t in of.templates
            ),
        )
        for of in program.classes
    )
    return replace(program, classes=classes)


@pytest.mark.parametrize("mesh, options", MESHES, ids=str)
def test_plans_have_no_races(mesh, options):
    """Every strategy's step, also with storage shards, accumulation and recomputation."""
    plan = training_graph(config(), "f32").plan(mesh, workers_per_device=1, **options)
    assert race_of(plan.program, plan.symbol_bounds) is None
    race = race_of(without_acknowledgements(plan.program), plan.symbol_bounds)
    assert race is not None and race.first.device != race.second.device
    assert race.first.is_write != race.second.is_write
