"""Pipelines equal one device to the bit, over pairs of everything that a user can choose, and planted
faults are found and named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_llama import batches, change_first, config, training_graph

import tilewise as tw
import tilewise.strategy.offload as offload
from pure.pairwise import Case, pairwise_cases
from tilewise.core.errors import PlanError, TilewiseError
from tilewise.ir.program import Instruction
from tilewise.observe.plan_page import _measured
from tilewise.plan.picture import draw_plan
from tilewise.session import Plan, verify_strategy

BATCH, SEQ, LAYERS, STEPS = 16, 8, 4, 3
ZERO = {
    "zero 3": {},
    "zero 2": {"reshard_after_forward": False},
    "zero 1": {"reshard_after_forward": False, "reduce": "step"},
}
CHOICES = {
    "schedule": ["1f1b", "gpipe", "interleaved", "zero_bubble"],
    "stages": [2, 3, 4],
    "others": [(), ("dp", 2), ("fsdp", 2), ("tp", 2), ("dp", 2, "tp", 2), ("fsdp", 2, "tp", 2)],
    "sharding": [*ZERO],
    "microbatches": [1, 2, 4, 8],
    "recompute": ["none", "selective", "full"],
    "offload": ["none", "optimizer", "parameters", "activations"],
    "tied": [True, False],
    "dtype": ["f32", "bf16"],
}


def devices(case: Case) -> int:
    _, stages, others, *_ = case
    return stages * int(np.prod(others[1::2], dtype=int))  # type: ignore[operator, index]


def is_allowed(case: Case) -> bool:
    """Whether the rules allow a case, and whether it has few enough threads for small machines."""
    schedule, stages, others, sharding, microbatches, *_ = case
    if schedule == "interleaved" and (stages != 2 or microbatches % 2):  # type: ignore[operator]
        return False  # four layers
    return devices(case) <= 8 and (sharding == "zero 3" or "fsdp" in others)  # type: ignore[operator]


@cache
def pairwise() -> list[Case]:
    """Few cases with every pair of values that the rules allow."""
    return pairwise_cases(CHOICES, is_allowed)


def compare(case: Case, change: Callable[[Plan], Plan] = lambda plan: plan) -> tuple[bool, str]:
    """Three steps of a case next to one device."""
    schedule, stages, others, sharding, microbatches, recompute, offloaded, tied, dtype = case
    model = config(
        num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=48, head_dim=4, tie_word_embeddings=tied
    )
    axes = {"pp": stages, **dict(zip(others[::2], others[1::2]))}  # type: ignore[index]
    own = tw.PipelineStages(
        schedule=schedule,  # type: ignore[arg-type]
        chunks=2 if schedule == "interleaved" else 1,
    )
    state = tw.StateSharding(("fsdp",), **ZERO[sharding]) if "fsdp" in axes else None  # type: ignore[index, arg-type]
    report = verify_strategy(
        training_graph(model, dtype, BATCH, SEQ),  # type: ignore[arg-type]
        axes,  # type: ignore[arg-type]
        batches(model, STEPS, BATCH, SEQ),
        strategy=tw.DistributionStrategy.for_mesh(tw.DeviceMesh(axes), state, own),  # type: ignore[arg-type]
        batch_splits=BATCH,
        accumulation=microbatches,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
        offload=offloaded,  # type: ignore[arg-type]
        change=change,
    )
    return report.equal, report.text


def named(case: Case) -> str:
    schedule, stages, others, sharding, microbatches, recompute, offloaded, tied, dtype = case
    mesh = "-".join([f"pp{stages}", *(f"{n}{s}" for n, s in zip(others[::2], others[1::2]))])  # type: ignore[index]
    words = f"{schedule}-{mesh}-{sharding}-m{microbatches}-{recompute}-{offloaded}-{dtype}"
    return (words + ("-tied" if tied else "")).replace(" ", "")


@pytest.fixture(autouse=True)
def offloaded_too(monkeypatch):
    """Small tensors are offloaded as well."""
    monkeypatch.setattr(offload, "_LEAST_BYTES", 256)


@pytest.mark.parametrize("case", pairwise()[:10], ids=named)
def test_best_cases_equal_one_device(case):
    """Ten cases hold about half of all pairs."""
    equal, text = compare(case)
    assert equal, text


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise()[10:], ids=named)
def test_all_pairs_equal_one_device(case):
    """With the everyday ones, every pair of values."""
    equal, text = compare(case)
    assert equal, text


@pytest.mark.soak
@settings(max_examples=400, deadline=None)
@given(st.tuples(*(st.sampled_from(values) for values in CHOICES.values())).filter(is_allowed))
def test_random_products_equal_one_device(case):
    """Every combination that the rules allow, drawn at random."""
    equal, text = compare(case)
    assert equal, text


@pytest.mark.parametrize(
    "stages,chunks,microbatches",
    [
        (4, 2, 8),
        (3, 3, 6),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((8, 1, 16), (4, 3, 16))),
    ],
)
def test_many_stages_and_chunks(stages, chunks, microbatches):
    """A layer per virtual stage: the lists of such pipelines do not block each other, and steps are equal."""
    model = config(num_hidden_layers=stages * chunks, hidden_size=32, intermediate_size=48, head_dim=4)
    own = tw.PipelineStages(
        schedule="interleaved" if chunks > 1 else "zero_bubble", chunks=chunks, layers=(1,) * stages * chunks
    )
    batch = 2 * microbatches
    report = verify_strategy(
        training_graph(model, "f32", batch, SEQ),
        {"pp": stages},
        batches(model, 1, batch, SEQ),
        strategy=tw.DistributionStrategy.hybrid(pp=stages, stages=own),
        accumulation=microbatches,
        batch_splits=batch,
    )
    assert report.equal, report.text


# ---- planted faults ----------------------------------------------------------------------------------------

PLAIN = ("1f1b", 2, (), "zero 3", 4, "none", "none", True, "f32")


def with_calls(change: Callable[[list, list[int]], None], stage: int) -> Callable[[Plan], Plan]:
    """Changes the step's list of a stage. `change` is given the calls, and the places of those that move
    activations forwards.
    """

    def apply(plan: Plan) -> Plan:
        classes = list(plan.program.classes)
        of = classes[stage]
        calls = list(of.calls["step"])
        labels = [[i.label for i in t.instructions] for t in of.templates]
        moving = {
            n
            for n, own in enumerate(labels)
            if any(label.startswith("move:layers.") and ".backward" not in label for label in own)
        }
        change(calls, [place for place, call in enumerate(calls) if call.template in moving])
        classes[stage] = replace(of, calls={**of.calls, "step": tuple(calls)})
        return replace(plan, program=replace(plan.program, classes=tuple(classes)))

    return apply


def swap_microbatches(calls, moves):
    """The first two receives change places."""
    first, second = moves[:2]
    calls[first], calls[second] = calls[second], calls[first]


def drop_send(calls, moves):
    """The last send is left out."""
    del calls[moves[-1]]


@pytest.mark.parametrize("fault,stage", [(swap_microbatches, 1), (drop_send, 0)], ids=["swapped", "dropped"])
def test_faults_of_moves_are_named(fault, stage):
    """Two microbatches swapped, or a send left out: the program is refused, and the error names the move."""
    assert compare(PLAIN)[0]
    with pytest.raises(PlanError, match="move:layers"):
        compare(PLAIN, with_calls(fault, stage))


def add_twice(instruction: Instruction) -> Instruction:
    """The first summand in place of the second, too."""
    first, *_ = (o for o in instruction.operands if not o.null and o.access != 2)
    operands = tuple(
        o if o.null or o.access == 2 else o._replace(slot=first.slot) for o in instruction.operands
    )
    return replace(instruction, operands=operands)


def test_a_tied_gradient_that_is_added_twice_is_found():
    """The comparison names the table's gradient; the loss is still equal."""
    equal, text = compare(PLAIN, change_first("add", add_twice, kernel="add_f32"))
    assert not equal and "gradient of embed_tokens.weight" in text


