"""From a plan's programs to native ones, and the executor that offers what they need."""

from __future__ import annotations

from tilewise.plan import Plan
from tilewise.runtime import Executor, Program, device_overhead

__all__ = ["assemble_program", "device_overhead", "make_executor"]


def make_executor(plan: Plan, memory_limit_bytes: int, deadline_s: float) -> Executor:
    """Allocate every device of a plan and start its workers.

    Raises:
        ResourceError: the devices exceed the limit or the machine's memory.
    """
    devices = plan.mesh.num_devices
    return Executor(
        num_devices=devices,
        workers_per_device=plan.settings.workers_per_device,
        arena_bytes=[plan.arena_bytes] * devices,
        num_signals=plan.num_signals,
        num_handles=plan.num_handles,
        scratch_bytes=plan.scratch_bytes,
        memory_limit_bytes=memory_limit_bytes,
        deadline_s=deadline_s,
    )


def assemble_program(plan: Plan, name: str) -> Program:
    """The native form of one of a plan's programs, checked for deadlock at the symbols' upper bounds."""
    native = Program(plan.mesh.num_devices)
    first_signals = plan.first_signals
    for device, program in enumerate(plan.programs[name]):
        for i, entry in enumerate(program.entries):
            native.add_tensor(device, entry, program.aliases.get(i, ()))
        used = {c.template for c in program.calls}
        numbers = {}
        for index, template in enumerate(program.templates):
            if index in used:
                numbers[index] = native.add_template(device, template.name)
                for instruction in template.instructions:
                    native.add_instr(device, numbers[index], instruction, first_signals[index])
        for call in program.calls:
            native.add_call(device, numbers[call.template], call.binding)
    native.finish(list(plan.symbol_bounds))
    return native
