"""Plans whose templates other processes worked on are the plans made here, to the digest."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))  # also for workers, which get this path
import layers_of_tests as own

from tilewise.core.errors import InternalError
from tilewise.core.mesh import DeviceMesh
from tilewise.core.workers import Shared, WorkerPool
from tilewise.graph import GraphBuilder, Recomputation, differentiate, simplify
from tilewise.ir.batch import cut_batch
from tilewise.optim import AdamW
from tilewise.plan import make, make_plan, settings_for, variants
from tilewise.plan.lower import variant
from tilewise.plan.validate import validate_plan
from tilewise.strategy import DistributionStrategy, one_stage, propagate_layouts


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as pool:
        yield pool


def plan(pool, axes=None, accumulation=1, layers=20, recompute="none"):
    """A plan of layers of which no two are alike, without native code."""
    builder = own.start()
    x = builder.find("x")
    for i in range(layers):
        x = own.block(builder, x, path=f"layers.{i}", width=8 + 8 * i)
    builder.loss(builder.mean(x))
    graph, gradients = differentiate(
        simplify(builder.freeze()), builder.draft.loss_id, pool, Recomputation.of(recompute)
    )
    thawed = GraphBuilder.thaw(graph)
    AdamW().add_to(thawed, gradients)
    graph, mesh = thawed.freeze(), DeviceMesh(axes or {})
    batch = cut_batch(graph, accumulation)
    layout = propagate_layouts(graph, mesh, DistributionStrategy.for_mesh(mesh), batch)
    return make_plan(graph, layout, settings_for(graph, layout, batch, 1), one_stage, pool=pool)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "accumulation"), [({}, 1), ({}, 4), ({"dp": 2}, 1)])
def test_the_same_plan(pool, axes, accumulation):
    """On one device and on several, whose numbers are put together here."""
    expected = plan(None, axes, accumulation)
    assert plan(pool, axes, accumulation).digest() == expected.digest()


@pytest.mark.parametrize("recompute", ["full", ["layers.1*", "layers.*/rms_norm"]], ids=str)
@pytest.mark.slow
def test_the_same_plan_of_layers_that_run_again(pool, recompute):
    """What is computed again is decided there as here."""
    expected = plan(None, recompute=recompute).digest()
    assert plan(pool, recompute=recompute).digest() == expected != plan(None).digest()


def test_a_planted_fault_is_found(pool, monkeypatch):
    """The twin: what a worker answers reaches the plan."""
    finish = Shared.finish

    def spoil(self):
        found = finish(self)
        if self.function is variants.lower_apart:
            found[3], found[4] = found[4], found[3]
        return found

    monkeypatch.setattr(Shared, "finish", spoil)
    try:
        digest = plan(pool).digest()
    except Exception:  # the proofs may refuse it first
        return
    assert digest != plan(None).digest()


@pytest.mark.parametrize("spoil", ["makes", "needs"])
def test_values_are_believed_of_the_lowering_alone(monkeypatch, spoil):
    """What a template reads and writes comes with its lowering; the twin says something else, which is refused where it
    contradicts the calls."""
    made = plan(None)
    validate_plan(made)  # reads all instructions again

    def wrong(template, layout):
        values = right(template, layout)
        if spoil == "makes":
            return values._replace(makes=frozenset())
        return values._replace(needs=values.needs | values.makes)

    right = variant.values_of
    monkeypatch.setattr(variant, "values_of", wrong)
    with pytest.raises(InternalError, match="a value is written before it is read"):
        plan(None)


@pytest.mark.parametrize(("axes", "accumulation"), [({}, 1), ({}, 4), ({"dp": 2}, 1)])
def test_values_are_those_of_all_instructions(monkeypatch, axes, accumulation):
    """A template that other devices have a part in has none of its own."""
    asked, check = [], make.validate_plan

    def note(plan, values):
        asked.append(values)
        check(plan, values)

    monkeypatch.setattr(make, "validate_plan", note)
    made = plan(None, axes, accumulation, layers=3)
    assert bool(asked[0]) is (not axes)
    for number, values in asked[0].items():
        template = made.program.classes[0].templates[number]
        assert variant.values_of(template, made.layouts[number]) == values
