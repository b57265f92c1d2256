"""Saved plans run to the same bits in another process, which has never had their graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise as tw
from ranks.small_llama import change_first, merge_splits
from support.saved_plans import NAMES, run


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
