"""Plans whose templates other processes lower before the graph is complete are the plans made here, to the digest."""

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "pure" / "graph"))  # also for workers, which get this path
import layers_of_tests as own

import tilewise as tw
from tilewise.core.errors import ConfigError, PlanError, ResourceError
from tilewise.plan import LoweredAhead, make
from tilewise.plan.calls import Calls
from tilewise.plan.lower import ahead
from tilewise.plan.shapes import PlanSettings
from tilewise.session import foresee


@pytest.fixture(scope="module")
def pool():
    with tw.WorkerPool(2) as pool:
        yield pool


@pytest.fixture
def taken(monkeypatch):
    """How many templates each plan has found lowered."""
    found, take = [], LoweredAhead.take

    def count(self):
        found.append(0)
        for variant in take(self):
            found[-1] += variant is not None
            yield variant

    monkeypatch.setattr(LoweredAhead, "take", count)
    return found


def graph_of(layers=12, optimizer=None, rows=4):
    """Layers of which no two are alike."""
    graph = tw.ComputeGraph("apart")
    x = graph.input([rows, own.WIDTH], name="x", labels=[tw.BATCH, None])
    for i in range(layers):
        x = own.block(graph, x, path=f"layers.{i}", width=8 + 8 * i)
    graph.loss(graph.mean(x))
    graph.optimize(optimizer or tw.optim.AdamW())
    return graph


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": "full"}, {"recompute": ["layers.1*"]}, {"batch_splits": 2}, {"checkpoints": True}],
    ids=str,
)
def test_the_same_plan(pool, taken, options):
    """Every layer and every gradient is lowered ahead."""
    graph = graph_of()
    before = graph.digest()
    expected = graph.plan({}, **options).digest()
    assert graph.plan({}, pool=pool, **options).digest() == expected
    assert taken == [24] and graph.digest() == before


def test_any_number_of_workers(taken):
    """One process alone, and more of them than cores."""
    expected = graph_of().plan({}).digest()
    for count in (1, 4):
        with tw.WorkerPool(count) as pool:
            assert graph_of().plan({}, pool=pool).digest() == expected
    assert taken == [24, 24]


@pytest.mark.parametrize("options", [{"mesh": {"dp": 2}}, {"accumulation": 2}], ids=str)
def test_what_is_not_foreseen_is_lowered_in_its_turn(pool, taken, options):
    """Layouts of several devices, and sums over microbatches, are known when the graph is complete."""
    graph = graph_of(rows=8)
    assert graph.plan(pool=pool, **options).digest() == graph.plan(**options).digest()
    assert not taken


def test_layers_that_are_used_twice(pool, taken):
    """One template for several uses, and layers of another form between them."""

    def shared():
        graph = tw.ComputeGraph("shared")
        x = graph.input([4, own.WIDTH], name="x", labels=[tw.BATCH, None])
        for i in range(24):
            x = own.block(graph, x, path=f"layers.{i}", width=8 + 8 * (i % 9), power=1 + i % 2)
        graph.loss(graph.mean(x))
        graph.optimize(tw.optim.Lion())
        return graph

    assert shared().plan({}, pool=pool).digest() == shared().plan({}).digest()
    assert len(taken) == 1 and taken[0] >= 16


def test_a_planted_fault_is_found(pool, monkeypatch):
    """The twin: what was lowered ahead reaches the plan."""
    take = LoweredAhead.take

    def spoil(self):
        found = [*take(self)]
        found[3], found[4] = found[4], found[3]
        return iter(found)

    expected = graph_of().plan({}).digest()
    monkeypatch.setattr(LoweredAhead, "take", spoil)
    try:
        digest = graph_of().plan({}, pool=pool).digest()
    except Exception:  # the proofs may refuse it first
        return
    assert digest != expected


def test_wrong_foresight_costs_time_alone(pool, taken, monkeypatch):
    """What was lowered for other settings is given up, and the pool works on."""
    expected, right = graph_of().plan({}).digest(), foresee.settings_for

    def wrong(*given):
        return PlanSettings(row_tile=2, workers_per_device=right(*given).workers_per_device)

    with monkeypatch.context() as patch:
        patch.setattr(foresee, "settings_for", wrong)
        assert graph_of().plan({}, pool=pool).digest() == expected
    assert not taken
    assert graph_of().plan({}, pool=pool).digest() == expected
    assert taken == [24]


