"""Cores and memory that this process may use, according to the system, CPU affinity and control
groups (containers).

A process in a container sees all cores of its host, even if it may use only two. Additional threads
are stopped in the middle of their work. So numbers of threads come from here, never from the
system's own count of cores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = [
    "available_memory",
    "core_quota",
    "cores_of_node",
    "memory_of_machine",
    "num_cores",
    "private_cache_bytes",
]

_ROOT = Path("/")
_MEMORY = ("memory.max", "memory/memory.limit_in_bytes")
# Files of a control group: its limit, its usage, its statistics, and the fields of these that count page cache, which
# the kernel drops when memory is short.
_USE = (
    ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_inactive_file", "total_active_file"),
    ),
)
_NO_LIMIT = (OSError, ValueError, ZeroDivisionError)  # the file is missing, says "max", or is invalid
_LEAST_QUOTA = 0.01  # of a core, if a file has less


def num_cores(root: Path = _ROOT) -> int:
    """The number of threads that can compute at a time: cores that the process may run on, or fewer
    if its control group limits it.

    Args:
        root: root of the system's files.
    """
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), core_quota(root))))


def core_quota(root: Path = _ROOT) -> float:
    """The number of cores' time that the process's control group may use; infinity without a limit.

    Args:
        root: root of the system's files.
    """
    least = math.inf
    for folder in _groups(root):
        with suppress(*_NO_LIMIT):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            least = min(least, int(quota) / int(period))
        with suppress(*_NO_LIMIT):
            own, per = (
                int((folder / f"cpu/cpu.cfs_{what}_us").read_text(encoding="ascii"))
                for what in ("quota", "period")
            )
            least = min(least, own / per if own > 0 else math.inf)  # -1: no limit
    return max(least, _LEAST_QUOTA)


def private_cache_bytes(root: Path = _ROOT) -> int:
    """Bytes of the largest cache that only one core uses; 0 if the system does not say.

    Args:
        root: root of the system's files.
    """
    cpu, largest = root / f"sys/devices/system/cpu/cpu{min(os.sched_getaffinity(0))}", 0
    siblings = _read_list(cpu / "topology/thread_siblings_list")
    for cache in sorted((cpu / "cache").glob("index*")):
        with suppress(*_NO_LIMIT):
            kind = (cache / "type").read_text(encoding="ascii").strip()
            if kind != "Instruction" and _read_list(cache / "shared_cpu_list") <= siblings:
                largest = max(largest, _bytes_of((cache / "size").read_text(encoding="ascii")))
    return largest


def cores_of_node(node: int, root: Path = _ROOT) -> tuple[int, ...]:
    """The cores of a NUMA node, in order; empty if there is no such node.

    Args:
        node: its number.
        root: root of the system's files.
    """
    return tuple(sorted(_read_list(root / f"sys/devices/system/node/node{node}/cpulist")))


def _read_list(path: Path) -> set[int]:
    """The numbers of a list such as `0-3,8`; empty if the file is missing or invalid."""
    numbers: set[int] = set()
    with suppress(*_NO_LIMIT):
        for part in path.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _bytes_of(size: str) -> int:
    """A size such as `1024K`."""
    size = size.strip()
    return int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] if size[-1:] in "KM" else int(size)


def memory_of_machine(root: Path = _ROOT) -> int:
    """Bytes of physical memory, or the limit of the process's control group if that is less.

    Args:
        root: root of the system's files.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in _groups(root):
        for name in _MEMORY:
            with suppress(*_NO_LIMIT):
                limits.append(int((folder / name).read_text(encoding="ascii")))
    return min(limits)


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process can allocate now without swapping: the system's available memory, or
    the rest of the control group's limit if that is less. Page cache counts as available.

    Args:
        root: root of the system's files.
    """
    available = memory_of_machine(root)
    with suppress(*_NO_LIMIT):
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = min(available, int(line.split()[1]) << 10)
    for folder in _groups(root):
        for limit, usage, statistics, caches in _USE:
            with suppress(*_NO_LIMIT):
                left = int((folder / limit).read_text(encoding="ascii"))
                left -= int((folder / usage).read_text(encoding="ascii"))
                lines = (folder / statistics).read_text(encoding="ascii").splitlines()
                left += sum(int(value) for name, value in map(str.split, lines) if name in caches)
                available = min(available, max(left, 0))
    return available


def _groups(root: Path) -> Iterator[Path]:
    """The folders of the process's control group and of its parents, as far as they are visible."""
    top = root / "sys/fs/cgroup"
    yield top
    with suppress(*_NO_LIMIT):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":  # version 2; with version 1, a container sees its own group at the top
                own = Path(path.lstrip("/"))
                yield from (top / folder for folder in (own, *own.parents) if folder != Path("."))
