"""From a plan's programs to native ones, and the executor that offers what they need."""

from __future__ import annotations

from tilewise.core.dtypes import dtype
from tilewise.ir.program import Extent, Instruction
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
        devices,
        plan.settings.workers_per_device,
        [max(plan.arena_bytes, 64)] * devices,
        plan.builder.num_signals,
        plan.builder.num_handles,
        scratch_bytes=plan.builder.scratch_bytes,
        memory_limit_bytes=memory_limit_bytes,
        deadline_s=deadline_s,
    )


def _extent(extent: Extent) -> tuple[int, int, int]:
    return extent.constant, extent.symbol, extent.multiple


def assemble_program(plan: Plan, name: str) -> Program:
    """The native form of one of a plan's programs, checked for deadlock at the symbols' upper bounds."""
    native = Program(plan.mesh.num_devices)
    first_signals = plan.builder.first_signals()
    for device, program in enumerate(plan.programs[name]):
        for i, e in enumerate(program.entries):
            native.add_tensor(
                device,
                e.offset,
                _extent(e.extent),
                e.cols,
                e.stride,
                dtype(e.dtype).code,
                e.tile_rows,
                e.first_handle,
                list(program.aliases.get(i, ())),
            )
        used = {c.template for c in program.calls}
        numbers = {}
        for index, template in enumerate(program.templates):
            if index in used:
                numbers[index] = native.add_template(device, template.name)
                for instruction in template.instructions:
                    _add(native, device, numbers[index], instruction, first_signals[index])
        for call in program.calls:
            native.add_call(device, numbers[call.template], list(call.binding))
    native.finish(list(plan.builder.symbol_bounds))
    return native


def _add(native: Program, device: int, template: int, i: Instruction, first_signal: int) -> None:
    waits = [(w.signal_base + first_signal, w.per_index, w.increment) for w in i.waits]
    notifies = [(n.device, n.signal_base + first_signal, n.per_index) for n in i.notifies]
    operands = list(i.operands)
    native.add_instr(
        device,
        template,
        i.kernel,
        i.label,
        _extent(i.extent),
        i.step,
        operands,
        i.ints,
        i.floats,
        waits,
        notifies,
        i.priority,
    )
