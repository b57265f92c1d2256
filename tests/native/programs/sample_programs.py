"""Short ways to build small tile programs on real kernels, for the tests of this folder."""

from __future__ import annotations

import numpy as np

from tilewise.comm import Notify, Wait
from tilewise.ir.program import Instruction, TensorEntry
from tilewise.runtime import Access, Executor, Mode, Number, Operand, Program

ROWS, COLS, TILE_ROWS = 24, 8, 4
TENSOR_BYTES = 4096
TILES = ROWS // TILE_ROWS


def program_of(num_devices: int) -> Program:
    """Devices of a class each, which has their number; their team 0 is all of them."""
    program = Program()
    for _ in range(num_devices):
        program.add_device(program.add_class(), teams=[list(range(num_devices))])
    return program


def add_tensors(program: Program, device: int, count: int) -> list[int]:
    """`count` fp32 tensors of ROWS x COLS, one after the other."""
    return [
        program.add_tensor(
            device, tensor_entry(n * TENSOR_BYTES, ROWS, COLS, TILE_ROWS, first_handle=n * TILES)
        )
        for n in range(count)
    ]


def tensor_entry(offset: int, rows: int, cols: int, tile_rows: int, first_handle: int = 0) -> TensorEntry:
    """An fp32 tensor without gaps between its rows."""
    return TensorEntry((), offset, Number(rows), cols, cols, "f32", tile_rows, first_handle)


def view(executor: Executor, device: int, tensor: int) -> np.ndarray:
    """A tensor of `add_tensors` as an array on the device's memory."""
    raw = executor.buffer(device, tensor * TENSOR_BYTES, ROWS * COLS * 4)
    return raw.view(np.float32).reshape(ROWS, COLS)


def add_loop(program: Program, device: int, template: int, kernel: str, label: str, operands, **rest) -> None:
    """An instruction over all tiles of ROWS rows."""
    program.add_instr(device, template, Instruction(kernel, label, Number(ROWS), TILE_ROWS, operands, **rest))


def row(slot: int, access: Access = Access.IN) -> Operand:
    """Rows of this device's tensor."""
    return Operand(slot, Mode.ROW, access)


def share(slot: int, access: Access, part: int, peer: int = -1) -> Operand:
    """One of two shares of a tile's rows."""
    team, member = (-1, 0) if peer < 0 else (0, peer)
    return Operand(slot, Mode.ROWPART, access, team, member, 1, part, 2)


def all_reduce_program(epochs: int) -> Program:
    """Two devices: partial = partial + own; sum = partial of device 0 + partial of device 1, `epochs` times.

    Tensors: 0 own input, 1 partial, 2 sum. Signals per tile: 0 partial is there, 1 share is reduced (and the
    partial read), 2 share is read.
    """
    program = program_of(2)
    for me in range(2):
        peer = 1 - me
        tensors = add_tensors(program, me, 3)
        template = program.add_template(me, "all_reduce")
        add_loop(
            program, me, template, "add_f32", "produce",
            [row(1, Access.OUT), row(1), row(0)], notifies=[Notify(0, peer, 0, True)],
        )  # fmt: skip
        partials = [share(1, Access.NONE, me, peer=d) for d in range(2)]
        partials[me] = share(1, Access.IN, me)
        add_loop(
            program, me, template, "tree_add_f32", "reduce",
            [share(2, Access.OUT, me), Operand(0, null=True), *partials],
            waits=[Wait(0, True, 1)], notifies=[Notify(0, peer, TILES, True)], priority=1,
        )  # fmt: skip
        add_loop(
            program, me, template, "copy_pairs_f32", "gather",
            [share(2, Access.OUT, peer), share(2, Access.NONE, peer, peer=peer)],
            waits=[Wait(TILES, True, 1)], notifies=[Notify(0, peer, 2 * TILES, True)], priority=1,
        )  # fmt: skip
        add_loop(program, me, template, "", "partial read", [row(1)], waits=[Wait(TILES, True, 0)])
        add_loop(program, me, template, "", "share read", [row(2)], waits=[Wait(2 * TILES, True, 1)])
        for _ in range(epochs):
            program.add_call(me, template, tensors)
    program.finish([])
    return program
