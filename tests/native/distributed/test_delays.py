"""Late tasks on any device and in any process do not change a bit of the results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.faults import inject
from tilewise.distributed import ProcessGroup

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import batches, config, training_graph

MESHES = ({"dp": 2, "tp": 2}, {"fsdp": 4})


class Delayed:
    """Models over two processes with two devices each, and the expected results of their steps."""

    def __init__(self) -> None:
        self.batch = batches(config(), 1, 8, 16)[0]
        self.models, self.labels, self.wanted = [], [], []
        for axes in MESHES:
            graph = training_graph(config(), "f32", 8, 16)
            plan = graph.plan(axes, workers_per_device=1)
            self.labels.append(
                sorted({i.label for t in plan.program.classes[0].templates for i in t.instructions})
            )
            self.models.append(graph.instantiate(plan))
            self.wanted.append(self.step(len(self.models) - 1, [], self.batch))

    def step(self, number, late, batch):
        """Result of a step from the same weights, with all gradients."""
        model = self.models[number]
        model.initialize(0)
        for device, label, index in late:
            inject(model, "delay", device, self.labels[number][label % len(self.labels[number])], index)
        result = model.step(batch, 1e-3)
        return result, [model.get_tensor(f"{name}.grad").tobytes() for name in model.parameter_names()]

    def holds(self, number, late, batch=None):
        """Whether a step with late tasks equals the one without."""
        return self.step(number, late, batch or self.batch) == self.wanted[number]

    def close(self):
        """Close the models."""
        for model in self.models:
            model.close()


@pytest.fixture(scope="module")
def delayed():
    """Two processes."""
    with ProcessGroup(2):
        made = Delayed()
        yield made
        made.close()


LATE = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 499), st.integers(0, 3)), max_size=8)


@given(number=st.integers(0, len(MESHES) - 1), late=LATE)
@settings(max_examples=15)
def test_late_tasks_change_no_bit(delayed, number, late):
    """Up to eight tasks of a step start a millisecond late."""
    assert delayed.holds(number, late)


@pytest.mark.soak
@given(number=st.integers(0, len(MESHES) - 1), late=LATE)
@settings(max_examples=10_000)
def test_late_tasks_change_no_bit_in_ten_thousand_schedules(delayed, number, late):
    """Longer than the everyday test."""
    assert delayed.holds(number, late)


def test_another_step_is_detected(delayed):
    """The twin: the comparison detects another label."""
    labels = delayed.batch["labels"].copy()
    labels[0, 0] = (labels[0, 0] + 1) % 512
    assert not delayed.holds(0, [(0, 3, 0)], {**delayed.batch, "labels": labels})
