"""Pages of plans: their figures are the plan's own, names are escaped, nothing is loaded, and size is bounded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pure.graph.test_recompute import planned
from pure.pages import Page
from pure.plans import plan_graph
from tilewise.core.dims import BATCH
from tilewise.core.errors import PlanError
from tilewise.graph import GraphBuilder, differentiate, layer, simplify
from tilewise.ir.schedule import SegmentPlace
from tilewise.nn import linear
from tilewise.observe import Trace, render_plan
from tilewise.plan.picture import draw_plan
from tilewise.plan.schedule import cut_segments
from tilewise.plan.shapes import round_up
from tilewise.strategy import one_stage

MESHES = {
    "one": ({}, 1),
    "two microbatches": ({}, 2),
    "dp": ({"dp": 2}, 4),
    "tp": ({"tp": 2}, 1),
    "dp and tp": ({"dp": 2, "tp": 2}, 2),
}


@cache
def plan_of(mesh):
    """The plan that the figures of a picture are compared with: one layer is recomputed."""
    axes, accumulation = MESHES[mesh]
    return planned(["layers.1"], axes, accumulation=accumulation, layers=4)


def page_of(plan):
    """The page as it is written."""
    return Page(render_plan(draw_plan(plan)))


@pytest.mark.parametrize("mesh", MESHES)
def test_calls_equal_the_schedule(mesh):
    """Phase, microbatch and layer of every call, found from the tensors that it is bound to."""
    plan = plan_of(mesh)
    segments = cut_segments(plan.graph)
    (order,) = one_stage([SegmentPlace(s.phase) for s in segments], MESHES[mesh][1])
    calls = [(c.phase, c.microbatch, c.name) for c in draw_plan(plan).stages[0].calls]
    for turn, (phase, microbatch, name) in zip(order, calls, strict=True):
        segment = segments[turn.segment]
        assert (turn.kind, turn.microbatch) == (phase, microbatch)
        assert name.startswith(segment.ops[0].label)


@pytest.mark.parametrize("mesh", MESHES)
def test_bytes_equal_the_plan(mesh):
    """Permanent memory, memory per segment, memory per template; and the table of what is reserved."""
    plan = plan_of(mesh)
    plan = replace(  # as a plan for training counts what lies next to its buffers
        plan, overhead={"engine": 1000}, settings=replace(plan.settings, is_checkpointed=True)
    )
    (picture,) = draw_plan(plan).stages
    extra = 1000 + max(plan.checkpoint_bytes)
    placement = plan.placement(0)
    assert plan.checkpoint_bytes[0] > 0
    assert sum(picture.lasting.values()) == placement.regions["lasting"] + extra
    segments = {s.ops[0].label: s.index for s in cut_segments(plan.graph)}
    for call in picture.calls:
        at = segments[call.name.split(" to ")[0]]
        living = [
            b for b in placement.buffers if b.category != "temporaries" and 0 <= b.first <= at <= b.last
        ]
        for category in ("activations", "gradients"):
            own = [round_up(b.bytes, 64) for b in living if b.category == category]
            assert call.alive.get(category, 0) == sum(own)
    most = max(c.alive["activations"] + c.alive.get("gradients", 0) for c in picture.calls)
    assert most <= placement.regions["activations"]
    most = max(c.alive["temporaries"] for c in picture.calls)
    own = [b for b in placement.buffers if b.category == "temporaries"]
    # the temporaries of a template that are live when one of them begins
    together = [[o for o in own if o.key[1] == b.key[1] and o.first <= b.first <= o.last] for b in own]
    assert most == max(sum(round_up(o.bytes, 64) for o in of) for of in together)
    assert most <= placement.regions["temporaries"]
    most_used = max(plan.estimate_memory_usage(), key=lambda device: device["total"])
    usage = {name: count for name, count in most_used.items() if count}
    table = {row[0]: row[1] for row in page_of(plan).rows if len(row) == 3}
    assert table == {name: f"{count:,}" for name, count in usage.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_reads_equal_the_plan(mesh):
    """Per class of devices and label, over all calls; and in the table, call by call."""
    plan = plan_of(mesh)
    (picture,) = draw_plan(plan).stages
    assert len(picture.classes) == len(plan.kinds)
    traffic = plan.traffic("step")
    for number, device in enumerate(plan.kinds):
        total: dict[str, int] = dict.fromkeys(traffic, 0)
        for call in picture.calls:
            for label, count in call.reads[number].items():
                total[label] += count
        assert total == {label: moved[device] for label, moved in traffic.items()}
    rows = [row for row in page_of(plan).rows if len(row) == 6 + len(plan.kinds)]
    assert [row[5:-1] for row in rows] == [
        [f"{sum(of.values()):,}" for of in call.reads] for call in picture.calls
    ]


def test_other_plan_has_another_picture():
    """The twin: the compared values differ where plans do."""
    pages = {str(page_of(planned(mode)).rows) for mode in ("none", "selective", "full")}
    assert len(pages) == 3


@layer
def strange(graph, x):
    """A layer whose names contain HTML."""
    return graph.silu(linear(graph, x, "<img src=x>&\"'", 8))


def test_names_are_escaped():
    """Of graphs, layers and parameters; a reader gets them unchanged."""
    graph = GraphBuilder("</title><script>alert(1)</script>")
    x = graph.input([4, 8], name="<b>x</b>", labels=[BATCH, None])
    y = strange(graph, linear(graph, x, "w'\"<i>", 8), path="<a href='q'>layer</a>")
    graph.loss(graph.mean(y))
    made, _, _ = differentiate(simplify(graph.freeze()), graph.draft.loss_id)
    page = page_of(plan_graph(made, {"dp": 2}))
    assert any("<a href='q'>layer</a>" in word for word in page.words)
    assert any("</title><script>alert(1)</script>" in word for word in page.words)
    assert any("linear_dw:<img" in word or "<i>" in word for word in page.words)


def test_graph_without_a_loss():
    """Its only program is drawn."""
    graph = GraphBuilder("forward")
    x = graph.input([4, 8], name="x", labels=[BATCH, None])
    graph.output(graph.silu(x), "y")
    picture = draw_plan(plan_graph(graph.freeze(), {}))
    assert (picture.program, [c.phase for c in picture.stages[0].calls]) == ("forward", ["forward"])
    Page(render_plan(picture))


@pytest.mark.slow
def test_pages_of_deep_models_are_bounded():
    """Columns and rows have a maximum, and the page says what it leaves out."""
    content = render_plan(draw_plan(planned("none", {"dp": 2}, layers=120)))
    page = Page(content)
    assert len(content) < 1_000_000 and content.count("<rect") < 2 * 4000
    assert any("more" in word for word in page.words)


TASK = (0, 0, "silu_gate", 0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    "row",
    [(1, *TASK[1:]), (-1, *TASK[1:]), (*TASK[:6], 5, 4), (0, 10**30, *TASK[2:]), (0, -1, *TASK[2:]),
     (0, 0, "no such label", *TASK[3:])],
    ids=str,
)  # fmt: skip
def test_a_trace_of_another_plan_is_invalid(row, tmp_path):
    """Other devices, workers or instructions, and times that run backwards: nothing is written."""
    plan = planned("none")
    with pytest.raises(PlanError, match=r"\[plan.save_picture\]"):
        plan.save_picture(tmp_path / "a.html", Trace.of_program([TASK, row], 1))
    assert not any(tmp_path.iterdir())
    plan.save_picture(tmp_path / "a.html", Trace.of_program([TASK], 1))


def test_picture_is_deterministic(tmp_path):
    """The same plan gives the same file; an invalid path is rejected."""
    plan = planned("none")
    plan.save_picture(tmp_path / "a.html")
    plan.save_picture(str(tmp_path / "b.html"))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    with pytest.raises(PlanError, match="path must be a path"):
        plan.save_picture(3)
