"""The machine of a benchmark: the processor, and the versions of everything compared."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["cpu_name", "machine", "packages"]


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def packages(*names: str) -> str:
    """Versions of Python, of this package, and of its peers."""
    versions = [f"Python {platform.python_version()}"]
    for name in ("tilewise", *names):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    return ", ".join(versions)


def machine(*names: str) -> str:
    """One line: processor, cores that this process may use, versions."""
    return f"machine: {cpu_name()}, {len(os.sched_getaffinity(0))} cores; {packages(*names)}"
