"""A timeline of two hosts uses the leader's clock, whatever the other's offset.

The other host has another clock: its process is in its own time namespace.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.comm import links

RANKS = Path(__file__).parents[2] / "ranks"
ANOTHER_TIME = """#!/bin/sh
# The second process begins SECONDS later than the first, or earlier.
[ "$PMI_RANK" = 1 ] && exec unshare --time --fork --kill-child --monotonic SECONDS "$@"
exec "$@"
"""
TRACED = """
import json, sys, time
import tilewise as tw
from tilewise.comm.links import ClockOffset
sys.path.insert(0, sys.argv[1])
import small_llama
model = small_llama.config()
graph = small_llama.training_graph(model, "f32")
batches = small_llama.batches(model, 2)
with tw.ProcessGroup() as group, graph.instantiate(graph.plan({"dp": 2})) as running:
    running.initialize(0)
    running.step(batches[0], 1e-3)
    running.trace(True)
    begun = time.monotonic_ns()
    running.step(batches[1], 1e-3)
    ended = time.monotonic_ns()
    on_one_clock = running._executor.timeline()
    trace = running.timeline()
    offset = group.clock_offset(1)
    group.clock_offset = lambda process: ClockOffset(0, 0)
    uncorrected = running._executor.timeline()
print(json.dumps([begun, ended, offset, on_one_clock, uncorrected, trace.hosts, trace.clock_error_ns]))
"""
INACCURATE_NS = 20_000_000  # half a round trip while two processes share a core


def are_within(rows, begun, ended):
    """Whether tasks ran between two times, as far as can be known."""
    at = [time for row in rows for time in row[4:8] if time]
    return all(row[6] and row[7] >= row[6] for row in rows) and (
        begun - INACCURATE_NS < min(at) and max(at) < ended + INACCURATE_NS
    )


@pytest.mark.parametrize("quickest", [0, 7, 15])
def test_the_fastest_answer_determines_the_offset(monkeypatch, quickest):
    """The error is at most half of its round trip; slower answers would give more."""
    now, calls = 1_000, []

    def answer():
        nonlocal now
        calls.append(now)
        now += 40 if len(calls) == quickest + 1 else 1_000_000
        return calls[-1] - 500

    monkeypatch.setattr(links.time, "monotonic_ns", lambda: now)
    assert links.clock_offset(answer) == (-500 - 40 // 2, 40 // 2) and len(calls) == 16


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1000, -10])
def test_tasks_of_both_hosts_are_on_the_leaders_clock(two_hosts, tmp_path, seconds):
    """All tasks of a step lie within it; without the offset, those of the other host would not."""
    trial = subprocess.run(["unshare", "--time", "--fork", "--monotonic", str(seconds), "true"], check=False)
    if trial.returncode:
        pytest.skip("no time namespaces here")
    wrapper = tmp_path / "another_time.sh"
    wrapper.write_text(ANOTHER_TIME.replace("SECONDS", str(seconds)))
    done = two_hosts.run(["/bin/sh", wrapper, sys.executable, "-c", TRACED, RANKS])
    assert done.returncode == 0, done.stderr
    begun, ended, (offset, error), rows, uncorrected, hosts, trace_error = json.loads(done.stdout)
    # Namespaces add whole seconds to one clock, so the offset is known exactly.
    assert abs(offset - seconds * 10**9) <= error < INACCURATE_NS
    assert hosts == [0, 1] and 0 < trace_error < INACCURATE_NS
    assert {row[0] for row in rows} == {0, 1} and len(rows) == len(uncorrected)
    assert are_within(rows, begun, ended) and rows == sorted(rows, key=lambda row: row[6])
    own = [row for row in rows if row[0] == 0]
    assert own and own == [row for row in uncorrected if row[0] == 0]
    assert not are_within(uncorrected, begun, ended)
