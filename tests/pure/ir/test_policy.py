"""Execution policies as data: what is accepted, and what each error says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.errors import ConfigError, PlanError
from tilewise.ir.policy import ExecutionPolicy, TaskExecutionHints
from tilewise.ir.program import TaskHints

HINTS = TaskExecutionHints(target_worker=1, priority=2)
INVALID = {
    "placement": ({"placement": "near"}, "placement must be one of auto, owner_computes, affinity, explicit"),
    "no workers": ({"placement": "explicit"}, r"needs workers of layers.*pipeline\(layers_per_stage"),
    "only priorities": (
        {"placement": "explicit", "hints": {"a": TaskExecutionHints(priority=1)}},
        "needs workers of layers",
    ),
    "worker": ({"workers": {"layers.0": 255}}, r"workers\['layers.0'\] must lie in \[0, 254\]"),
    "worker's type": ({"workers": {"layers.0": "1"}}, "must be an integer"),
    "no worker": ({"workers": {"layers.0": ()}}, "must name a worker"),
    "mapping": ({"workers": [0]}, "must be a dictionary"),
    "pattern": ({"workers": {"": 0}}, "must be printable text"),
    "preferred": ({"preferred_workers": (-1,)}, "preferred_workers must lie in"),
    "hints": ({"hints": {"a": 3}}, "must be a TaskExecutionHints"),
    "hints of devices": (
        {"hints": {"a": TaskExecutionHints(target_node=0, priority=1)}},
        "no target_node.*pipeline",
    ),
    "empty hints": ({"hints": {"a": TaskExecutionHints()}}, "must state a worker or a priority"),
    "twice": (
        {"workers": {"a": 0}, "hints": {"a": HINTS}},
        "'a' in workers and in hints; drop target_worker",
    ),
    "priority": ({"base_priority": 1 << 21}, "base_priority must lie in"),
    "hint's priority": ({"hints": {"a": TaskExecutionHints(priority=1 << 21)}}, "priority must lie in"),
    "prefetch": ({"prefetch": 1}, "prefetch must be True or False"),
    "core": ({"cores": (-1,)}, "a core must lie in"),
    "cores": ({"cores": (0, 0)}, "cores must differ"),
    "cores and node": ({"cores": (0,), "numa_node": 0}, "only one of them"),
    "node": ({"numa_node": -1}, "numa_node must lie in"),
    "threshold": ({"offload_threshold": 1.5}, r"offload_threshold must lie in \[0, 1\]"),
    "memory": ({"device_memory_bytes": -1}, "device_memory_bytes must lie in"),
    "commute": ({"enable_commute": True}, "depend on the order of addition"),
}


@pytest.mark.parametrize(("fields", "message"), INVALID.values(), ids=INVALID)
def test_invalid_policies_are_rejected(fields, message):
    """Each value that cannot be satisfied is an error that says what to do."""
    with pytest.raises(PlanError, match=rf"(?s)^\[ir\.policy\].*{message}"):
        ExecutionPolicy(**fields)


def test_a_device_is_no_hint():
    """Hints name workers; the message leads to pipelines."""
    with pytest.raises(ConfigError, match=r"pipeline\(layers_per_stage"):
        TaskExecutionHints(target_node=1)


def test_a_policy_is_a_plain_value():
    """Equal policies are equal, one worker is a tuple of one, and nothing can be changed."""
    policy = ExecutionPolicy("explicit", workers={"a": 1, "b": [0, 1]}, cores=[1, 0])
    assert policy == ExecutionPolicy("explicit", workers={"a": (1,), "b": (0, 1)}, cores=(1, 0))
    assert policy.binds and not ExecutionPolicy().binds
    with pytest.raises(ConfigError):
        policy.workers["c"] = (0,)


@given(st.lists(st.integers(0, 3), max_size=5), st.integers(1, 50))
def test_shares_are_counts_of_tasks(workers, count):
    """Each place of `workers` gets neighbouring tasks, in order, and as many as `shares` says."""
    hints = TaskHints(tuple(workers))
    ran = [hints.worker_of(task, count) for task in range(count)]
    expected = [worker for worker, share in hints.shares(count) for _ in range(share)]
    assert ran == (expected if workers else [None] * count)
