"""Saved plans run to the same bits in another process, and replanning detects a foreign program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tilewise as tw
from ranks.small_llama import change_first, halve_batch_splits, merge_splits, skip
from support.saved_plans import NAMES, make, run
from tilewise.core.errors import PlanError
from tilewise.session import require_origin


def in_process(task: str, folder: Path, hash_seed: int) -> dict[str, list[str]]:
    """The output of `saved_plans` in a process with that hash seed."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "support" / "saved_plans.py"), task, str(folder)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of plans that a first process saved, and its results."""
    folder = tmp_path_factory.mktemp("plans")
    return folder, in_process("make", folder, 1)


def test_another_process_plans_and_runs_the_same(made):
    """Training and decoding, on one device and several: digests of plans, and every bit of the results."""
    folder, results = made
    assert sorted(p.name for p in folder.iterdir()) == sorted(f"{name}.plan" for name in NAMES)
    assert in_process("load", folder, 2) == results


def test_other_order_of_one_sum_is_detected(made):
    """The twin: a loaded plan with one sum in another order runs to other bits."""
    folder, results = made
    for name in NAMES:
        program = "step" if name.startswith("training") else "forward"
        plan = change_first("down", merge_splits, program=program)(tw.Plan.load(folder / f"{name}.plan"))
        assert run(name, plan) != results[name][1], name


@pytest.mark.parametrize("name", NAMES)
def test_plan_can_be_remade_from_its_file(name, made):
    """Training and decoding, on one device and several: replanned from only the file, they are the same."""
    require_origin(tw.Plan.load(made[0] / f"{name}.plan"))


def other_numbers(plan):
    """A device asks for other rows of a shared value's parts than its own."""
    devices = list(plan.program.devices)
    numbers = list(devices[-1].numbers)
    numbers[-1] += 1
    devices[-1] = replace(devices[-1], numbers=tuple(numbers))
    return replace(plan, program=replace(plan.program, devices=tuple(devices)))


CHANGES = {
    "another order of a sum": change_first("down", merge_splits),
    "other batch splits": change_first("_dw", halve_batch_splits, kernel="matmul_dw_f32"),
    "a task that does nothing": change_first("silu", skip),
    "another number of a device": other_numbers,
    "more memory": lambda plan: replace(plan, scratch_bytes=plan.scratch_bytes + 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_program_of_another_graph_is_rejected(what, tmp_path):
    """Whether or not the checks of a file detect a change, this does."""
    changed = CHANGES[what](make("training_dp2tp2"))
    changed.save(tmp_path / "a.plan")
    with pytest.raises(PlanError):
        require_origin(tw.Plan.load(tmp_path / "a.plan"))
    with pytest.raises(
        PlanError, match=r"\[session.require_origin\] a plan must be what planning makes of its graph"
    ):
        require_origin(changed)


def test_impossible_plans_are_rejected(made):
    """A layout that no strategy gives, a graph with half of its ops, not a plan."""
    plan = tw.Plan.load(made[0] / "training_dp2tp2.plan")
    other = replace(plan.layout, compute=plan.layout.compute[::-1], storage=plan.layout.storage[::-1])
    for wrong in (
        replace(plan, layout=other),
        replace(plan, graph=replace(plan.graph, ops=plan.graph.ops[::2])),
        None,
    ):
        with pytest.raises(PlanError, match=r"\[session.require_origin\]"):
            require_origin(wrong)
