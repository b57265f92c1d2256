"""The first two examples compare their results, and fail if they differ."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def example(request):
    spec = importlib.util.spec_from_file_location(
        f"example_{request.param}", EXAMPLES / f"{request.param}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", ["01_graph_by_hand"], indirect=True)
def test_graph_by_hand_compares_with_numpy(example, monkeypatch, capsys):
    """Success with NumPy's own result, failure with another; the plan is explained."""
    assert example.main() == 0
    shown = capsys.readouterr().out
    for part in ("%3 = linear(%0, %1)", "plan of 'two layers' on dp=2", "dim 0 (batch) on dp"):
        assert part in shown, part
    right = example.reference
    monkeypatch.setattr(example, "reference", lambda x, a, b: right(x, a, b) * (1 + 1e-4))
    assert example.main() == 1


@pytest.mark.parametrize("example", ["02_layer_template"], indirect=True)
def test_layer_template_compares_bits_and_traces(example, monkeypatch, capsys):
    """Success with one trace and equal bits; failure for one changed bit or a second trace."""
    assert example.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("6 layers, 1 traced") == 2 and "0 elements moved" in shown
    right = example.run

    def one_bit_off(axes, x):
        y = right(axes, x)
        if axes:
            y.view("u4")[3, 5] ^= 1
        return y

    monkeypatch.setattr(example, "run", one_bit_off)
    assert example.main() == 1

    def traced_twice(axes, x):
        y = right(axes, x)
        example.counts.traced += 1
        return y

    monkeypatch.setattr(example, "run", traced_twice)
    assert example.main() == 1
