"""What two processes must have in common to compute the same bits: said by each worker, compared by the leader."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from tilewise import _native
from tilewise.core.errors import ConfigError

__all__ = ["own_facts", "own_host", "require_equal"]


def own_facts() -> dict[str, str]:
    """Of this process: Tilewise's version, the digest of its native module's file, the level of its kernels."""
    content = Path(str(_native.__file__)).read_bytes()
    return {
        "version": version("tilewise"),
        "native module": hashlib.sha256(content).hexdigest(),
        "instruction set": str(_native.kernels.isa_in_use()),
    }


def own_host() -> str:
    """What processes have in common that can map each other's memory: the same system, and the same view of it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    views = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "ipc", "uts")]
    return " ".join([boot, *views])


def require_equal(own: Mapping[str, str], other: Mapping[str, object], peer: str) -> None:
    """Refuse a worker that would compute something else.

    Raises:
        ConfigError: a fact differs; names it and both values.
    """
    for name, value in own.items():
        if other.get(name) != value:
            raise ConfigError(
                f"[comm.ProcessGroup] processes of a group must have the same {name}; got {value!r} in the leader and "
                f"{other.get(name)!r} in {peer}; start them from one installation, with one environment"
            )
