"""Results of devices in several processes equal those in one process, to the bit. The comparisons
of other tests run while a group of processes is open; their planted faults are detected here, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilewise.core import PlanError
from tilewise.distributed import ProcessGroup

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
import test_counts
import test_families
import test_pairs
import test_pipelines
import test_sharded_state
import test_strategies_equal as strategies
import test_widths
from small_llama import drop_partial, swap_partials

COUNTS = (2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4)))
MANY = pytest.mark.parametrize(  # cases that take minutes
    "processes",
    [pytest.param(3, marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 4))],
    ids="{} processes".format,
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=COUNTS, ids="{} processes".format)
def processes(request):
    """The number of processes during the test."""
    with ProcessGroup(request.param) as group:
        group.start()
        yield request.param


@pytest.mark.parametrize("dtype", [pytest.param("f32", marks=pytest.mark.slow), "bf16"])
def test_training_equals_one_device(processes, dtype):
    """Meshes that are spread evenly or unevenly: two devices, and four with two strategies."""
    axes, accumulation = {2: ({"dp": 2}, 4), 3: ({"tp": 4}, 1), 4: ({"dp": 2, "tp": 2}, 1)}[processes]
    strategies.test_training_equals_one_device(dtype, axes, accumulation)


PIPELINES = {
    2: ("1f1b", 2, (), "zero 3", 4, "none", "none", True, "bf16"),
    3: ("zero_bubble", 3, (), "zero 3", 4, "full", "none", True, "f32"),
    4: ("interleaved", 2, ("fsdp", 2), "zero 3", 4, "none", "none", True, "f32"),
}


def test_pipelines_equal_one_device(processes):
    """Stages in different processes, with a tied weight; a send that is left out is named."""
    equal, text = test_pipelines.compare(PIPELINES[processes])
    assert equal, text
    if processes == 2:
        test_pipelines.test_faults_of_moves_are_named(test_pipelines.drop_send, 0)


FAULTS = {
    2: ({"dp": 2}, "linear_dw:mlp.up_proj.weight/reduce_scatter", drop_partial),
    3: ({"tp": 4}, "o_proj.weight/reduce_scatter", swap_partials),
    4: ({"dp": 4}, "linear_dw:mlp.up_proj.weight/reduce_scatter", swap_partials),
}


def test_a_planted_fault_is_found(processes):
    """Dropped and swapped partial values of other processes' devices make the comparison fail."""
    axes, label, fault = FAULTS[processes]
    strategies.test_planted_faults_are_detected("f32", axes, 1, label, fault)


def test_more_processes_than_devices_are_rejected(processes):
    """Before anything runs; a single device stays in the leader."""
    if processes > 2:
        with pytest.raises(PlanError, match=f"got 2 devices for {processes} processes"):
            strategies.test_training_equals_one_device("f32", {"dp": 2}, 1)
    strategies.states_with_workers("f32", {}, 1)


def test_counted_transfers_are_those_of_the_plan(processes):
    """Counts of all processes together: the elements of every label on every device, and bytes per device."""
    axes = {2: {"dp": 2}, 3: {"tp": 4}, 4: {"dp": 2, "tp": 2}}[processes]
    test_counts.test_counted_transfers_equal_the_plan(axes)
    test_counts.test_planned_bytes_are_allocated_bytes(axes, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes,accumulation",
    [({"dp": 4}, 1), ({"dp": 4}, 4), ({"tp": 4}, 4), ({"tp": 8}, 1), ({"dp": 2, "tp": 2}, 4)],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_strategy_equals_one_device(processes, dtype, axes, accumulation):
    """With several devices in some processes."""
    strategies.test_training_equals_one_device(dtype, axes, accumulation)


@MANY
@pytest.mark.parametrize("case", test_pairs.pairwise(), ids=test_pairs.named)
def test_pairs_are_equal(processes, case):
    """Every pair of values of k splits, devices, microbatches, workers, dtypes and lengths."""
    (_, tp), dp, *_ = case
    if 1 < tp * dp < processes:
        pytest.skip("fewer devices than processes")
    test_pairs.test_all_pairs_equal_one_device(case)


@MANY
@pytest.mark.parametrize("case", test_sharded_state.pairwise(), ids=test_sharded_state.named)
def test_sharded_state_is_equal(processes, case, monkeypatch):
    """Weights and states stored on devices of several processes, in memory or files, gathered and
    reduced between them.
    """
    monkeypatch.setattr("tilewise.strategy.offload._LEAST_BYTES", 256)  # as in the tests that own the cases
    if 1 < test_sharded_state.mesh_of(case).num_devices < processes:
        pytest.skip("fewer devices than processes")
    test_sharded_state.test_all_pairs_equal_one_device(case)


@pytest.mark.slow
@pytest.mark.parametrize("axes,label,fault", strategies.REPLICA_FAULTS)
def test_different_replicas_are_detected(processes, axes, label, fault):
    """A fault on a device of the last process only."""
    if axes == {"dp": 2} and processes > 2:
        pytest.skip("fewer devices than processes")
    strategies.test_different_replicas_are_detected(axes, label, fault)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 5}, {"dp": 6}], ids=str)
def test_widths_of_the_batch(processes, mesh):
    """Processes with different numbers of devices."""
    batch = 10 if mesh == {"dp": 5} else 12
    test_widths.test_widths_of_the_batch(mesh, batch, batch, 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", test_families.WRITERS)
def test_logits_do_not_depend_on_processes(processes, family):
    """Decoding of every family over as many devices as possible, read at once, in chunks, and token by token."""
    tp = 2 if processes == 2 else 4
    expected = test_families.logits(family, "bf16", 1, [20])
    for parts in ([20], [17, 1, 1, 1]):
        assert expected.tobytes() == test_families.logits(family, "bf16", tp, parts).tobytes()
