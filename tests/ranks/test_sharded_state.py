"""State cut over devices: equal to one device, with traffic and memory as planned."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest
from small_llama import (
    batches,
    change_every,
    change_first,
    config,
    drop_partial,
    swap_partials,
    training_graph,
)

import tilewise as tw
from pure.pairwise import Case, pairwise_cases
from tilewise import models
from tilewise.core.errors import LayoutError, PlanError
from tilewise.core.mesh import DeviceMesh
from tilewise.models import llama
from tilewise.nn import linear
from tilewise.session import verify_strategy
from tilewise.strategy import DistributionStrategy, StateSharding

STEPS, SEQ, MAX_DEVICES = 4, 16, 12
CHOICES = {
    "mesh": [  # dp, fsdp, tp
        (1, 2, 1),
        (1, 3, 1),
        (1, 4, 1),
        (1, 5, 1),
        (1, 6, 1),
        (2, 2, 1),
        (3, 2, 1),
        (2, 3, 1),
        (1, 2, 2),
        (1, 3, 2),
        (2, 2, 2),
        (1, 2, 4),
    ],
    "microbatches": [1, 2, 3, 4],
    "reduce": ["microbatch", "step"],
    "reshard": [True, False],
    "prefetch": [0, 1, 3],
    "workers": [1, 2],
    "dtype": ["f32", "bf16"],
    "tied": [True, False],
    "recompute": ["none", "full", "selective"],
    "offload": ["none", "optimizer", "parameters", "activations"],
}


@pytest.fixture(autouse=True)
def small_transfers(monkeypatch):
    """Offload tensors as small as here to files too."""
    monkeypatch.setattr("tilewise.strategy.offload._LEAST_BYTES", 256)


def model_of(tied: bool = False, **changes: object) -> llama.LlamaConfig:
    """Weights of two panels of 32 rows and more: some are cut over two devices, some over six."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 448, "head_dim": 16}
    return config(**{**sizes, "tie_word_embeddings": tied, **changes})


def graph_of(model: llama.LlamaConfig, batch: int, dtype: str = "f32") -> tw.ComputeGraph:
    return training_graph(model, dtype, batch, SEQ)


def mesh_of(case: Case) -> DeviceMesh:
    return DeviceMesh(dict(zip(("dp", "fsdp", "tp"), case[0])))  # type: ignore[arg-type]


def is_small(case: Case) -> bool:
    """Whether a case is limited to few threads on small machines."""
    devices = mesh_of(case).num_devices
    return devices * case[5] <= MAX_DEVICES and devices * case[1] <= 3 * MAX_DEVICES  # type: ignore[operator]


def compare(case: Case, change=lambda plan: plan, model=model_of) -> tuple[bool, str]:  # type: ignore[no-untyped-def]
    _, microbatches, reduce, reshard, prefetch, workers, dtype, tied, recompute, offload = case
    mesh = mesh_of(case)
    shared = mesh.size("dp", "fsdp") * microbatches  # type: ignore[operator]
    batch_splits = shared * (2 if shared <= 4 else 1)
    model = model(bool(tied))

    def with_workers(plan: tw.Plan) -> tw.Plan:
        return change(replace(plan, settings=replace(plan.settings, workers_per_device=workers)))  # type: ignore[arg-type]

    report = verify_strategy(
        graph_of(model, batch_splits, str(dtype)),
        mesh,
        batches(model, STEPS, batch_splits, SEQ),
        strategy=DistributionStrategy.for_mesh(
            mesh,
            StateSharding(("fsdp",), bool(reshard), prefetch, reduce),  # type: ignore[arg-type]
        ),
        batch_splits=batch_splits,
        accumulation=microbatches,  # type: ignore[arg-type]
        recompute=str(recompute),
        offload=str(offload),
        change=with_workers,
    )
    return report.equal, report.text


@cache
def pairwise() -> list[Case]:
    return pairwise_cases(CHOICES, is_small)


