"""Builds native programs from a plan's programs, and the executor that runs them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from tilewise.comm import active_group
from tilewise.comm.group_executor import GroupExecutor
from tilewise.core.errors import PlanError
from tilewise.core.limits import cores_of_node
from tilewise.core.validation import Validator
from tilewise.files.reading import Unreadable
from tilewise.files.writing import name_in_utf8
from tilewise.ir.policy import ExecutionPolicy
from tilewise.ir.program import TileProgram
from tilewise.kernels.user import TileKernel, load_kernel, user_kernel
from tilewise.plan import PlanTables
from tilewise.plan.file import decode_plan, encode_plan
from tilewise.runtime import Executor, Program, device_overhead

__all__ = [
    "assemble_program",
    "device_overhead",
    "encode_program",
    "make_executor",
    "native_program",
    "open_devices",
    "read_program",
]

_validate = Validator("session", PlanError)


def make_executor(
    plan: PlanTables, memory_limit_bytes: int, deadline_s: float, offload_directory: str | Path | None = None
) -> Executor | GroupExecutor:
    """Allocate every device of a plan and start its workers, in all processes of the open group if
    there are several devices.

    Args:
        offload_directory: directory of the devices' files; by default that of temporary files.

    Raises:
        ResourceError: the devices exceed the limit or the machine's memory, or the directory cannot
            hold the files.
        PlanError: the policy binds workers to cores that do not exist or are too few.
    """
    devices = plan.mesh.num_devices
    options = {
        "num_devices": devices,
        "workers_per_device": plan.settings.workers_per_device,
        "arena_bytes": list(plan.arena_bytes),
        "num_signals": plan.num_signals,
        "num_handles": plan.num_handles,
        "scratch_bytes": plan.scratch_bytes,
        "file_bytes": plan.file_bytes,
        "memory_limit_bytes": memory_limit_bytes,
        "deadline_s": deadline_s,
        "cores": _cores(plan.settings.policy),
    }
    program = _Program(plan.program, plan.symbol_bounds)
    return _open(options, program, Path(offload_directory or gettempdir()))


def _cores(policy: ExecutionPolicy) -> list[int]:
    """The cores to which workers are bound, in order; empty: the system chooses.

    Raises:
        PlanError: there is no such NUMA node, or this process may use none of its cores.
    """
    if not policy.binds:
        return []
    allowed = sorted(os.sched_getaffinity(0))
    if policy.numa_node is None:
        return list(policy.cores or allowed)
    cores = [core for core in cores_of_node(policy.numa_node) if core in allowed]
    if not cores:
        _validate.invalid(
            "policy",
            "numa_node must be a node with cores that this process may use",
            str(policy.numa_node),
            "see /sys/devices/system/node, or name cores",
        )
    return cores


def open_devices(options: Mapping[str, Any], program: TileProgram) -> Executor | GroupExecutor:
    """Allocate devices without a plan and start their workers, in all processes of the open group
    if there are several devices.

    Args:
        options: options of the native executor.
        program: the program with which other processes begin.

    Raises:
        PlanError: there are fewer devices than processes.
        ResourceError: the devices exceed the machine's memory.
    """
    return _open(options, _Program(program, ()), Path(gettempdir()))


def _open(options: Mapping[str, Any], program: _Program, directory: Path) -> Executor | GroupExecutor:
    group = active_group()
    if group is not None and group.num_processes > 1 and options["num_devices"] > 1:
        return group.open_executor(_encode(program), options, str(directory))
    with name_in_utf8(directory) if options["file_bytes"] else nullcontext("") as name:
        return Executor(**options, file_directory=name)


@dataclass(frozen=True)
class _Program:
    """The part of a plan that another process needs to run it. `libraries` has the name, the library
    and the symbol of each kernel of a user.
    """

    program: TileProgram
    symbol_bounds: tuple[int, ...]
    libraries: tuple[tuple[str, str, str], ...] = ()


def assemble_program(plan: PlanTables) -> Program:
    """The native form of a plan's programs, each a named list of calls."""
    return native_program(plan.program, plan.symbol_bounds)


def encode_program(program: TileProgram) -> bytes:
    """A program without symbols and files, as `read_program` reads it."""
    return _encode(_Program(program, ()))


def _encode(sent: _Program) -> bytes:
    kernels = _user_kernels(sent.program)
    for kernel in kernels:
        if kernel.library is None:
            _validate.invalid(
                "kernel",
                "in several processes, a user's kernel must be one of a library",
                f"{kernel.name!r}, which has only an address",
                "register it as (library, symbol)",
            )
    libraries = tuple((k.name, *k.library) for k in kernels if k.library is not None)
    return encode_plan(replace(sent, libraries=libraries))


def _user_kernels(program: TileProgram) -> list[TileKernel]:
    """The kernels of users that a program calls."""
    names = {i.kernel for of in program.classes for t in of.templates for i in t.instructions}
    return [kernel for name in sorted(names) if (kernel := user_kernel(name)) is not None]


def read_program(content: bytes) -> Program:
    """The native form of a plan's programs, from what `make_executor` sent to another process.

    Raises:
        PlanError: it is damaged, or was written by another version; or as `native_program`.
    """
    try:
        sent = decode_plan(content, _Program)
    except Unreadable as error:
        raise PlanError(
            f"[session.assemble] a program must be what the leader sent; got other bytes: {error}; start the "
            "group again"
        ) from None
    for name, library, symbol in sent.libraries:
        load_kernel(name, library, symbol)
    return native_program(sent.program, sent.symbol_bounds)


def native_program(program: TileProgram, symbol_bounds: Sequence[int]) -> Program:
    """The native form of a tile program, checked for deadlock with the symbols at their upper
    bounds.

    Raises:
        PlanError: the program is malformed, or its devices would block each other.
    """
    native = Program()
    for kernel in _user_kernels(program):
        native.add_kernel(kernel.name, kernel.address)
    for of in program.classes:
        class_id = native.add_class(of.file_begin)
        for i, entry in enumerate(of.entries):
            native.add_tensor(class_id, entry, of.aliases.get(i, ()))
        for index, template in enumerate(of.templates):
            native.add_template(class_id, template.name)
            for instruction in template.instructions:
                native.add_instr(class_id, index, instruction, template.first_signal)
        for name, calls in of.calls.items():
            for call in calls:
                native.add_call(class_id, call.template, call.binding, call.numbers, name, call.hints)
    for device in program.devices:
        native.add_device(device.class_id, device.numbers, device.groups)
    native.finish(list(symbol_bounds))
    return native
