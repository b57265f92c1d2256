"""The forward pass of all microbatches alone, as in evaluation: loss and rows equal those of a whole batch."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise as tw
from support.task_order import validate_order
from tilewise import models
from tilewise.core.errors import InternalError
from tilewise.models import llama
from tilewise.plan.bind import entries
from tilewise.session.assemble import assemble_program

CONFIG = llama.LlamaConfig(160, 64, 96, 3, 4, num_key_value_heads=2, max_position_embeddings=16)
STRATEGIES = {
    "one": tw.DistributionStrategy.single(),
    "dp": tw.DistributionStrategy.ddp(2),
    "tp": tw.DistributionStrategy.tensor_parallel(2),
    "fsdp, tp": tw.DistributionStrategy.for_mesh(
        tw.DeviceMesh({"fsdp": 2, "tp": 2}), tw.StateSharding(("fsdp",))
    ),
}


def planned(strategy, **options):
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, CONFIG, 8, 16, dtype="bf16")
    graph.optimize(tw.optim.AdamW())
    graph.set_distribution(strategy)
    return graph, graph.plan(batch_splits=8, workers_per_device=1, **options)


def batch(seed):
    tokens, labels = np.random.default_rng(seed).integers(0, 160, (2, 8, 16), np.int32)
    return {"tokens": tokens, "labels": labels}


def losses(graph, plan):
    """Loss and rows of a forward pass after another and after a step, and the loss of a step."""
    with graph.instantiate(plan) as model:
        model.initialize(seed=3)
        results = []
        for number in range(4):
            model.forward(**batch(0))
            results += [model.get_tensor("loss").tobytes(), model.get_tensor("loss_rows").tobytes()]
            model.step(batch(number), lr=0.0)
        return results, model.step(batch(0), lr=0.0).loss


def require_order(plan):
    """Every two uses of the same bytes are ordered, on one device and between two."""
    native = assemble_program(plan)
    for program in ("forward", "step"):
        validate_order([native.tasks(d, [], program) for d in range(plan.mesh.num_devices)])


@pytest.fixture(scope="module")
def expected():
    return losses(*planned(STRATEGIES["one"]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one", {"accumulation": 8}),
        ("one", {"accumulation": 2, "recompute": "full"}),
        ("dp", {"accumulation": 4}),
        pytest.param("fsdp, tp", {"accumulation": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_microbatches_have_the_loss_of_the_whole_batch(name, options, expected):
    """To the bit, on every mesh, and steps compute the same as before; all uses of memory are ordered."""
    graph, plan = planned(STRATEGIES[name], **options)
    require_order(plan)
    results, loss = losses(graph, plan)
    assert (results, loss) == expected


def test_order_of_the_step_alone_is_not_enough(monkeypatch):
    """The twin: without the forward pass's own order, successive templates share bytes unordered."""
    meet, seen = entries.find_conflicts, []

    def of_the_step(uses):
        seen.append(None)
        return meet(uses) if len(seen) == 1 else {}

    monkeypatch.setattr(entries, "find_conflicts", of_the_step)
    _, plan = planned(STRATEGIES["tp"], accumulation=4)
    with pytest.raises(InternalError):
        require_order(plan)