def named(case: Case) -> str:
    mesh, microbatches, reduce, reshard, prefetch, workers, dtype, tied, recompute, offload = case
    words = f"{'x'.join(map(str, mesh))}-m{microbatches}-{reduce}-p{prefetch}-w{workers}-{dtype}"  # type: ignore[call-overload]
    return f"{words}-{recompute}-{offload}" + ("-reshard" if reshard else "") + ("-tied" if tied else "")


@pytest.mark.parametrize("case", pairwise()[:6], ids=named)
def test_best_cases_equal_one_device(case):
    """Six cases hold about half of all pairs."""
    equal, text = compare(case)
    assert equal, text


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise()[6:], ids=named)
def test_all_pairs_equal_one_device(case):
    """With the everyday ones, every pair of values."""
    equal, text = compare(case)
    assert equal, text


@pytest.mark.soak
def test_whole_product_equals_one_device():
    """Every combination of all settings except offloading, which alternates."""
    compared = 0
    *others, offloads = CHOICES.values()
    for number, combination in enumerate(product(*others)):
        case = (*combination, offloads[number * 7 // 5 % len(offloads)])
        if is_small(case):
            equal, text = compare(case)
            assert equal, f"{named(case)}: {text}"
            compared += 1
    print(f"{compared} combinations")
    assert compared > 1000


def shift(instruction):
    """Another tile of a storage shard is copied."""
    operands = list(instruction.operands)
    source = next(i for i, o in enumerate(operands) if o.group >= 0)
    operands[source] = operands[source]._replace(member=0)
    return replace(instruction, operands=tuple(operands))


@pytest.mark.parametrize(
    ("microbatches", "faults"),
    [
        (
            1,
            [("linear_dw:mlp.up_proj.weight", drop_partial), ("linear_dw:mlp.up_proj.weight", swap_partials)],
        ),
        (2, [("embedding_dw:embed_tokens.weight", drop_partial), ("linear_dw:lm_head.weight", drop_partial)]),
    ],
    ids=["whole batch", "microbatches"],
)
def test_fault_in_a_reduced_shard_is_detected(microbatches, faults):
    """With parts of the wrong devices the comparison fails."""
    case = ((1, 3, 1), microbatches, "microbatch", True, 1, 1, "f32", False, "none", "none")
    assert compare(case)[0]
    for label, fault in faults:
        assert not compare(case, change_first(f"{label}/reduce_scatter", fault))[0], (label, fault)


def test_fault_in_a_gathered_shard_is_detected():
    """With one device's storage shard in place of another's the comparison fails."""
    case = ((1, 2, 1), 1, "microbatch", True, 1, 1, "f32", False, "none", "none")
    assert not compare(case, change_every("all_gather_parameters:lm_head.weight/all_gather", shift))[0]


# ---- what moves, and what is kept ------------------------------------------------------------------------


def moved(
    strategy: DistributionStrategy, microbatches: int = 1, **changes: object
) -> tuple[Counter, tw.Plan]:
    """Elements that a step moved, by (weight, pass, device), as executed; and the plan."""
    model = model_of(**changes)  # type: ignore[arg-type]
    batch = 12 if strategy.mesh().num_devices == 3 else 8
    graph = graph_of(model, batch)
    graph.set_distribution(strategy)
    plan = graph.plan(batch_splits=batch, accumulation=microbatches, workers_per_device=1)
    with graph.instantiate(plan) as run:
        run.initialize(seed=0)
        run.reset_transfers()
        run.step(batches(model, 1, batch, SEQ)[0], 1e-3)
        counted = run.transfers()
    assert counted == plan.traffic()
    counts: Counter = Counter()
    for label, per_device in counted.items():
        kind, _, half = label.partition("/")
        name = re.sub(r"^(all_gather_parameters|linear_dw|embedding_dw):", "", kind)
        for device, elements in enumerate(per_device):
            counts[name, "gather" if half == "all_gather" else "reduce", device] += elements
    return counts, plan


@pytest.mark.parametrize(
    ("degree", "reshard", "microbatches", "vocab"),
    [(2, True, 1, 96), (2, False, 1, 448), (3, True, 1, 448), (4, True, 2, 448), (8, True, 1, 448)],
)
def test_transfers_equal_theory(degree, reshard, microbatches, vocab):
    """Per microbatch and device, a layer's weights are gathered twice (once without resharding) and
    their gradients are reduced into the storage shards once: three transfers of other devices'
    parts; of embedding and head two. Where the step is one microbatch of fewer tokens than the
    embedding has rows, these and their ids cross instead of its gradient.
    """
    strategy = DistributionStrategy.fsdp(degree, reshard_after_forward=reshard)
    counted, plan = moved(strategy, microbatches, num_key_value_heads=8, vocab_size=vocab)
    tokens = (12 if degree == 3 else 8) * SEQ
    layers = plan.graph.of_kind("parameter")
    cut = [t for t in layers if plan.layout.compute[t.id][0]]
    assert len(cut) >= 2 * 5
    expected: Counter = Counter()
    for weight in cut:
        is_layer = weight.spec.name.startswith("layers.")
        name = re.sub(r"^layers\.\d+\.", "", weight.spec.name)
        gathers = 2 if is_layer and reshard else 1
        size = prod(weight.shape)
        for device in range(degree):
            begin, end = plan.shapes.on(device).range(weight.spec, plan.layout.compute[weight.id], 0)
            own = (end - begin) * weight.shape[1]
            expected[name, "gather", device] += gathers * microbatches * (size - own)
            expected[name, "reduce", device] += microbatches * (degree - 1) * own
            if name == "embed_tokens.weight" and microbatches == 1 and tokens < vocab:
                expected[name, "reduce", device] = 0
                for of, elements in (("tokens", 1), (f"embedding_dw:{name}", weight.shape[1])):
                    part = tokens * elements // degree
                    expected[f"all_gather:{of}", "gather", device] = part * (degree - 1)
    assert not any(label.startswith("all_gather") for label, _, _ in counted.keys() - expected.keys())
    expected = +expected  # without zeros
    assert {k: v for k, v in counted.items() if k in expected} == dict(expected)


def test_hybrid_sharding_moves_less_than_replicas_alone():
    """Groups reduce to storage shards, and complete these among themselves."""
    counted, plan = moved(DistributionStrategy.fsdp(4, 2))
    weight = next(t for t in plan.graph.of_kind("parameter") if t.spec.name == "lm_head.weight")
    size = prod(weight.shape)
    for device in range(4):
        assert counted["lm_head.weight", "reduce", device] == 3 * size // 4
        gathered = counted["lm_head.weight", "gather", device]
        assert gathered == size // 2 + size // 4


def test_memory_is_a_share_of_each():
    """Parameters, gradients and states of weights that are cut take 1/n; planned bytes are those allocated."""
    model = model_of(num_key_value_heads=8, vocab_size=512)
    graph = graph_of(model, 4, "bf16")
    usage, plans = {}, {}
    for degree in (1, 2, 4):
        graph.set_distribution(DistributionStrategy.fsdp(degree))
        plan = plans[degree] = graph.plan(batch_splits=4, workers_per_device=1)
        usage[degree] = plan.estimate_memory_usage()[0]
        with graph.instantiate(plan) as run:
            assert run.memory_usage() == plan.estimate_memory_usage()
    for name in ("parameters", "gradients", "optimizer"):
        whole, halved = 0, 0
        for buffer in plans[2].placement(0).buffers:
            if buffer.category == name:
                tensor = buffer.key[1]
                is_cut = plans[2].layout.compute[tensor][0] == ("fsdp",)
                size = prod(plans[2].graph.spec(tensor).shape) * plans[2].graph.spec(tensor).dtype.itemsize
                whole, halved = whole + size * (not is_cut), halved + size * is_cut
        vectors = [t for t in plans[2].graph.of_kind("parameter") if t.spec.storage == "vector"]
        assert halved > 50 * whole > 0
        assert usage[1][name] - usage[2][name] == halved // 2
        assert 0 <= usage[2][name] - halved // 2 - whole < 64 * 4 * (len(vectors) + 1)
    assert usage[4]["parameters"] < usage[2]["parameters"]
    assert usage[2]["gathered"] > 0 == usage[1]["gathered"]


@pytest.mark.parametrize(("reduce", "parts"), [("microbatch", 2), ("step", 1)])
def test_sums_of_microbatches_take_a_level_of_carries_for_every_doubling(reduce, parts):
    """In fp32: of a share if storage shards are reduced in every microbatch, of whole gradients if once."""
    graph = graph_of(model_of(num_hidden_layers=1, vocab_size=64), 16)
    graph.set_distribution(DistributionStrategy.fsdp(2, reduce=reduce))
    sizes = []
    for microbatches in (1, 2, 4, 8):
        plan = graph.plan(batch_splits=16, accumulation=microbatches, workers_per_device=1)
        sizes.append(plan.estimate_memory_usage()[0]["carries"])
    weights = sum(
        prod(t.shape) * 4
        for t in plan.graph.of_kind("parameter")
        if plan.layout.compute[t.id][:1] == (("fsdp",),)
    )
    assert [round(size / sizes[1], 2) for size in sizes] == [0, 1, 2, 3]
    assert 0 <= sizes[1] - weights // parts < 0.1 * weights


def test_resharding_saves_memory_and_prefetching_costs_it():
    """Each prefetched layer takes the memory of one; without resharding all layers are gathered at one time."""
    model = model_of(num_hidden_layers=6, vocab_size=64)
    graph = graph_of(model, 4)

    def gathered(**options: object) -> int:
        graph.set_distribution(DistributionStrategy.fsdp(2, **options))  # type: ignore[arg-type]
        return graph.plan(batch_splits=4).estimate_memory_usage()[0]["gathered"]

    sizes = [gathered(prefetch=n) for n in (0, 1, 2)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0]
    assert gathered(reshard_after_forward=False) >= 6 * sizes[0]


def test_equal_layers_are_gathered_by_one_template():
    """For any depth of the model."""
    templates = []
    for depth in (2, 5):
        graph = graph_of(model_of(num_hidden_layers=depth), 4)
        graph.set_distribution(DistributionStrategy.fsdp(2))
        templates.append(len(graph.plan(batch_splits=4).program.classes[0].templates))
    assert templates[0] == templates[1]


UNITS = [  # options, and calls of a forward pass
    ({}, 7),  # embedding, five layers, head
    ({"units": ["layers.[0-1].*", "layers.[2-4].*"]}, 4),
    ({"units": ["*"]}, 1),
    ({"unit_elements": 100_000}, 3),  # with embedding or head
]


@pytest.mark.slow
def test_units_are_gathered_together():
    """As configured, or by size; the same bits."""
    model = model_of(num_hidden_layers=5)
    graph = graph_of(model, 4)
    for options, calls in UNITS:
        strategy = DistributionStrategy.fsdp(2, **options)
        graph.set_distribution(strategy)
        gathers = [
            op.label.partition(":")[0] for op in graph.plan(batch_splits=4).graph.ops if op.phase == "forward"
        ]
        assert gathers.count("all_gather_parameters") == calls, options
        if calls in (3, 4):
            steps = batches(model, 2, 4, SEQ)
            report = verify_strategy(graph, {"fsdp": 2}, steps, strategy=strategy, batch_splits=4)
            assert report.equal, report.text


def test_explanations_give_sizes_of_cut_and_gathered_weights():
    """How many weights are cut, what a pass gathers, how much gathered weights take."""
    graph = graph_of(model_of(), 4)
    graph.set_distribution(DistributionStrategy.fsdp(2))
    plan = graph.plan(batch_splits=4)
    words = plan.explain()
    assert "16 weights, their gradients and optimizer states lie in 2 parts each, along fsdp" in words
    assert re.search(r"forward: gathers [0-9,]+ elements in 4 calls", words)
    assert re.search(r"gathered +[0-9.]+ MiB", words)
    changes = re.findall(r"all_gather:(\S+) .*: reads ([0-9,]+) elements", words)
    assert changes == [("embedding_dw:embed_tokens.weight", "2,048"), ("tokens", "32")]
    assert "dim 0 (mlp) on fsdp" in plan.why("layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(("degree", "vocab"), [(2, 512), (2, 199), (3, 448)])
def test_explained_reads_are_exact_or_marked_as_about(degree, vocab):
    """Where storage shards differ in size, no one number is every device's."""
    batch = 12 if degree == 3 else 4
    graph = graph_of(model_of(vocab_size=vocab, num_key_value_heads=8), batch)
    graph.set_distribution(DistributionStrategy.fsdp(degree))
    plan = graph.plan(batch_splits=batch, workers_per_device=1)
    explained = re.findall(r"reads (about )?([0-9,]+) of them", plan.explain())
    moved = [of for label, of in plan.traffic().items() if label.startswith("all_gather_parameters")]
    read = {sum(per_device) for per_device in zip(*moved)}
    total = sum(int(number.replace(",", "")) for _, number in explained)
    assert bool(explained[0][0]) == (read != {total})
    assert all(abs(number - total) < total / 4 for number in read)


@pytest.mark.parametrize(
    ("strategy", "microbatches", "recompute"),
    [
        (DistributionStrategy.fsdp(2, reshard_after_forward=False), 2, "full"),
        (DistributionStrategy.fsdp(4, 2), 2, "none"),
        (DistributionStrategy.ddp(2), 3, "none"),  # whose sums are completed per microbatch, too
    ],
)
def test_plans_of_sharded_state_round_trip(strategy, microbatches, recompute, tmp_path):
    """Saved and loaded, they have the same digest and equal a new plan."""
    batch = 4 * microbatches
    graph = graph_of(model_of(num_hidden_layers=1), batch)
    graph.set_distribution(strategy)
    plan = graph.plan(
        batch_splits=batch, accumulation=microbatches, recompute=recompute, workers_per_device=1
    )
    plan.save(tmp_path / "step.plan")
    loaded = tw.Plan.load(tmp_path / "step.plan")
    assert loaded.digest() == plan.digest()
    assert loaded.explain() == plan.explain()


# ---- borders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DistributionStrategy.fsdp(0), "world_size must lie in .1, 1024.; got 0"),
        (
            lambda: DistributionStrategy.fsdp(6, 4),
            "shard_degree must divide world_size; got 4 of 6; choose one of 1, 2, 3, 6",
        ),
        (lambda: DistributionStrategy.fsdp(4, 8), "shard_degree must lie in .1, 4.; got 8"),
        (lambda: DistributionStrategy.fsdp(2, prefetch=-1), "prefetch must lie in .0, 64.; got -1"),
        (
            lambda: DistributionStrategy.fsdp(2, reduce="never"),
            "reduce must be one of microbatch, step; got 'never'",
        ),
        (lambda: StateSharding(("fsdp", "fsdp")), "axes must be unique names"),
        (lambda: StateSharding("fsdp"), "axes must be a sequence of names; got 'fsdp'"),
        (
            lambda: DistributionStrategy.hybrid(dp=2, fsdp=2, sharding=StateSharding(("fsdp", "dp"))),
            "axes must shard state in the order in which they shard the batch; got fsdp, dp",
        ),
        (
            lambda: DistributionStrategy.hybrid(fsdp=2, tp=2, sharding=StateSharding(("tp",))),
            "an axis that shards state must shard the batch and nothing else; got 'tp'",
        ),
    ],
)
def test_impossible_sharding_is_rejected(make, words):
    """When it is declared, with a reason."""
    with pytest.raises((LayoutError, PlanError), match=words):
        make()


def test_axes_may_be_a_list():
    """They are stored as a tuple, so that equal settings are equal and hashable."""
    assert {StateSharding(["fsdp"])} == {StateSharding(("fsdp",))}  # type: ignore[arg-type]


def test_hint_that_cuts_a_weight_twice_is_rejected():
    """An axis that cuts storage shards cannot cut the same weight where it is used."""
    graph = graph_of(model_of(), 4)
    layouts = {"embed_tokens.weight": ("fsdp", None)}
    graph.set_distribution(replace(DistributionStrategy.fsdp(2), layouts=layouts))
    with pytest.raises(
        LayoutError, match=r"got 'embed_tokens.weight' as .fsdp, -., and 'fsdp' for storage shards"
    ):
        graph.plan(batch_splits=4)


def test_unit_of_no_layer_is_rejected():
    """A pattern that matches no layer's weights is a typo."""
    graph = graph_of(model_of(), 4)
    graph.set_distribution(DistributionStrategy.fsdp(2, units=["blocks.*"]))
    with pytest.raises(LayoutError, match=r"got 'blocks\.\*', which matches no layer"):
        graph.plan(batch_splits=4)


def test_custom_axes_cut_state():
    """Names have no meaning: a mesh with axes called `a` and `b` trains like one device, to the bit."""
    model = model_of()
    strategy = DistributionStrategy(
        tw.ParallelismMode.FSDP, {"a": 2, "b": 2}, {"batch": ("a", "b")}, sharding=StateSharding(("a", "b"))
    )
    report = verify_strategy(
        graph_of(model, 8),
        DeviceMesh({"a": 2, "b": 2}),
        batches(model, 2, 8, SEQ),
        strategy=strategy,
        batch_splits=8,
    )
    assert report.equal, report.text


@tw.layer
def perceptron(graph, x, *, bias):
    """Two products, and their sum: a residual, or a bias before it."""
    inner = tw.DimLabel("mlp")
    hidden = graph.silu(linear(graph, x, "up", 128, out_label=inner))
    return graph.add(x, linear(graph, hidden, "down.weight", 64, in_label=inner, bias=bias))


@pytest.mark.parametrize(
    "axes,bias",
    [({"dp": 2, "tp": 2}, False), ({"fsdp": 2, "tp": 2}, False), ({"fsdp": 2, "tp": 2}, True)],
    ids=str,
)
def test_one_row_per_device_and_microbatch(axes, bias):
    """A residual of a single row is not a bias for all rows."""

    def graph() -> tw.ComputeGraph:
        made = tw.ComputeGraph("rows")
        x = made.input([4, 64], "f32", name="x", labels=[tw.BATCH, None])
        made.loss(made.mean(perceptron(made, x, path="first", bias=bias)))
        made.optimize(tw.optim.SGD())
        return made

    rows = [{"x": np.random.default_rng(n).standard_normal((4, 64)).astype(np.float32)} for n in range(2)]
    report = verify_strategy(graph(), DeviceMesh(axes), rows, accumulation=2, batch_splits=4)
    assert report.equal, report.text


def test_mesh_without_the_axes_of_shards_is_rejected():
    """A strategy that cuts state is not silently dropped."""
    graph = graph_of(model_of(), 4)
    graph.set_distribution(DistributionStrategy.fsdp(2))
    with pytest.raises(PlanError, match=r"axes that shard the strategy's state \(fsdp\)"):
        graph.plan({"dp": 2})
    graph.plan({"fsdp": 2})


@pytest.mark.slow
def test_more_than_sixteen_devices():
    """With so many devices that the proof of order uses classes where it can: equal to one device to the bit."""
    model, axes = config(num_hidden_layers=1, vocab_size=1200), {"dp": 3, "fsdp": 6}
    report = verify_strategy(graph_of(model, 18), axes, batches(model, 1, 18, SEQ), batch_splits=18)
    assert report.equal, report.text


def test_unequal_shares_are_cut_over_as_many_shards():
    """Of 257 rows in pieces of 64 one of three devices has two panels, in two of its three storage shards."""
    model = config(
        num_hidden_layers=1,
        vocab_size=257,
        hidden_size=96,
        intermediate_size=384,
        num_attention_heads=3,
        num_key_value_heads=3,
    )
    graph = tw.ComputeGraph("llama", k_splits=3)
    models.build_training_graph(graph, model, 3, SEQ, "f32")
    graph.optimize(tw.optim.AdamW())
    rows = batches(model, 1, 3, SEQ)
    report = verify_strategy(graph, DeviceMesh({"fsdp": 3, "tp": 3}), rows, batch_splits=3)
    assert report.equal, report.text
