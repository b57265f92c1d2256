"""What benchmarks of several parts share: the machine, the versions of everything compared, and the
time of each part.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["cpu_name", "machine", "packages", "run_parts"]


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


def run_parts(
    parts: Mapping[str, Callable[[argparse.Namespace, float], None]],
    shares: Mapping[str, float],
    options: argparse.Namespace,
    *names: str,
) -> None:
    """Print the machine, then run the parts `options.only`, in order.

    Args:
        parts: get the options, and the time (`time.monotonic`) by which they begin no further turn.
        shares: how `options.minutes` are divided among the parts.
        names: packages whose versions are printed.
    """
    print(machine(*names))
    print(f"load before the run: {os.getloadavg()[0]:.1f}")
    began, share = time.monotonic(), 0.0
    whole = sum(shares[part] for part in options.only)
    for part in options.only:
        share += shares[part] / whole
        print(f"-- {part}", flush=True)
        parts[part](options, began + share * options.minutes * 60)
