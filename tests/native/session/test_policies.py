"""Execution policies: they change no bit, pinned tasks run where they were asked to, plans keep them."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise import ExecutionPolicy, TaskExecutionHints
from tilewise.core.errors import PlanError
from tilewise.nn import linear
from tilewise.observe import write_perfetto
from tilewise.plan.policy import PolicyRules, names_of_op

INNER = tw.DimLabel("mlp")
WORKERS = 2
MESHES = ({"dp": 1}, {"dp": 2})
CORES = sorted(os.sched_getaffinity(0))
X = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
PATTERNS = ("layers.0", "layers.1", "layers.*", "block", "linear:up", "linear:*", "linear_dw:*", "sum", "*")


@tw.layer
def block(graph, x):
    """Two products with an activation between them."""
    up = linear(graph, x, "up", 64, out_label=INNER)
    return linear(graph, graph.silu(up), "down", 32, in_label=INNER)


def make_graph():
    """Two layers, a loss and an optimizer."""
    graph = tw.ComputeGraph("two_blocks", k_splits=4)
    x = graph.input([8, 32], "f32", name="x", labels=[tw.BATCH, None])
    for number in range(2):
        x = block(graph, x, path=f"layers.{number}")
    graph.output(x, "y")
    graph.loss(graph.mean(graph.silu(x)))
    graph.optimize(tw.optim.SGD())
    return graph


GRAPH = make_graph()


def train(mesh, policy=None, **options):
    """The plan, the bytes of all weights after two steps, and the tasks of the second."""
    plan = GRAPH.plan(mesh, policy=policy, workers_per_device=WORKERS, batch_splits=8, **options)
    with GRAPH.instantiate(plan) as model:
        model.initialize(0)
        model.step({"x": X}, 0.5)
        model.trace(True)
        model.step({"x": X}, 0.5)
        names = [t.spec.name for t in plan.graph.of_kind("parameter")]
        return plan, b"".join(model.get_tensor(n).tobytes() for n in names), model.timeline().tasks


@pytest.fixture(scope="module")
def expected():
    """Per number of devices, the weights without a policy."""
    return {tuple(mesh.items()): train(mesh)[1] for mesh in (*MESHES, {"dp": 4})}


WORKER = st.integers(0, WORKERS - 1)
SEVERAL = st.one_of(WORKER, st.lists(WORKER, min_size=1, max_size=5).map(tuple))
PRIORITY = st.integers(-3, 5)
HINTS = st.builds(
    TaskExecutionHints, target_worker=st.none() | WORKER, priority=st.integers(1, 5) | st.integers(-5, -1)
)


@st.composite
def policies(draw):
    """Any policy for the model. An entry for `*` is one for all ops, so it hides others."""
    names = draw(st.lists(st.sampled_from(PATTERNS), unique=True, max_size=4))
    pinned = names[: draw(st.integers(0, len(names)))]
    placement = draw(st.sampled_from(("auto", "owner_computes", "affinity", *["explicit"] * bool(pinned))))
    return ExecutionPolicy(
        placement,
        preferred_workers=draw(st.lists(WORKER, max_size=2).map(tuple)),
        workers={name: draw(SEVERAL) for name in pinned},
        hints={name: draw(HINTS) for name in names[len(pinned) :]},
        base_priority=draw(PRIORITY),
        prefetch=draw(st.booleans()),
        bind_to_cores=draw(st.booleans()),
        enable_offloading=draw(st.booleans()),
        device_memory_bytes=draw(st.sampled_from((0, 1 << 20))),
    )


def check_bits(expected, mesh, policy, accumulation):
    """The weights are those without a policy, and pinned tasks are on their workers."""
    can_bind = len(CORES) >= WORKERS * mesh["dp"]
    policy = replace(policy, bind_to_cores=policy.bind_to_cores and can_bind)
    _, weights, tasks = train(mesh, policy, accumulation=accumulation)
    assert weights == expected[tuple(mesh.items())]
    assert all(task.pinned_worker in (None, task.worker) for task in tasks)
    if policy.workers:
        assert any(task.pinned_worker is not None for task in tasks)


CASE = {"mesh": st.sampled_from(MESHES), "policy": policies(), "accumulation": st.sampled_from((1, 2))}


@settings(max_examples=15, deadline=None)
@given(**CASE)
def test_no_policy_changes_a_bit(expected, mesh, policy, accumulation):
    """15 random policies on one and two devices; all pinned tasks run on the workers of their pins."""
    check_bits(expected, mesh, policy, accumulation)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(**CASE)
def test_no_policy_changes_a_bit_slow(expected, mesh, policy, accumulation):
    """200 more."""
    check_bits(expected, mesh, policy, accumulation)


@pytest.mark.soak
@settings(max_examples=5000, deadline=None)
@given(**CASE)
def test_no_policy_changes_a_bit_soak(expected, mesh, policy, accumulation):
    """The same for many more policies."""
    check_bits(expected, mesh, policy, accumulation)


def test_a_policy_that_changes_the_order_of_addition_is_detected(expected, monkeypatch):
    """Planted fault: applying the policy exchanges two operands of a tree."""
    hinted = PolicyRules.hinted

    def swapped(rules, template):
        template = hinted(rules, template)
        if not rules.entries:
            return template
        wrong = [
            replace(i, operands=(*i.operands[:3], i.operands[4], i.operands[3], *i.operands[5:]))
            if i.kernel.startswith("tree_add")
            else i
            for i in template.instructions
        ]
        return replace(template, instructions=tuple(wrong))

    policy = ExecutionPolicy(workers={"linear_dw:*": 1})
    assert train({"dp": 4}, policy)[1] == expected[("dp", 4),]
    monkeypatch.setattr(PolicyRules, "hinted", swapped)
    assert train({"dp": 4}, policy)[1] != expected[("dp", 4),]


def workers_by_op(tasks):
    """The workers that ran each op."""
    ran = {}
    for task in tasks:
        ran.setdefault(names_of_op(task.kernel)[1], set()).add(task.worker)
    return ran


def test_an_op_stands_before_a_layer_and_a_layer_before_a_template():
    """Of all entries that match a task, the most specific pins it."""
    entries = {"block": 0, "layers.1": 1, "linear:down": (0, 1)}
    plan, _, tasks = train({"dp": 1}, ExecutionPolicy("explicit", workers=entries))
    pinned = {}
    for task in tasks:
        pinned.setdefault(task.kernel, set()).add(task.pinned_worker)
    assert (
        pinned["linear:up"] == {0, 1} == pinned["linear_dw:up"]
    )  # layer 0 by its template, layer 1 by its label
    assert pinned["sum"] == {None}
    down = {(task.row, task.worker) for task in tasks if task.kernel == "linear:down"}
    assert down == {(row, row // 4) for row in range(8)}  # task i of n on workers[i * 2 // n]
    context = plan.context()
    assert context.num_tiles("y") == 8
    assert [context.get_tile_worker("y", tile) for tile in range(8)] == [0] * 4 + [1] * 4
    assert context.get_hints("y", 7) == TaskExecutionHints(target_worker=1, prefetch_inputs=True)
    assert context.get_tile_worker("layers.0.up", 0) is None  # its update has no entry


def test_exact_names_stand_before_patterns_and_long_patterns_before_short_ones():
    """And priorities come from another entry if the first states only workers."""
    policy = ExecutionPolicy(
        workers={"*": 0, "linear:*": 1, "linear:up": 0},
        hints={"linear:u*": TaskExecutionHints(priority=4), "linear*": TaskExecutionHints(priority=2)},
    )
    _, _, tasks = train({"dp": 1}, policy)
    seen = {(task.kernel, task.worker, task.priority) for task in tasks if task.kernel.startswith("linear:")}
    assert seen == {("linear:up", 0, 4), ("linear:down", 1, 2)}


def test_context_answers_for_devices_and_names():
    """Tiles are numbered by device; a sharded input has its rows on both."""
    plan, _, _ = train({"dp": 2}, ExecutionPolicy("affinity"))
    context = tw.ExecutionContext(plan)
    assert (context.mpi_rank, context.mpi_size) == (0, 1)
    assert context.exec_policy.placement == "affinity" and context.dist_strategy is not None
    assert [context.get_tile_node("x", tile) for tile in range(8)] == [0] * 4 + [1] * 4
    assert [context.get_tile_worker("y", tile) for tile in range(8)] == [0, 0, 1, 1] * 2
    assert context.get_hints("y", 0).target_worker is None  # a preference is no pin
    assert context.num_tiles("layers.0.up") == 1 and context.get_tile_node("layers.0.up", 0) == 0
    for wrong in (lambda: context.num_tiles("z"), lambda: context.get_tile_node("x", 8)):
        with pytest.raises(PlanError, match=r"\[session.context\]"):
            wrong()
    with pytest.raises(PlanError, match=r"\[session.context\].*graph.plan"):
        tw.ExecutionContext(3)


def test_explain_why_and_traces_show_a_policy(tmp_path):
    """What a policy changed, which entry did it, and where."""
    policy = ExecutionPolicy("explicit", workers={"layers.0": 0, "linear:down": 1}, base_priority=1)
    plan, _, tasks = train({"dp": 2}, policy)
    text = plan.explain()
    assert "policy: placement explicit, base priority 1" in text
    assert "'layers.0': worker 0, for layer layers.0" in text and "tasks pinned to worker 1" in text
    assert "worker 0, by the policy's entry 'layers.0', on device 0, 1" in plan.why("layers.0")
    assert "worker 1, by the policy's entry 'linear:down'" in plan.why("linear:down")
    assert "linear:up in layers.0: worker 0, by the policy's entry 'layers.0'" in plan.why("x")
    assert "linear:down in layers.1: worker 1" in plan.why("y")
    assert "any worker of the device (explicit)" in plan.why("layers.1")
    assert "The strategy shards these labels by dp" in plan.why("x") and "Devices 0, 1 have" in plan.why("x")
    with pytest.raises(PlanError, match=r"did you mean 'layers.0'"):
        plan.why("layer.0")
    plan.save_picture(tmp_path / "plan.html")
    assert "layers.0 (worker 0)" in (tmp_path / "plan.html").read_text()
    write_perfetto(tmp_path / "trace.json", tw.observe.Trace(tasks, (), WORKERS))
    assert '"pinned to worker": 1' in (tmp_path / "trace.json").read_text()
    assert "policy" not in GRAPH.plan({"dp": 2}, workers_per_device=WORKERS).explain()


def test_saved_plans_keep_policies(tmp_path):
    """With what was decided here: `auto` and offloading are not decided again."""
    for policy in (
        ExecutionPolicy(
            "auto",
            preferred_workers=(1,),
            workers={"layers.1": (1, 0)},
            hints={"linear:*": TaskExecutionHints(priority=2)},
            base_priority=-1,
            prefetch=False,
            cores=(0,),
        ),
        ExecutionPolicy(enable_offloading=True, device_memory_bytes=1 << 20, numa_node=0),
    ):
        graph = wide_graph()
        if policy.workers:
            policy = replace(policy, workers={"linear:0": (1, 0)})
        plan = graph.plan(policy=policy, workers_per_device=2)
        plan.save(tmp_path / "plan")
        loaded = tw.Plan.load(tmp_path / "plan")
        assert loaded.digest() == plan.digest()
        assert loaded.settings.policy == plan.settings.policy
        assert plan.settings.policy.placement != "auto" and bool(plan.file_bytes) is policy.enable_offloading


def wide_graph():
    """Weights that are large enough to be offloaded."""
    graph = tw.ComputeGraph("wide")
    x = graph.input([8, 128], "f32", name="x", labels=[tw.BATCH, None])
    for number in range(2):
        x = graph.silu(linear(graph, x, f"{number}", 128))
    graph.loss(graph.mean(x))
    graph.optimize(tw.optim.AdamW())
    return graph


def test_auto_is_affinity_where_parameters_fit_the_private_caches(monkeypatch):
    """The rule, with the size of the caches given."""
    graph = wide_graph()
    num_bytes = 2 * 128 * 128 * 4
    for room, workers, placement in (
        (num_bytes // 2, 2, "affinity"),
        (num_bytes // 2 - 1, 2, "owner_computes"),
        (num_bytes, 1, "owner_computes"),
    ):
        monkeypatch.setattr("tilewise.plan.settings.private_cache_bytes", lambda room=room: room)
        plan = graph.plan(policy=ExecutionPolicy("auto"), workers_per_device=workers)
        assert plan.settings.policy.placement == placement
        assert f"placement auto became {placement}" in plan.explain()


def test_offloading_stops_at_the_threshold():
    """Optimizer states first, then parameters; what was decided is said."""
    graph = wide_graph()

    def plan_for(**options):
        return graph.plan(policy=ExecutionPolicy(enable_offloading=True, **options), workers_per_device=1)

    need = graph.plan(workers_per_device=1).estimate_memory_usage()[0]["total"]
    assert not plan_for(device_memory_bytes=need, offload_threshold=1.0).file_bytes
    some = plan_for(device_memory_bytes=need - 1, offload_threshold=1.0)
    assert some.inputs.request.options.offloaded == {"optimizer"}
    assert "decided: offloaded optimizer: without it a device needs" in some.explain()
    everything = plan_for(device_memory_bytes=1 << 20)  # no graph fits
    assert {"optimizer", "parameters"} <= everything.inputs.request.options.offloaded
    assert "more than 80% of 1.00 MiB" in everything.explain()


def test_without_prefetch_weights_are_gathered_just_before_their_layer():
    """The call that gathers a layer's weights directly precedes the layer."""
    graph = make_graph()
    graph.set_distribution(tw.DistributionStrategy.fsdp(world_size=2))
    order = {}
    for prefetch in (True, False):
        graph.set_execution_policy(ExecutionPolicy(prefetch=prefetch))
        plan = graph.plan()
        order[prefetch] = [op.label for op in plan.graph.ops if op.phase == "forward" and op.op == "call"]
    layers = [n for n, label in enumerate(order[False]) if label.startswith("layers.")]
    assert len(layers) == 2 and layers[1] - layers[0] == 2
    assert order[True] != order[False] and sorted(order[True]) == sorted(order[False])


