"""Helpers that build small tile programs on real kernels."""

from __future__ import annotations

import numpy as np

from tilewise.comm import Notify, Wait
from tilewise.ir.program import Instruction, TensorEntry
from tilewise.runtime import Access, Executor, Mode, Number, Operand, Program

ROWS, COLS, TILE_ROWS = 24, 8, 4
TENSOR_BYTES = 4096
TILES = ROWS // TILE_ROWS


def program_of(num_devices: int) -> Program:
    """Devices with a class each; the class has the device's number; device group 0 has all devices."""
    program = Program()
    for _ in range(num_devices):
        program.add_device(program.add_class(), groups=[list(range(num_devices))])
    return program


def add_tensors(program: Program, device: int, count: int) -> list[int]:
    """Add `count` contiguous fp32 tensors of ROWS x COLS."""
    return [
        program.add_tensor(
            device, tensor_entry(n * TENSOR_BYTES, ROWS, COLS, TILE_ROWS, first_handle=n * TILES)
        )
        for n in range(count)
    ]


def tensor_entry(offset: int, rows: int, cols: int, tile_rows: int, first_handle: int = 0) -> TensorEntry:
    """An fp32 tensor without gaps between rows."""
    return TensorEntry((), offset, Number(rows), cols, cols, "f32", tile_rows, first_handle)


def view(executor: Executor, device: int, tensor: int) -> np.ndarray:
    """A tensor of `add_tensors` as an array on the device's memory."""
    raw = executor.buffer(device, tensor * TENSOR_BYTES, ROWS * COLS * 4)
    return raw.view(np.float32).reshape(ROWS, COLS)


def add_loop(program: Program, device: int, template: int, kernel: str, label: str, operands, **rest) -> None:
    program.add_instr(device, template, Instruction(kernel, label, Number(ROWS), TILE_ROWS, operands, **rest))


def row(slot: int, access: Access = Access.IN) -> Operand:
    return Operand(slot, Mode.ROW, access)


def all_reduce_program(epochs: int) -> Program:
    """Two devices of one class: partial = partial + own; sum = partial of device 0 + partial of
    device 1.

    `epochs` times. Tensors: 0 own input, 1 partial, 2 sum. Signals per tile: 0 partial is complete,
    1 share is reduced (and the partial read), 2 share is read. Number 0 of a device is its index in
    the device group, number 1 its peer's.
    """
    program = Program()
    one = program.add_class()
    me, peer = Number.of_device(0), Number.of_device(1)
    tensors = add_tensors(program, one, 3)
    template = program.add_template(one, "all_reduce")

    def share(slot: int, access: Access, part: Number, group: int = -1, member: int | Number = 0) -> Operand:
        return Operand(slot, Mode.ROWPART, access, group, member, 1, part, 2)

    def reported(signal: int) -> list[Notify]:
        return [Notify(0, member, signal, True) for member in range(2)]

    def awaited(signal: int, increment: int = 1) -> list[Wait]:
        return [Wait(signal, True, increment, 0, member) for member in range(2)]

    add_loop(
        program, one, template, "add_f32", "produce",
        [row(1, Access.OUT), row(1), row(0)], notifies=reported(0),
    )  # fmt: skip
    partials = [share(1, Access.IN, me, 0, member) for member in range(2)]
    add_loop(
        program, one, template, "tree_add_f32", "reduce",
        [share(2, Access.OUT, me), Operand(0, null=True), *partials],
        waits=awaited(0), notifies=reported(TILES), priority=1,
    )  # fmt: skip
    add_loop(
        program, one, template, "copy_pairs_f32", "gather",
        [share(2, Access.OUT, peer), share(2, Access.NONE, peer, 0, peer)],
        waits=awaited(TILES), notifies=reported(2 * TILES), priority=1,
    )  # fmt: skip
    add_loop(program, one, template, "", "partial read", [row(1)], waits=awaited(TILES, 0))
    add_loop(program, one, template, "", "share read", [row(2)], waits=awaited(2 * TILES))
    for _ in range(epochs):
        program.add_call(one, template, tensors)
    for place in range(2):
        program.add_device(one, [place, 1 - place], [[0, 1]])
    program.finish([])
    return program
