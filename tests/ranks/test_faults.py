"""A task that throws, a worker that stops, too little memory, Ctrl-C: one clear error, nothing left."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from small_llama import batches, config, training_graph

from support.faults import inject
from tilewise.core import CommTimeout, LayoutError, PlanError, ResourceError, TaskFailed
from tilewise.core.sizes import format_bytes

MODEL = config()


def running(axes, **options):
    graph = training_graph(MODEL, "bf16")
    model = graph.instantiate(graph.plan(axes), **options)
    model.initialize(0)
    return model


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 4}], ids=str)
def test_task_that_throws(axes):
    """The error names op, tile, worker and device; the next step from the same weights has the same bits."""
    batch = batches(MODEL, 1)[0]
    with running(axes) as model:
        before = model.state_dict()
        expected = model.step(batch, 1e-3)
        model.load_state_dict(before)
        inject(model, "throw", 1, "attention_backward", 1)
        start = time.monotonic()
        with pytest.raises(TaskFailed, match="attention_backward") as failure:
            model.step(batch, 1e-3)
        assert time.monotonic() - start < 30
        assert (
            failure.value.op == "attention_backward" and failure.value.tile == 1 and failure.value.worker >= 0
        )
        assert model.step_count == 0
        model.load_state_dict(before)
        for name in model.parameter_names():
            assert np.isfinite(model.get_tensor(name)).all()
        assert model.step(batch, 1e-3) == expected


def test_worker_that_stops():
    """Peers wait only until the deadline; the error names the late device and signal."""
    with running({"dp": 2}, deadline_s=1.0) as model:
        inject(model, "stall", 1, "attention_backward", 0)
        start = time.monotonic()
        with pytest.raises(CommTimeout, match="device 1"):
            model.step(batches(MODEL, 1)[0], 1e-3)
        assert time.monotonic() - start < 30


def test_memory_over_the_limit():
    """Rejected before anything is allocated, with both sizes and their difference."""
    graph = training_graph(MODEL, "bf16")
    plan = graph.plan({"dp": 2})
    need = plan.total_bytes
    with pytest.raises(ResourceError, match=rf"got {format_bytes(need)} for 2 devices, 1 byte too much"):
        graph.instantiate(plan, memory_limit_bytes=need - 1)
    with pytest.raises(MemoryError):
        graph.instantiate(plan, memory_limit_bytes=1)
    graph.instantiate(plan, memory_limit_bytes=need).close()


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c():
    """KeyboardInterrupt within a moment in the middle of steps, and the model still runs afterwards."""
    batch = batches(MODEL, 1)[0]
    with running({"dp": 2}) as model:
        model.step(batch, 1e-3)
        timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        sent = time.monotonic() + 0.15
        with pytest.raises(KeyboardInterrupt):
            while time.monotonic() - sent < 120:
                model.step(batch, 1e-3)
        assert time.monotonic() - sent < 30  # a busy machine's moment
        timer.join()
        model.initialize(0)
        assert np.isfinite(model.step(batch, 1e-3).loss)


def test_no_threads_or_memory_are_left(thread_count):
    """Closing a model ends its threads and returns its memory, after an error too."""
    before = threading.active_count(), thread_count()
    graph = training_graph(MODEL, "bf16")
    plan = graph.plan({"dp": 2})
    for _ in range(3):
        with graph.instantiate(plan) as model:
            model.initialize(0)
            inject(model, "throw", 0, "silu_gate", 0)
            with pytest.raises(TaskFailed):
                model.step(batches(MODEL, 1)[0], 1e-3)
    assert thread_count(before[1]) <= before[1] and threading.active_count() <= before[0]


@pytest.mark.parametrize(
    "axes,options,error,words",
    [
        ({"dp": 3}, {}, LayoutError, "got 3 parts .*; choose a batch that is a multiple of 3"),
        ({}, {"accumulation": 3}, LayoutError, "got 3 parts .* on micro, for 16 batch splits"),
        ({"dp": 2}, {"batch_splits": 1}, LayoutError, "batch.splits"),
        ({}, {"batch_splits": 12}, PlanError, "batch.splits"),
    ],
    ids=str,
)
def test_impossible_strategies_are_rejected_before_work(axes, options, error, words):
    """Planning fails with the rule, the values and advice."""
    with pytest.raises(error, match=words):
        training_graph(MODEL, "bf16").plan(axes, **options)
