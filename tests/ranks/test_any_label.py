"""With any names of dims and any axis that shards them: a plan is rejected, or equals one device to the bit."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import LayoutError, PlanError
from tilewise.nn import linear, rms_norm
from tilewise.strategy import ParallelismMode

BATCH, SEQ, WIDTH, INNER, CLASSES = 4, 4, 8, 16, 8
LABELS = ("batch", "rows", "mlp", "words")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((BATCH, SEQ, WIDTH)).astype(np.float32)
Y = RNG.integers(0, CLASSES, (BATCH, SEQ)).astype(np.int32)


def label_of(name):
    return tw.DimLabel(name, is_summed_by_batch_splits=name == "batch")


def build(labels):
    """Norm, product, silu, product, loss; `labels` names batch, rows, width, inner and classes."""
    kinds = {dim: label_of(name) if name else None for dim, name in labels.items()}
    graph = tw.ComputeGraph("net")
    outer = [kinds["batch"], kinds["rows"]]
    x = graph.input([BATCH, SEQ, WIDTH], name="x", labels=[*outer, kinds["width"]])
    y = graph.input([BATCH, SEQ], "i32", name="y", labels=outer, storage="scalars")
    x = rms_norm(graph, x, "gamma", eps=1e-5)
    h = graph.silu(linear(graph, x, "up", INNER, in_label=kinds["width"], out_label=kinds["inner"]))
    logits = linear(graph, h, "down", CLASSES, in_label=kinds["inner"], out_label=kinds["classes"])
    graph.loss(graph.mean_cross_entropy(logits, y)[0])
    graph.optimize(tw.optim.AdamW())
    return graph


def train(graph, strategy):
    """Loss, norm, gradients and weights of two steps, as bytes."""
    graph.set_distribution(strategy)
    seen = []
    with graph.instantiate(graph.plan(batch_splits=4, workers_per_device=1)) as model:
        model.initialize(1, 0.5)
        for _ in range(2):
            result = model.step({"x": X, "y": Y}, 1e-2)
            seen.append(np.float32([result.loss, result.grad_norm]).tobytes())
        for name in model.parameter_names():
            seen += [model.get_tensor(f"{name}.grad").tobytes(), model.get_tensor(name).tobytes()]
    return seen


def spread(axis, size, label):
    """A strategy of a user: one label on one axis, with any name."""
    return tw.DistributionStrategy(ParallelismMode.HYBRID, {axis: size}, {label: axis})


def is_equal_or_refused(labels, axis, size, label):
    """None: rejected before a run; otherwise whether the steps equal one device's."""
    try:
        state = train(build(labels), spread(axis, size, label))
    except (LayoutError, PlanError):
        return None
    return state == train(build(labels), tw.DistributionStrategy.single())


DIMS = ("batch", "rows", "width", "inner", "classes")


@st.composite
def labellings(draw):
    """Labels of the five dims, few of them, and the one among them that is sharded."""
    labels = {dim: draw(st.sampled_from((None, None, None, None, None, None, *LABELS))) for dim in DIMS}
    label = draw(st.sampled_from(LABELS))
    labels[draw(st.sampled_from(DIMS))] = label
    return labels, label


def test_any_label_on_any_axis():
    """Five dims with any labels, one of them sharded on any axis: never another result; many are accepted."""
    outcomes = Counter()

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(labellings(), st.sampled_from(("dp", "tp", "data", "x")), st.sampled_from((2, 4)))
    def hold(drawn, axis, size):
        labels, label = drawn
        try:
            build(labels)
        except ValueError:  # two dims that must differ have one label, or 'batch' stands where it cannot
            outcomes["not built"] += 1
            return
        outcome = is_equal_or_refused(labels, axis, size, label)
        outcomes[outcome] += 1
        assert outcome in (None, True)

    hold()
    assert outcomes[True] >= 10 and outcomes[None] >= 5, outcomes


NONE = dict.fromkeys(DIMS)


@pytest.mark.parametrize(
    "labels,axis,label",
    [
        ({"batch": "batch"}, "data", "batch"),
        ({"batch": "batch"}, "tp", "batch"),
        ({"inner": "mlp"}, "x", "mlp"),
        ({"classes": "words"}, "dp", "words"),
        ({"inner": "mlp", "classes": "words"}, "tp", "mlp"),  # a gradient cut across the k splits of its norm
    ],
)
def test_shareable_dims_work_under_any_name(labels, axis, label):
    """Batch, contracted and vocabulary dims run on an axis of any name and equal one device."""
    assert is_equal_or_refused({**NONE, **labels}, axis, 2, label) is True


@pytest.mark.parametrize(
    "labels,label,words",
    [
        ({"batch": "batch", "rows": "rows"}, "rows", "at 'all_gather:"),
        ({"batch": "rows"}, "rows", "which one label must count; got only rows"),
    ],
)
def test_uncovered_sums_are_not_shared(labels, label, words):
    """Sharded rows under a gradient are gathered, or rejected."""
    with pytest.raises((LayoutError, PlanError), match=words):
        train(build({**NONE, **labels}), spread("tp", 2, label))


def test_comparison_can_fail(monkeypatch):
    """The twin: without the rules, rows on an axis train on partial gradients, and the comparison fails."""
    monkeypatch.setattr("tilewise.strategy.agree._may_share", lambda *args: True)
    monkeypatch.setattr("tilewise.plan.settings.validate_pending_reductions", lambda graph, layout: None)
    monkeypatch.setattr("tilewise.plan.emission._check_part", lambda *args: None)
    assert is_equal_or_refused({**NONE, "batch": "batch", "rows": "rows"}, "tp", 2, "rows") is False


def test_operands_must_count_the_batch_alike():
    """Accumulation cuts operands that count the batch; one without the label is rejected."""
    graph = tw.ComputeGraph("mixed")
    x = graph.input([4, 8], name="x", labels=[tw.BATCH, None])
    other = graph.input([4, 8], name="other")
    graph.output(graph.add(x, other), "y")
    with pytest.raises(LayoutError, match="x and other"):
        graph.plan(accumulation=2)


def test_axis_without_work_is_rejected():
    """Devices that would all compute the same are named before anything is allocated."""
    graph = tw.ComputeGraph("whole")
    graph.output(graph.silu(graph.input([4, 8], name="x")), "y")
    for axis in ("dp", "tp"):
        with pytest.raises(LayoutError, match=f"{axis}=2"):
            graph.plan({axis: 2})
