"""The facts that must be equal in two processes, so that they compute the same bits and take part
in one run. Each worker reports its facts, and the leader compares them.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from tilewise import _native
from tilewise.core.errors import ConfigError

__all__ = ["own_command", "own_facts", "own_host", "require_equal"]

_SHOWN = 200  # characters of a value that are shown
_SHOWN_BEFORE = 40  # characters that are shown before the first difference
_REMEDIES = {"command": "start all processes of a run with the same command line"}
_REMEDY = "start them from one installation, with one environment"


def own_facts() -> dict[str, str]:
    """The facts of this process: Tilewise's version, the digest of its native module's file, the
    level of its kernels.
    """
    content = Path(str(_native.__file__)).read_bytes()
    return {
        "version": version("tilewise"),
        "native module": hashlib.sha256(content).hexdigest(),
        "instruction set": str(_native.kernels.isa_in_use()),
    }


def own_command() -> dict[str, str]:
    """The command that a launcher gave this process. Only the leader executes it, so a worker's
    different configuration would otherwise be ignored.
    """
    program, *words = sys.argv or [""]
    return {"command": shlex.join([Path(program).name, *words])}


def own_host() -> str:
    """A value that is equal for processes that can map each other's memory: those of one system
    with the same view of it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    views = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "ipc", "uts")]
    return " ".join([boot, *views])


def require_equal(own: Mapping[str, str], other: Mapping[str, object], peer: str) -> None:
    """Reject a worker that would not compute the same as this process.

    Raises:
        ConfigError: a fact differs. The message names the fact and both values, shortened to where
            they begin to differ.
    """
    for name, value in own.items():
        if (other_value := other.get(name)) != value:
            same = _common_length(value, other_value) if isinstance(other_value, str) else 0
            raise ConfigError(
                f"[comm.ProcessGroup] processes of a group must have the same {name}; got {_shown(value, same)} in the "
                f"leader and {_shown(other_value, same)} in {peer}; {_REMEDIES.get(name, _REMEDY)}"
            )


def _common_length(one: str, other: str) -> int:
    """The length of the common prefix of two strings."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _shown(value: object, num_same: int) -> str:
    """A value for a message: the part around the first difference."""
    if not isinstance(value, str) or len(value) <= _SHOWN:
        return repr(value)
    begin = max(0, num_same - _SHOWN_BEFORE)
    before, after = "..." if begin else "", "..." if len(value) > begin + _SHOWN else ""
    return repr(f"{before}{value[begin : begin + _SHOWN]}{after}")