# ---- other programs ----------------------------------------------------------------------------------------


def pipeline_graph(**options):
    graph = training_graph(config(num_hidden_layers=LAYERS), "f32")
    graph.set_distribution(tw.DistributionStrategy.pipeline(2, **options))
    return graph


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "own"])
def test_forward_alone_equals_one_device(schedule):
    """Evaluation runs over the stages, with the weights of training and in any order with steps, and so does a
    graph that only evaluates.
    """
    model = config(num_hidden_layers=LAYERS)
    first, second = batches(model, 2)
    rows = tuple(tuple(map(str, own)) for own in tw.strategy.actions_for("zero_bubble", 2, 1, 4))
    options = {"schedule": rows} if schedule == "own" else {"schedule": schedule, "microbatches": 4}
    losses = []
    for graph, axes in ((training_graph(model, "f32"), {}), (pipeline_graph(**options), None)):
        own = []
        with graph.instantiate(graph.plan(axes)) as instance:
            instance.initialize(0)
            for batch in (first, second, first):
                instance.forward(**batch)
                own.append(instance.get_tensor("loss").tobytes())
                own.append(np.float32(instance.step(second, 1e-3).loss).tobytes())
        graph.draft.loss_id = None
        with graph.instantiate(graph.plan(axes)) as instance:
            instance.initialize(0)
            instance.forward(**first)
            own.append(instance.get_tensor("loss").tobytes())
        losses.append(own)
    assert losses[0] == losses[1] and len({*losses[0][:6:2]}) == 3 and losses[0][6] == losses[0][0]


