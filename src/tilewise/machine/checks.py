"""Checks the machine for settings that slow programs down: one function per question.

Each function reads the system's own files and reports what it finds. No function changes anything.
If a file is missing (on another system, or because a container hides it), there is no finding.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilewise.core.environment import read
from tilewise.core.errors import ConfigError
from tilewise.core.limits import available_memory, core_quota, memory_of_machine, num_cores
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import shown
from tilewise.kernels.isa import isa_in_use, isa_levels, isa_missing

__all__ = ["Finding", "check_machine"]

_CPUS = "sys/devices/system/cpu"
_FEW_FILES = 1024
_OWN_CLOCKS = ("tsc", "arch_sys_counter")  # clocks that are read without a system call
# their governor `powersave` still reaches full speed
_DRIVERS_THAT_SCALE = ("intel_pstate", "amd-pstate", "amd-pstate-epp")


@dataclass(frozen=True)
class Finding:
    """One finding about the machine.

    Attributes:
        name: subject of the finding.
        state: `ok`, `note` (worth knowing) or `warning` (it costs speed, or work will fail).
        description: what was found.
        advice: what to change; empty if nothing needs to change.
    """

    name: str
    state: Literal["ok", "note", "warning"]
    description: str
    advice: str = ""


def check_machine(root: str | Path = "/") -> list[Finding]:
    """All findings about this machine, in a fixed order.

    Args:
        root: root of the system's files (`proc`, `sys`).
    """
    base = Path(root)
    questions = (
        _processor,
        _cores,
        _siblings,
        _frequency,
        _nodes,
        _memory,
        _pages,
        _files,
        _clock,
        _load,
        _tools,
        _mpi,
    )
    return [finding for question in questions for finding in question(base)]


def _processor(root: Path) -> Iterator[Finding]:
    lines = (_read(root / "proc/cpuinfo") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    level, best, missing = isa_in_use(), isa_levels()[-1], isa_missing()
    description = f"{name}, kernels for {level}"
    if missing:
        advice = f"this machine can run {missing[-1]}, which this build lacks; build Tilewise on this machine"
        yield Finding("processor", "warning", description, advice)
    elif level != best:
        yield Finding("processor", "note", f"{description} of {best}", "unset TILEWISE_ISA, which selects it")
    elif level == "baseline":
        advice = "kernels are several times slower without AVX2; use another processor, or virtual one, that has it"
        yield Finding("processor", "warning", description, advice)
    else:
        yield Finding("processor", "ok", description)


def _cores(root: Path) -> Iterator[Finding]:
    seen, allowed, quota = os.cpu_count() or 1, len(os.sched_getaffinity(0)), core_quota(root)
    description = f"{allowed} of {seen} that the system has" if allowed < seen else f"{allowed}"
    if quota >= allowed:
        yield Finding("cores", "ok", description)
        return
    description += f", with the time of {quota:g} of them"
    advice = f"{num_cores(root)} threads are used by default"
    if quota != math.ceil(quota):
        advice += "; a whole number of cores wastes none: the last thread is stopped for part of its time"
    yield Finding("cores", "note", description, advice)


def _siblings(root: Path) -> Iterator[Finding]:
    cpus = sorted(os.sched_getaffinity(0))
    shared = {_read(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    if None not in shared and len(shared) < len(cpus):
        description = f"{len(cpus)} threads on {len(shared)} cores"
        advice = (
            f"two threads of a core share its units: compare {len(shared)} workers in all with {len(cpus)}"
        )
        yield Finding("simultaneous threads", "note", description, advice)


def _frequency(root: Path) -> Iterator[Finding]:
    folder = root / _CPUS / "cpu0/cpufreq"
    governor, driver = _read(folder / "scaling_governor"), _read(folder / "scaling_driver")
    if governor is None:
        return
    description = f"governor {governor}" + (f" of {driver}" if driver else "")
    if governor == "powersave" and driver not in _DRIVERS_THAT_SCALE:
        advice = "cores run at their lowest speed; as root: cpupower frequency-set -g performance"
        yield Finding("frequency", "warning", description, advice)
    else:
        yield Finding("frequency", "ok", description)


def _nodes(root: Path) -> Iterator[Finding]:
    nodes = [
        folder for folder in (root / "sys/devices/system/node").glob("node[0-9]*") if _has_memory(folder)
    ]
    if len(nodes) > 1:
        advice = "memory of another node is slower; to stay on one: numactl --cpunodebind=0 --membind=0 tilewise ..."
        yield Finding("memory nodes", "note", f"{len(nodes)}", advice)


def _has_memory(node: Path) -> bool:
    for line in (_read(node / "meminfo") or "").splitlines():
        if "MemTotal:" in line:
            return line.split()[-2] != "0"
    return False


def _memory(root: Path) -> Iterator[Finding]:
    limit, free = memory_of_machine(root), available_memory(root)
    description = format_bytes(limit) + (f", {format_bytes(free)} available" if free < limit else "")
    yield Finding("memory", "ok", description)
    if _read(root / "proc/sys/vm/overcommit_memory") == "2":
        advice = "memory is reserved before it is used; as root: sysctl vm.overcommit_memory=0"
        yield Finding("overcommit", "warning", "the system counts memory as used when it is reserved", advice)


def _pages(root: Path) -> Iterator[Finding]:
    folder = "sys/kernel/mm/transparent_hugepage"
    chosen = _chosen(root / folder / "enabled")
    if chosen == "never":
        advice = f"weights are read through many more pages; as root: echo madvise > /{folder}/enabled"
        yield Finding("huge pages", "warning", chosen, advice)
    elif chosen is not None:
        yield Finding("huge pages", "ok", chosen)
    shared = _chosen(root / folder / "shmem_enabled")
    if shared in ("never", "deny"):
        advice = f"matters to `tilewise launch` alone; as root: echo advise > /{folder}/shmem_enabled"
        yield Finding("huge pages of several processes", "note", shared, advice)
    elif shared is not None:
        yield Finding("huge pages of several processes", "ok", shared)


def _chosen(path: Path) -> str | None:
    """The word in brackets among several words of a file; None if no word is."""
    words = _read(path)
    return None if words is None or "[" not in words else words.partition("[")[2].partition("]")[0]


def _files(_: Path) -> Iterator[Finding]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        advice = "a server has one for every connection; ulimit -n 65536"
        yield Finding("open files", "warning", f"{soft} at most", advice)
    else:
        yield Finding(
            "open files", "ok", "any number" if soft == resource.RLIM_INFINITY else f"{soft} at most"
        )


def _clock(root: Path) -> Iterator[Finding]:
    source = _read(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source is not None and source not in _OWN_CLOCKS:
        advice = "reading the time is a system call, so recording timelines is slower"
        yield Finding("clock", "note", source, advice)


def _load(root: Path) -> Iterator[Finding]:
    text = _read(root / "proc/loadavg")
    if text is None:
        return
    load, cores = float(text.split()[0]), num_cores(root)
    if load > cores / 2:
        advice = "other programs use the cores: measurements now are unreliable"
        yield Finding("load", "note", f"{load:g} programs want {cores} cores", advice)


def _tools(_: Path) -> Iterator[Finding]:
    missing = [name for name in ("c++", "cmake") if shutil.which(name) is None]
    if missing:
        advice = "only building Tilewise from source needs them, or an op in C++"
        yield Finding("compiler", "note", f"no {' and no '.join(missing)}", advice)
    else:
        yield Finding("compiler", "ok", str(shutil.which("c++")))


def _mpi(_: Path) -> Iterator[Finding]:
    from tilewise.comm.mpi_library import find_mpi  # searches the loader's libraries

    try:
        mpi = find_mpi()
    except ConfigError:
        if named := read("TILEWISE_MPI", ""):
            advice = "build it with `tilewise build-mpi`, or unset the variable"
            yield Finding("MPI", "warning", f"none: TILEWISE_MPI is {shown(named)}, which is no file", advice)
        else:
            yield Finding("MPI", "ok", "none; only several hosts need it (pip install mpich)")
        return
    own_mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    mpiexec = own_mpiexec or shutil.which("mpiexec")
    description = f"{mpi.name}; {mpiexec or 'no mpiexec'}"
    if mpiexec is None:
        yield Finding(
            "MPI", "note", description, "only Slurm's srun can start several hosts; pip install mpich"
        )
    elif not _is_of(mpiexec, mpi.library):
        advice = "launcher and library should be of one installation: set --mpiexec or TILEWISE_MPI"
        yield Finding("MPI", "note", description, advice)
    elif shutil.which("ssh") is None:
        yield Finding(
            "MPI", "note", f"{description}; no ssh", "tilewise launch --hosts starts processes through ssh"
        )
    else:
        yield Finding("MPI", "ok", description)
    advice = (
        "connections have no authentication and no encryption: use several hosts only in trusted networks"
    )
    yield Finding("MPI's ports", "note", "open on this host while a command runs over several", advice)


def _is_of(mpiexec: str, library: Path | None) -> bool:
    """Whether a launcher may belong to a library, because it is next to the library's folder. True
    if the loader finds the library, because its folder is then unknown.
    """
    if library is None or not library.is_absolute():
        return True
    prefixes = {Path(mpiexec).parent.parent, Path(mpiexec).resolve().parent.parent}
    return bool(prefixes & {library.parent.parent, library.resolve().parent.parent})


def _read(path: Path) -> str | None:
    """A small file of the system without its last newline; None if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