def test_what_others_could_not_lower_is_lowered_here(pool, taken, monkeypatch):
    """In its turn, so that its error is that of one process."""
    expected = graph_of().plan({}).digest()
    monkeypatch.setattr(ahead, "_lower_or_leave", own.leave_it)
    assert graph_of().plan({}, pool=pool).digest() == expected
    assert taken == [0]


def test_a_dead_worker_is_one_error(pool, monkeypatch):
    """Nothing of the plan is left, and the graph is as it was."""
    graph = graph_of()
    before, expected = graph.digest(), graph.plan({}).digest()
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "_lower_or_leave", own.die_elsewhere)
        patch.setitem(os.environ, "OWNER_OF_TEST", str(os.getpid()))
        pool._end()  # workers have the environment that they are started with
        with pytest.raises(
            ResourceError, match=r"the end of process \d+ \(exit status 3\) in a call of die_elsewhere"
        ):
            graph.plan({}, pool=pool)
    assert graph.digest() == before and graph.plan({}, pool=pool).digest() == expected


@pytest.mark.parametrize(
    ("optimizer", "options", "error"),
    [
        (tw.optim.AdamW(groups=(tw.optim.ParameterGroup("nothing*"),)), {}, ConfigError),
        (None, {"batch_splits": 3}, PlanError),
        (None, {"workers_per_device": 0}, PlanError),
    ],
    ids=["group", "batch_splits", "workers"],
)
def test_errors_are_those_of_one_process(pool, optimizer, options, error):
    """The same words, whatever was begun; the pool works on."""
    words = []
    for used in (None, pool):
        with pytest.raises(error) as caught:
            graph_of(optimizer=optimizer).plan({}, pool=used, **options)
        words.append(str(caught.value))
    assert words[0] == words[1]
    assert graph_of().plan({}, pool=pool).digest() == graph_of().plan({}).digest()


def bound_late(order):
    """`lower_variants` that tells of uses when all is lowered, in some order."""
    lower_all = make.lower_variants

    def lower(*given):
        *others, on_use = given
        uses = []
        variants = lower_all(*others, lambda use, variant: uses.append((use, variant)))
        for use, variant in order(uses):
            on_use(use, variant)
        return variants

    return lower


def test_uses_are_bound_as_if_all_were_lowered(pool, monkeypatch):
    """While others lower, or behind all of them: the same entries, in the same order."""
    expected = graph_of().plan({}, pool=pool).digest()
    with monkeypatch.context() as patch:
        patch.setattr(make, "lower_variants", bound_late(list))
        assert graph_of().plan({}, pool=pool).digest() == expected
        assert graph_of().plan({}).digest() == expected


def test_uses_bound_in_another_order_are_found(pool, monkeypatch):
    """The twin: two of them exchanged."""
    expected = graph_of().plan({}, pool=pool).digest()
    monkeypatch.setattr(
        make, "lower_variants", bound_late(lambda uses: [uses[0], uses[2], uses[1], *uses[3:]])
    )
    try:
        digest = graph_of().plan({}, pool=pool).digest()
    except Exception:  # the proofs may refuse it first
        return
    assert digest != expected


def test_an_error_while_others_lower_leaves_a_pool_that_works(pool, monkeypatch):
    """What was begun is given up, and the error is the plan's own."""
    expected = graph_of().plan({}, pool=pool).digest()

    def fail(self, use, variant):
        raise PlanError(f"no {variant.number}")

    with monkeypatch.context() as patch:
        patch.setattr(Calls, "take", fail)
        with pytest.raises(PlanError, match="no 0"):
            graph_of().plan({}, pool=pool)
    assert graph_of().plan({}, pool=pool).digest() == expected


def test_workers_keep_nothing_behind_a_plan(pool):
    """Of graphs that they made or were sent; this process knows of none either."""
    graph_of().plan({}, pool=pool)
    assert all(not link.far._known for link in pool._links)
    with pool.begin(own.kept_here, [()] * 2) as shared:
        while any(shared._turns._lists.values()):
            time.sleep(0.001)  # the other takes both
        assert shared.finish() == [0, 0]