@tw.layer
def mixed(graph, x, skip, *, width):
    weight = graph.parameter([width, width], name="weight")
    return graph.add(x, graph.silu(graph.matmul(graph.add(x, skip), weight, trans_b=True)))


def graph_with_skips():
    """Six layers, of which the last three also read results of the first three, in reverse order; a matmul
    between layers, outside all of them; and the embedding added to the result.
    """
    width, vocabulary = 32, 64
    graph = tw.ComputeGraph("skips")
    ids, labels = (
        graph.input([BATCH, SEQ], "i32", name=name, labels=[tw.BATCH, None], storage="scalars")
        for name in ("tokens", "labels")
    )
    table = graph.parameter([vocabulary, width], "f32", name="table", labels=[tw.DimLabel("vocab"), None])
    embedded = h = graph.embedding(ids, table)
    saved = []
    for i in range(3):
        h = mixed(graph, h, h, path=f"down.{i}", width=width)
        saved.append(h)
    h = graph.add(h, graph.matmul(h, graph.parameter([width, width], name="between")))
    for i in range(3):
        h = mixed(graph, h, saved.pop(), path=f"up.{i}", width=width)
    loss, _ = graph.mean_cross_entropy(graph.matmul(graph.add(h, embedded), table, trans_b=True), labels)
    graph.loss(loss)
    graph.optimize(tw.optim.AdamW())
    return graph


OWN = (
    ("0F0", "0F1", "2F0", "2F1", "2I0", "0I0", "2I1", "0I1", "0W0", "0W1", "2W0", "2W1"),
    ("1F0", "1F1", "3F0", "3I0", "1I0", "3F1", "3I1", "1I1", "1W0", "1W1", "3W0", "3W1"),
)  # gradients of weights in the order of the stages


@pytest.mark.parametrize("schedule,stages", [*product(("gpipe", "1f1b", "zero_bubble"), (2, 3, 4)), (OWN, 2)])
def test_results_that_skip_stages_equal_one_device(schedule, stages):
    """They are passed on from stage to stage, and no stage waits for one that waits for it."""
    microbatches = 2 if schedule == OWN else 4
    report = verify_strategy(
        graph_with_skips(),
        {"pp": stages},
        batches(config(vocab_size=64), 2, BATCH, SEQ),
        strategy=tw.DistributionStrategy.pipeline(stages, microbatches, schedule),
        accumulation=microbatches,
        batch_splits=BATCH,
    )
    assert report.equal, report.text


