"""Defaults of a plan."""

import math
import os

import pytest

from tilewise.core import BATCH, limits
from tilewise.core.mesh import DeviceMesh
from tilewise.graph.builder import GraphBuilder
from tilewise.ir.batch import cut_batch
from tilewise.plan.settings import settings_for
from tilewise.strategy import DistributionStrategy, propagate_layouts


@pytest.mark.parametrize(
    ("quota", "devices", "workers"), [(math.inf, 1, 64), (6.0, 1, 6), (6.0, 4, 1), (2.5, 1, 3), (0.5, 1, 1)]
)
def test_default_workers_follow_the_cpu_quota(monkeypatch, quota, devices, workers):
    """Whatever the system's own count of cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(limits, "core_quota", lambda _: quota)
    graph = GraphBuilder("small")
    graph.output(graph.silu(graph.input([8, 4], name="x", labels=[BATCH, None])), "y")
    mesh, frozen = DeviceMesh({"dp": devices}), graph.freeze()
    batch = cut_batch(frozen, 1)
    layout = propagate_layouts(frozen, mesh, DistributionStrategy.for_mesh(mesh), batch)
    assert settings_for(frozen, layout, batch, None).workers_per_device == workers
