"""Lowered templates: equal from workers and from this process, and the values that they read and write."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))  # also for workers, which get this path
import layers_of_tests as own

from pure.plans import plan_graph, with_update
from tilewise.core.errors import InternalError, LayoutError, ResourceError
from tilewise.graph import gradients
from tilewise.plan import make
from tilewise.plan.lower import variants
from tilewise.plan.prove import prove_plan
from tilewise.processes.workers import WorkerPool


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def digest():
    """The digest of the plan that this process makes alone."""
    return plan(None).digest()


def plan(pool, axes=None, accumulation=1, layers=17, recompute="none"):
    """A plan of layers of which no two are alike, without native code."""
    builder = own.start()
    x = builder.find("x")
    for i in range(layers):
        x = own.block(builder, x, path=f"layers.{i}", width=8 + 8 * i)
    builder.loss(builder.mean(x))
    graph = with_update(builder, recompute=recompute, pool=pool)
    return plan_graph(graph, axes or {}, accumulation, pool=pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"recompute": ["layers.1*", "layers.*/rms_norm"]}, {"axes": {"dp": 2}, "accumulation": 2}],
    ids=str,
)
def test_workers_make_the_same_plan(pool, options):
    """Workers differentiate and lower, on one device and on several, whose device numbers are assigned here."""
    assert plan(pool, **options).digest() == plan(None, **options).digest()


@pytest.mark.parametrize("planted", [gradients._differentiate_in_worker, variants._lower_in_worker])
def test_wrong_result_of_a_worker_is_detected(pool, digest, monkeypatch, planted):
    """The planted fault: two results in exchanged places."""
    compute = WorkerPool.map

    def spoil(self, function, calls):
        results = [*compute(self, function, calls)]
        if function is planted:
            results[3], results[4] = results[4], results[3]
        return iter(results)

    monkeypatch.setattr(WorkerPool, "map", spoil)
    try:
        made = plan(pool).digest()
    except Exception:  # a check of the plan may find it first
        return
    assert made != digest


def test_errors_equal_those_of_one_process(pool, digest, monkeypatch):
    """Of a template that cannot be lowered, and of a worker that dies; the pool remains usable."""
    words = []
    for used in (None, pool):
        with pytest.raises(LayoutError) as caught:
            plan(used, {"dp": 3})
        words.append(str(caught.value))
    assert words[0] == words[1]
    with monkeypatch.context() as patch:
        patch.setattr(variants, "_lower_in_worker", own.die)
        with pytest.raises(ResourceError, match="got the end of one in a call of die"):
            plan(pool)
    assert plan(pool).digest() == digest


@pytest.mark.parametrize("spoil", ["makes", "needs"])
def test_values_come_from_the_lowering(monkeypatch, spoil):
    """The twin has other values, which are rejected where they contradict the calls."""
    prove_plan(plan(None, layers=3))  # reads all instructions again

    def wrong(template, layout):
        values = right(template, layout)
        if spoil == "makes":
            return values._replace(makes=frozenset())
        return values._replace(needs=values.needs | values.makes)

    right = variants.values_of
    monkeypatch.setattr(variants, "values_of", wrong)
    with pytest.raises(InternalError, match="a value must be written before it is read"):
        plan(None, layers=3)


@pytest.mark.parametrize(("axes", "accumulation"), [({}, 1), ({}, 4), ({"dp": 2}, 1)])
def test_values_of_all_instructions(monkeypatch, axes, accumulation):
    """The values that a lowering found are those of the plan's templates, in every class."""
    proven, prove = [], make.prove_plan

    def note(plan, values):
        proven.append(values)
        prove(plan, values)

    monkeypatch.setattr(make, "prove_plan", note)
    made = plan(None, axes, accumulation, layers=3)
    (values,) = proven
    assert len(values) == len(made.layouts)
    for number, by_class in values.items():
        of_plan = [of.templates[number] for of in made.program.classes]
        assert [variants.values_of(t, made.layouts[number]) for t in of_plan] == [*by_class]
