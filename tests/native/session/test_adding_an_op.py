"""docs/adding_an_op.md cannot rot: its Python blocks run in order, and what they claim is looked at from outside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.core import ShapeError
from tilewise.ir import op as op_table
from tilewise.kernels import KERNELS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adding_an_op.md"


@pytest.fixture(scope="module")
def page():
    """What the page's blocks define, after all of them ran; the op is gone again afterwards."""
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "adding_an_op"}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], PAGE.name, "exec"), names)  # errors name the page's own lines
    yield names
    op_table._OPS.pop(names["Mix"].name)


def test_every_block_runs(page):
    """The op of the page is registered, right on one device, equal on meshes, and its gradient holds."""
    assert isinstance(op_table.op_named("mix"), page["Mix"])


@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2}], ids=str)
def test_result_on_a_mesh(page, axes):
    """Equal to NumPy on one device, and equal to one device on two, to the bit."""
    results = []
    for mesh in ({}, axes):
        graph = page["build"]()
        with graph.instantiate(graph.plan(mesh)) as model:
            model.initialize(seed=3, scale=0.5)
            model.forward(**page["data"])
            results.append(model.get_tensor("y"))
            x = page["data"]["x"].astype(np.float64)
            a, b = (x @ model.get_tensor(n).T.astype(np.float64) for n in "ab")
    expected = (1 - page["SHARE"]) * a + page["SHARE"] * b
    assert np.abs(results[0] - expected).max() <= 2e-6 * np.abs(expected).max()
    assert results[0].tobytes() == results[1].tobytes()


def test_a_wrong_shard_is_noticed(page):
    """The comparison with one device tells when a device of the mesh mixes in other shares than the others."""
    results = []
    for fault in (0.0, 0.01):
        graph = page["build"]()
        plan = graph.plan({"dp": 2})
        mixes = [
            i
            for t in plan.programs["forward"][1].templates
            for i in t.instructions
            if i.kernel == "scale_f32"
        ]
        mixes[0].floats = [mixes[0].floats[0] + fault]
        with graph.instantiate(plan) as model:
            model.initialize(seed=3, scale=0.5)
            model.forward(**page["data"])
            results.append(model.get_tensor("y"))
    assert results[0].tobytes() != results[1].tobytes()


def test_a_wrong_gradient_is_noticed(page, monkeypatch):
    """The page's finite differences tell shares that changed places."""

    def swapped(self, tape, op, grads):
        share = op.attrs["share"]
        return [tape.scale(grads[0], share), tape.scale(grads[0], 1 - share)]

    monkeypatch.setattr(page["Mix"], "gradient", swapped)
    measured, promised = page["slopes"]("a")
    assert abs(measured - promised) > 0.01 * promised


def test_a_wrong_share_is_refused_at_the_call(page):
    """The message has the op, the rule, the value and the operands."""
    graph = page["build"]()
    x = graph.find("x")
    with pytest.raises(ShapeError, match=r"\[graph.mix\] share must lie in \[0, 1\], not at 1.5.*; clip it"):
        graph.op("mix", [x, x], share=1.5)


def test_what_the_page_names_exists():
    """Files and kernels that the page mentions are there."""
    text = PAGE.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:src|native|tests|docs)/[\w/.]+)`", text)
    assert len(paths) > 5
    assert not [p for p in paths if not (ROOT / p).exists()]
    tests = re.findall(r"`(test_\w+\.py)`", text)
    assert not [t for t in tests if not list((ROOT / "tests").rglob(t))]
    assert {"scale", "add"} <= set(KERNELS) and "mix" not in KERNELS
