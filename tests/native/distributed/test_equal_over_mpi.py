"""Results of processes that mpiexec has started equal those of devices in one process, to the bit:
on one host with shared memory, and on two hosts with tiles over MPI. The comparisons are in
`support/run_comparisons.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from native.distributed.test_launch import command as tilewise
from native.serve.serving_models import save_model
from support.hosts import find_mpiexec
from support.run_comparisons import COMPARISONS

SCRIPT = Path(__file__).parents[2] / "support" / "run_comparisons.py"
EVERY_DAY = {
    "one host": ["dp bf16 accumulated 2", "dropped partial 2"],
    "two hosts": ["fsdp f32 2", "pp bf16 2", "bytes dp f32 2", "dropped partial 2"],
}
OF_THREE = [
    "fsdp f32 3",
    "dropped partial of fsdp 3",
    "tp f32 4",
    "counts tp 4",
    "resumed 4",
    "part skipped 4",
]


def command(names):
    """The command of the script."""
    return [sys.executable, SCRIPT, *names]


def named(*devices):
    """The comparisons for this number of devices."""
    return [name for name in COMPARISONS if int(name.rsplit(" ", 1)[1]) in devices]


def require_all(done, names, hosts):
    """Every comparison succeeded on these hosts, and nothing else was printed."""
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == names and not done.stderr
    assert [row for row in rows if not row["passed"] or row["hosts"] != hosts] == []


def on_one_host(names, num_processes):
    """Run them with this environment's mpiexec."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        pytest.skip("no mpiexec: pip install mpich")
    words = [mpiexec, "-n", str(num_processes), *command(names)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    require_all(done, names, [0] * num_processes)


def test_two_processes_of_one_host():
    """Training, and a planted fault."""
    on_one_host(EVERY_DAY["one host"], 2)


def test_a_process_on_each_of_two_hosts(two_hosts):
    """Training with sharded state, the bytes between hosts, and a planted fault."""
    names = EVERY_DAY["two hosts"]
    require_all(two_hosts.run(command(names)), names, [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("num_processes,names", [(2, named(2)), (3, OF_THREE), (4, named(4))])
def test_all_on_one_host(num_processes, names):
    """All strategies, offloaded state, logits, texts, resuming, counts, planted faults."""
    on_one_host(names, num_processes)


@pytest.mark.slow
@pytest.mark.parametrize("ppn", [1, 2])
def test_all_on_two_hosts(two_hosts, ppn):
    """The same; two processes of a host share memory, and data of the other host is sent."""
    names = named(2 * ppn)
    done = two_hosts.run(command(names), ppn=ppn, timeout_s=120)
    require_all(done, names, [number // ppn for number in range(2 * ppn)])


@pytest.mark.slow
def test_generate_is_equal_on_two_hosts(two_hosts, tmp_path):
    """Sampled texts equal those of one process; another seed gives others."""
    reported = ("def f(x):", "--n", "2", "--max-tokens", "24", "--temperature", "0.9", "--dtype", "f32")
    words = tilewise("generate", save_model(tmp_path / "model"), *reported)
    alone = subprocess.run(words, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert alone.stdout.startswith("--- 1 of 2 ---")
    for seed, is_same in ((0, True), (1, False)):
        done = two_hosts.run([*words, "--tp", 2, "--seed", seed])
        assert done.returncode == 0 and (done.stdout == alone.stdout) == is_same, done.stderr
