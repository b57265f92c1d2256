"""The work of one template depends only on its arguments: pickled and unpickled, they give the same plan."""

from __future__ import annotations

import pickle

import pytest

import tilewise as tw
from pure.plans import plan_graph, with_update
from pure.small_gemma import GEMMA
from tilewise.core.errors import InternalError
from tilewise.graph import GraphBuilder, gradients, templates
from tilewise.models import build_training_graph
from tilewise.plan.lower import variants
from tilewise.strategy import propagate

WORK = (
    (templates, "trace_layer"),
    (gradients, "differentiate_template"),
    (propagate, "lay_out_template"),
    (variants, "lower_variant"),
)


def plan_of(axes, accumulation):
    """A small Gemma's plan: two kinds of layers."""
    builder = GraphBuilder("gemma")
    build_training_graph(builder, GEMMA, 8, 32, "bf16")
    return plan_graph(with_update(builder), axes, accumulation)


def sent(thing):
    """A pickled copy."""
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "accumulation"), [({}, 1), ({"dp": 2, "tp": 2}, 1), ({"dp": 2}, 4)])
def test_work_on_pickled_arguments_gives_the_same_plan(monkeypatch, axes, accumulation):
    """Tracing, gradients, layouts and lowering, each on copies of its arguments."""
    plan, calls = plan_of(axes, accumulation), []
    for module, name in WORK:
        work = getattr(module, name)

        def on_copies(*args, work=work, name=name):
            calls.append(name)
            return sent(work(*(sent(g) for g in args)))

        monkeypatch.setattr(module, name, on_copies)
    again = plan_of(axes, accumulation)
    alone = {"lay_out_template"} if not axes and accumulation == 1 else set()  # there is nothing to lay out
    assert {*calls} == {name for _, name in WORK} - alone
    assert again.digest() == plan.digest()


def test_exchanged_device_numbers_are_detected(monkeypatch):
    """The twin: with a variant's device numbers exchanged, planning fails."""
    take = variants.DeviceNumbers.take
    monkeypatch.setattr(
        variants.DeviceNumbers,
        "take",
        lambda self, table: tuple(places[::-1] for places in take(self, table)),
    )
    with pytest.raises(InternalError):
        plan_of({"dp": 2, "tp": 2}, 1)


def test_layer_is_pickled_by_name():
    """Another process finds it in its module; one inside a function is rejected."""

    @tw.layer
    def inner(graph, x):
        return x

    from tilewise.models.decoder.model import decoder_layer

    assert sent(decoder_layer) is decoder_layer
    with pytest.raises((pickle.PicklingError, AttributeError)):
        sent(inner)
