"""Cores and memory available to a process, in control groups of both versions."""

import math
import os

import pytest

from tilewise.core.limits import (
    available_memory,
    core_quota,
    cores_of_node,
    memory_of_machine,
    num_cores,
    private_cache_bytes,
)

ALL = len(os.sched_getaffinity(0))


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


GROUP = "sys/fs/cgroup"
CASES = {
    "nothing": ({}, math.inf),
    "no limit": ({f"{GROUP}/cpu.max": "max 100000\n"}, math.inf),
    "one core": ({f"{GROUP}/cpu.max": "100000 100000\n"}, 1.0),
    "half a core": ({f"{GROUP}/cpu.max": "50000 100000\n"}, 0.5),
    "a group around": (
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            f"{GROUP}/outer/cpu.max": "150000 100000\n",
            f"{GROUP}/outer/inner/cpu.max": "max 100000\n",
        },
        1.5,
    ),
    "the tightest": (
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            f"{GROUP}/outer/cpu.max": "150000 100000\n",
            f"{GROUP}/outer/inner/cpu.max": "20000 20000\n",
        },
        1.0,
    ),
    "version 1": (
        {f"{GROUP}/cpu/cpu.cfs_quota_us": "100000\n", f"{GROUP}/cpu/cpu.cfs_period_us": "100000\n"},
        1.0,
    ),
    "version 1, no limit": (
        {f"{GROUP}/cpu/cpu.cfs_quota_us": "-1\n", f"{GROUP}/cpu/cpu.cfs_period_us": "100000\n"},
        math.inf,
    ),
    "nonsense": ({f"{GROUP}/cpu.max": "a b c\n", "proc/self/cgroup": "what\n"}, math.inf),
    "zero": ({f"{GROUP}/cpu.max": "0 100000\n"}, 0.01),
    "no period": ({f"{GROUP}/cpu.max": "100000 0\n"}, math.inf),
}


@pytest.mark.parametrize("case", CASES)
def test_cores_follow_the_quota(tmp_path, case):
    """At most the process's affinity, at least one; fractions of a core count as one."""
    files, quota = CASES[case]
    write(tmp_path, files)
    assert core_quota(tmp_path) == quota
    assert num_cores(tmp_path) == (ALL if quota == math.inf else min(ALL, max(1, math.ceil(quota))))


def test_memory_is_limited_by_groups(tmp_path):
    """The minimum of machine and groups; invalid values are no limit."""
    machine = memory_of_machine(tmp_path)
    assert machine == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    write(tmp_path, {f"{GROUP}/memory.max": "max\n", "proc/self/cgroup": "0::/one/two\n"})
    assert memory_of_machine(tmp_path) == machine
    write(tmp_path, {f"{GROUP}/one/memory.max": f"{1 << 30}\n", f"{GROUP}/one/two/memory.max": "many\n"})
    assert memory_of_machine(tmp_path) == 1 << 30
    write(tmp_path, {f"{GROUP}/memory/memory.limit_in_bytes": f"{1 << 29}\n"})
    assert memory_of_machine(tmp_path) == 1 << 29


def test_available_memory_of_system_and_groups(tmp_path):
    """The minimum of both; page cache counts as available, and an unreadable file is no limit."""
    assert available_memory(tmp_path) == memory_of_machine(tmp_path)
    write(tmp_path, {"proc/meminfo": f"MemFree: 1 kB\nMemAvailable: {3 << 20} kB\n"})
    assert available_memory(tmp_path) == 3 << 30
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/one\n",
            f"{GROUP}/one/memory.max": f"{2 << 30}\n",
            f"{GROUP}/one/memory.current": f"{1 << 30}\n",
            f"{GROUP}/one/memory.stat": f"anon 5\ninactive_file {1 << 28}\nactive_file {1 << 27}\n",
        },
    )
    assert available_memory(tmp_path) == (1 << 30) + (1 << 28) + (1 << 27)
    write(tmp_path, {f"{GROUP}/one/memory.stat": "nonsense\n"})
    assert available_memory(tmp_path) == 2 << 30  # the limit itself
    write(
        tmp_path,
        {
            f"{GROUP}/memory/memory.limit_in_bytes": f"{1 << 30}\n",
            f"{GROUP}/memory/memory.usage_in_bytes": f"{2 << 30}\n",
            f"{GROUP}/memory/memory.stat": f"total_inactive_file {1 << 20}\n",
        },
    )
    assert available_memory(tmp_path) == 0


def test_limits_of_this_process():
    """The files of this process give plausible values."""
    assert 1 <= num_cores() <= ALL and memory_of_machine() >= available_memory() > 1 << 26


def test_private_caches_and_nodes(tmp_path):
    """The largest cache that only the core and its sibling threads use; the cores of a node."""
    cpu = tmp_path / f"sys/devices/system/cpu/cpu{min(os.sched_getaffinity(0))}"
    caches = {"0": ("Data", "32K", "0,4"), "1": ("Instruction", "9M", "0,4"), "2": ("Unified", "2M", "0,4")}
    caches["3"] = ("Unified", "64M", "0-7")
    assert private_cache_bytes(tmp_path) == 0
    (cpu / "topology").mkdir(parents=True)
    (cpu / "topology/thread_siblings_list").write_text("0,4\n")
    for index, (kind, size, shared) in caches.items():
        folder = cpu / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, value in (("type", kind), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{value}\n")
    assert private_cache_bytes(tmp_path) == 2 << 20
    node = tmp_path / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("4-6,9\n")
    assert cores_of_node(1, tmp_path) == (4, 5, 6, 9) and cores_of_node(0, tmp_path) == ()
