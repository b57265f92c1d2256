"""Pages of plans with a run: its tasks are assigned to the plan's calls."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tilewise as tw
from ranks.small_llama import batches, config, training_graph
from tilewise.core import PlanError
from tilewise.plan.picture import draw_plan


def run(axes, accumulation, seq=32, length=32):
    model = config()
    graph = training_graph(model, "f32", 16, seq)
    plan = graph.plan(axes, accumulation=accumulation, recompute="full")
    with graph.instantiate(plan) as running:
        running.initialize(0)
        running.trace(True)
        running.step(batches(model, 1, 16, length)[0], 1e-3)
        return plan, running.timeline()


@pytest.mark.parametrize(
    ("axes", "accumulation"), [({}, 1), ({"dp": 2}, 2), ({"fsdp": 2, "tp": 2}, 2)], ids=str
)
def test_every_task_belongs_to_a_call(axes, accumulation, tmp_path):
    """A call's times are those of the tasks with its labels, on every device."""
    plan, timeline = run(axes, accumulation)
    picture = draw_plan(plan, timeline.tasks)
    assert len(picture.spans) == plan.mesh.num_devices
    for device, spans in enumerate(picture.spans):
        assert len(spans) == len(picture.stages[0].calls)
        own = sorted((t for t in timeline.tasks if t.device == device), key=lambda t: t.submit_ns)
        of, first = plan.class_of(device), 0
        for call, (begin, end) in zip(of.calls["step"], spans):
            labels = {i.label for i in of.templates[call.template].instructions}
            while (
                first < len(own)
                and own[first].kernel in labels
                and begin <= own[first].start_ns
                and own[first].end_ns <= end
            ):
                first += 1
        assert first == len(own)
    assert ("gathered" in picture.stages[0].calls[0].alive) == ("fsdp" in axes)
    plan.save_picture(tmp_path / "run.html", timeline)
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert f"{len(timeline.tasks):,} tasks in" in page and "Memory of device 0 in the run" in page
    assert "device 0 backward" in page and "device 0 worker 0" in page


def test_a_shorter_run_is_assigned_to_calls():
    """For one plan of any length, with sequences shorter than the bound."""
    plan, timeline = run({}, 1, tw.Dim("seq", 1, 128), 20)
    assert len(draw_plan(plan, timeline.tasks).spans[0]) == len(plan.class_of(0).calls["step"])


def test_a_run_with_other_tasks_has_only_lanes(tmp_path):
    """Such as a truncated run: only workers are drawn. A task of another plan's run is rejected."""
    (_, other), (plan, timeline) = run({}, 2), run({}, 1)
    with pytest.raises(PlanError, match=r"\[plan.save_picture\]"):
        plan.save_picture(tmp_path / "run.html", other)
    timeline = replace(timeline, tasks=timeline.tasks[:-1])
    assert draw_plan(plan, timeline.tasks).spans == ()
    plan.save_picture(tmp_path / "run.html", timeline)
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "device 0 worker 0" in page and "device 0 backward" not in page