@pytest.mark.slow
def test_state_moves_between_meshes():
    """A pipeline's state continues on any mesh, and the other way round, with the same bits."""
    model = config(num_hidden_layers=LAYERS)
    steps = batches(model, 3)
    strategies = [
        tw.DistributionStrategy.single(),
        tw.DistributionStrategy.pipeline(2),
        tw.DistributionStrategy.hybrid(dp=2, tp=2),
        tw.DistributionStrategy.hybrid(pp=4, fsdp=2),
    ]
    results = []
    for order in (strategies[:1] * 3, strategies[1:], strategies[:0:-1]):
        state = None
        for strategy, batch in zip(order, steps):
            graph = training_graph(model, "f32")
            graph.set_distribution(strategy)
            with graph.instantiate(graph.plan(batch_splits=16)) as instance:
                instance.initialize(0) if state is None else instance.load_state_dict(state)
                instance.step(batch, 1e-3)
                state = {name: value.copy() for name, value in instance.state_dict().items()}
        results.append({name: value.tobytes() for name, value in state.items()})
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_page_shows_passes_planned_and_measured(schedule, tmp_path):
    """Every pass of each stage as planned, and in the traced run; idle time and bytes in flight of each stage."""
    graph = pipeline_graph(microbatches=4, schedule=schedule)
    plan = graph.plan(workers_per_device=1)
    text = plan.explain()
    with graph.instantiate(plan) as instance:
        instance.initialize(0)
        instance.trace(True)
        instance.step(batches(config(num_hidden_layers=LAYERS), 1)[0], 1e-3)
        timeline = instance.timeline()
    plan.save_picture(tmp_path / "plan.html", timeline)
    page = (tmp_path / "plan.html").read_text()
    picture = draw_plan(plan, timeline.tasks)
    for stage, (passes, own) in enumerate(zip(picture.passes, picture.stages, strict=True)):
        measured = _measured(picture, stage)
        assert [p.name for p in measured] == [p.name for p in passes]
        assert all(a.begin < a.end for a in measured)
        names = {f"{stage}F{k}" for k in range(4)}
        assert names <= {p.name for p in passes} and all(f">{name}<" in page for name in names)
        shown = next(line for line in text.splitlines() if line.startswith(f"    stage {stage}: "))
        assert f"{own.in_flight / 2**20:.2f} MiB in flight" in shown
    assert "idle as planned" in page and "idle as measured" in page


def test_saved_plans_of_pipelines(tmp_path):
    """A plan's file has the stages, a user's passes included, and gives the same plan."""
    rows = tuple(tuple(map(str, own)) for own in tw.strategy.actions_for("zero_bubble", 2, 1, 4))
    for options in ({"schedule": "interleaved", "chunks": 2}, {"schedule": rows}):
        evaluating = tw.ComputeGraph("llama")
        tw.models.build_training_graph(evaluating, config(num_hidden_layers=LAYERS), 16, 32, "f32")
        evaluating.draft.loss_id = None
        evaluating.set_distribution(tw.DistributionStrategy.pipeline(2, **options))
        for graph in (pipeline_graph(**options), evaluating):
            plan = graph.plan()
            plan.save(tmp_path / "plan")
            assert tw.Plan.load(tmp_path / "plan").digest() == plan.digest()


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: pipeline_graph(layers=(1, 2)).plan(), "divided among 2 virtual stages, 4 in total"),
        (lambda: pipeline_graph().plan({"pp": 8}), "only the last may do without; got 4 layers"),
        (lambda: pipeline_graph(schedule="interleaved", chunks=2, microbatches=1).plan(), "use 2 microbatches"),
        (lambda: pipeline_graph(schedule="fastest"), "1f1b, gpipe, interleaved, zero_bubble"),
        (lambda: tw.DistributionStrategy.hybrid(pp=2, tp=2, stages=tw.PipelineStages("tp")), "shards nothing"),
        (
            lambda: replace(tw.DistributionStrategy.pipeline(2), layouts={"tokens": ("pp",)}),
            "shards nothing; got 'pp' over .*, which shards tokens",
        ),
    ],
)  # fmt: skip
def test_impossible_pipelines_are_refused(make, message):
    """Before anything is planned, with what would be possible."""
    with pytest.raises(TilewiseError, match=message):
        make()