def test_workers_are_bound_to_cores():
    """Each worker's thread may use only its core."""
    policy = ExecutionPolicy(cores=CORES[:1])
    with GRAPH.instantiate(GRAPH.plan(policy=policy, workers_per_device=1)) as model:
        model.initialize(0)
        model.step({"x": X}, 0.5)  # a worker that has run a task is bound
        threads = [t for t in os.listdir("/proc/self/task") if name_of(t) == "tw-d0-w0"]
        assert CORES[:1] in [sorted(os.sched_getaffinity(int(thread))) for thread in threads]


def name_of(thread):
    """The name of a thread, or nothing if it has ended."""
    try:
        with open(f"/proc/self/task/{thread}/comm", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


UNFIT = {
    "too few": ({"cores": CORES[:1]}, 2, "every worker must have a core; got 1 cores for 2 workers"),
    "no such core": ({"cores": (60_000,)}, 1, "a core must be one that this process may use"),
    "no such node": ({"numa_node": 60_000}, 1, "numa_node must be a node with cores"),
}


@pytest.mark.parametrize(("fields", "workers", "message"), UNFIT.values(), ids=UNFIT)
def test_cores_that_do_not_exist_are_rejected(fields, workers, message):
    """When the plan is instantiated, because another machine may run it."""
    plan = GRAPH.plan(policy=ExecutionPolicy(**fields), workers_per_device=workers)
    with pytest.raises(PlanError, match=message):
        GRAPH.instantiate(plan)


def test_policies_that_do_not_fit_the_graph_are_rejected():
    """A pattern that matches nothing, a worker that a device does not have, and no policy at all."""
    with pytest.raises(PlanError, match=r"must match a layer.*'layers.7', .*did you mean 'layers.[01]'"):
        GRAPH.plan(policy=ExecutionPolicy(workers={"layers.7": 0}))
    for policy in (
        ExecutionPolicy(workers={"layers.0": 2}),
        ExecutionPolicy(preferred_workers=(0, 2)),
        ExecutionPolicy(hints={"layers.0": TaskExecutionHints(target_worker=2)}),
    ):
        with pytest.raises(PlanError, match="must be one of a device's 2; got worker 2"):
            GRAPH.plan(policy=policy, workers_per_device=2)
    with pytest.raises(PlanError, match="policy must be a ExecutionPolicy"):
        GRAPH.plan(policy="affinity")
    with pytest.raises(PlanError, match="a policy must be a ExecutionPolicy"):
        make_graph().set_execution_policy("affinity")
