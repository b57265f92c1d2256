"""The memory that the processes of one host share for an executor over several processes: which
pieces there are, and the order in which their descriptors are passed on.

The order is that of `make_memory`: the memory of the device group (for signals between processes),
the arenas of devices, then the files of devices if the plan offloads tensors. -1, or an empty path,
stands for memory on another host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tilewise._native.programs import group_bytes, make_spill_file
from tilewise.comm.memory import shared_memory
from tilewise.core.environment import on_host
from tilewise.core.errors import ResourceError
from tilewise.files.writing import name_in_utf8

__all__ = ["executor_files", "make_memory", "needed_memory"]


def needed_memory(options: Mapping[str, Any], file_directory: str, num_processes: int) -> dict[str, Any]:
    """The memory to allocate, as plain values.

    Args:
        options: options of the native executor.
        file_directory: directory of the devices' files; each host resolves the path itself.
        num_processes: number of processes on all hosts.
    """
    sizes = {name: options[name] for name in ("arena_bytes", "file_bytes")}
    return {"group_bytes": group_bytes(num_processes), "file_directory": file_directory, **sizes}


def make_memory(needed: Mapping[str, Any], is_own: Sequence[bool], own: Callable[[int], int]) -> list[int]:
    """Allocate memory for the processes of this host, and return its descriptors.

    Args:
        needed: the result of `needed_memory`.
        is_own: per device, whether it is on this host.
        own: called with every descriptor when it is created, so that the caller can close it later.

    Returns:
        Descriptors of the device group's memory, of every device's arena, and of every device's
        file.

    Raises:
        ResourceError: the system has not enough memory or descriptors. The message names the host
            if there may be several.
    """
    named = name_in_utf8(Path(needed["file_directory"])) if needed["file_bytes"] else nullcontext("")
    with named as directory, _naming_host():
        device_group = own(shared_memory(needed["group_bytes"], "device_group"))
        arenas = [
            own(shared_memory(size, f"device-{device}")) if is_local else -1
            for device, (size, is_local) in enumerate(zip(needed["arena_bytes"], is_own, strict=True))
        ]
        files = [
            own(make_spill_file(directory, needed["file_bytes"])) if is_local else -1
            for is_local in is_own
            if needed["file_bytes"]
        ]
    return [device_group, *arenas, *files]


@contextmanager
def _naming_host() -> Iterator[None]:
    try:
        yield
    except ResourceError as error:
        raise ResourceError(f"{error}{on_host()}") from None


def executor_files(made: Sequence[int], num_devices: int) -> dict[str, Any]:
    """The options of a native executor that say which descriptor belongs to what."""
    device_group, *memory = made
    return {
        "group_file": device_group,
        "arena_files": memory[:num_devices],
        "spill_files": memory[num_devices:],
    }
