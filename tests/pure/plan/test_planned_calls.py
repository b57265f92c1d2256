"""The segment of each call of a plan is found from the call's tensors."""

from __future__ import annotations

from collections import Counter

import pytest

import tilewise as tw
from tilewise import models
from tilewise.plan.calls import planned_calls
from tilewise.strategy import DistributionStrategy

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 2,
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("strategy", [DistributionStrategy.ddp(2), DistributionStrategy.fsdp(world_size=2)])
def test_every_segment_has_its_own_calls(strategy, accumulation):
    """Also where results of several layers use one piece of memory in turn: each segment is called once
    per microbatch, and updates once.
    """
    graph = tw.ComputeGraph("gpt2")
    models.build_training_graph(graph, models.config_from_dict(CONFIG), 4, 16, "f32")
    graph.optimize(tw.optim.SGD())
    graph.set_distribution(strategy)
    plan = graph.plan(accumulation=accumulation, workers_per_device=1)
    counts = Counter((c.segment.index, c.segment.phase) for c in planned_calls(plan, 0, "step"))
    assert {count for (_, phase), count in counts.items() if phase != "update"} == {accumulation}
    assert {count for (_, phase), count in counts.items() if phase == "update"} == {1}
