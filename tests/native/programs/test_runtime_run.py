"""Programs of real kernels on one and two devices: results, transfers, symbols, memory."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import numpy as np
import pytest

from native.programs.sample_programs import (
    COLS,
    ROWS,
    TILE_ROWS,
    add_loop,
    add_tensors,
    all_reduce_program,
    program_of,
    row,
    tensor_entry,
    view,
)
from tilewise.comm import Notify, Wait
from tilewise.core.errors import PlanError, ResourceError
from tilewise.core.sizes import format_bytes
from tilewise.ir.program import Instruction
from tilewise.runtime import Access, Executor, Mode, Number, Operand, Program, device_overhead


def one_device(symbolic: bool = False) -> Program:
    """tensor 2 = tensor 0 + tensor 1, tile by tile; with `symbolic`, only the first symbols[0] rows."""
    program = program_of(1)
    tensors = add_tensors(program, 0, 3)
    template = program.add_template(0, "sum")
    extent = Number.of_symbol(0) if symbolic else ROWS
    operands = [row(2, Access.OUT), row(0), row(1)]
    program.add_instr(0, template, Instruction("add_f32", "add", extent, TILE_ROWS, operands))
    program.add_call(0, template, tensors)
    program.finish([ROWS] if symbolic else [])
    return program


@pytest.mark.parametrize("workers", [1, 3])
def test_one_device_adds_tiles(make_executor, workers):
    """A program's tasks compute on the arena that buffer() returns."""
    executor = make_executor(one_device(), 1, workers=workers)
    x = np.random.default_rng(0).standard_normal((2, ROWS, COLS), dtype=np.float32)
    view(executor, 0, 0)[:], view(executor, 0, 1)[:] = x
    executor.run(one_device(), [])
    np.testing.assert_array_equal(view(executor, 0, 2), x[0] + x[1])


def test_symbols_bound_loops(make_executor):
    """Only the rows within a symbol's value are written; values above its bound are rejected."""
    program = one_device(symbolic=True)
    executor = make_executor(program, 1)
    view(executor, 0, 0)[:] = 1
    executor.run(program, [TILE_ROWS + 1])
    result = view(executor, 0, 2)
    assert (result[: TILE_ROWS + 1] == 1).all() and (result[TILE_ROWS + 1 :] == 0).all()
    with pytest.raises(PlanError, match=r"symbol 0 must lie in \[0, 24\]; got 25"):
        executor.run(program, [ROWS + 1])


@pytest.mark.parametrize(("workers", "window"), [(1, 512), (2, 512), (2, 3)])
def test_all_reduce_of_two_devices(make_executor, workers, window):
    """Reduce-scatter and gather by tile tasks give both devices the sum, epoch after epoch."""
    epochs = 50
    program = all_reduce_program(epochs)
    executor = make_executor(program, 2, workers=workers, window=window)
    own = np.random.default_rng(1).integers(-9, 9, (2, ROWS, COLS)).astype(np.float32)
    for d in range(2):
        view(executor, d, 0)[:] = own[d]
    for runs in (1, 2):
        executor.run(program, [])
        for d in range(2):
            np.testing.assert_array_equal(view(executor, d, 2), runs * epochs * (own[0] + own[1]))


def test_transfers_equal_theory(make_executor):
    """An all-reduce of two devices reads 2(n-1)/n elements per device, half of them in the reduction."""
    program = all_reduce_program(3)
    executor = make_executor(program, 2)
    executor.run(program, [])
    half = 3 * ROWS * COLS // 2
    assert executor.transfers() == {"reduce": [half, half], "gather": [half, half]}
    executor.reset_transfers()
    assert executor.transfers() == {}


def test_memory_limit(make_executor):
    """All memory that devices reserve counts; beyond the limit, a ResourceError (a MemoryError) has both sizes."""
    own = device_overhead(workers=1, signals=3, handles=5, scratch_bytes=1 << 16)
    assert own["scratch"] == 1 << 16 and own["signals"] == 3 * 128 and own["engine"] > 0
    need = 2 * (4096 + sum(own.values()))
    offered = {
        "num_devices": 2,
        "arena_bytes": [4096, 4096],
        "num_signals": 3,
        "num_handles": 5,
        "scratch_bytes": 1 << 16,
    }
    with pytest.raises(
        ResourceError, match=f"{format_bytes(need)} against {format_bytes(need - 1)}"
    ) as caught:
        Executor(**offered, memory_limit_bytes=need - 1)
    assert isinstance(caught.value, MemoryError)
    executor = Executor(**offered, memory_limit_bytes=need)
    assert sum(executor.allocated_bytes()) == need
    executor.close()
    with pytest.raises(ResourceError, match="map"):
        Executor(arena_bytes=[1 << 60])


def test_buffers_outlive_the_executor():
    """A buffer keeps its memory alive after close and collection."""
    executor = Executor(arena_bytes=[4096])
    memory = executor.buffer(0, 64, 128)
    executor.close()
    del executor
    gc.collect()
    memory[:] = 7
    assert memory.flags.writeable and memory.sum() == 7 * 128


def test_a_buffer_outside_the_arena_is_rejected():
    """A buffer outside the arena is refused."""
    executor = Executor(arena_bytes=[4096])
    with pytest.raises(PlanError, match="inside the device's arena"):
        executor.buffer(0, 4000, 97)
    executor.close()


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        (Operand(9, Mode.ROW), "slot 9 of 3"),
        (Operand(0, 7), "mode must be 0 to 6; got 7"),
        (
            Operand(0, Mode.ROW, 0, 5),
            "an operand's peer must be in a device group of its device; got device group 5 of 1",
        ),
        (
            Operand(0, Mode.ROW, 0, 0, 2),
            "an operand's peer must be a member of its device group; got member 2 of 2",
        ),
        (
            Operand(0, Mode.ROW, 0, 0, Number.of_device(0)),
            "number of the device must be one of its class's 0; got 0",
        ),
        (
            Operand(0, Mode.ROW, 0, 0, Number.of_symbol(0)),
            "a member must have a source that fits it; got source 1",
        ),
        (
            Operand(0, Mode.ROWS, part=Number.of_call(2)),
            "must have the numbers that its template uses; got 0 of 3",
        ),
        (Operand(0, Mode.ROWS, part=-1), "0 <= part"),
    ],
)
def test_malformed_programs_are_rejected(operand, message):
    """finish() names the fault of an operand."""
    program = program_of(2)
    tensors = add_tensors(program, 0, 3)
    add_tensors(program, 1, 3)
    template = program.add_template(0, "t")
    add_loop(program, 0, template, "copy_f32", "op", [operand, row(1)])
    program.add_call(0, template, tensors)
    with pytest.raises(PlanError, match=message):
        program.finish([])


def test_an_unknown_kernel_is_rejected():
    """A kernel that is not in the native table is named."""
    program = program_of(1)
    template = program.add_template(0, "t")
    program.add_instr(0, template, Instruction("no_such_kernel", "op", 1, 1, []))
    with pytest.raises(PlanError, match="'no_such_kernel'"):
        program.finish([])


@pytest.mark.parametrize(
    "wrong",
    [
        {"extent": (1, 2)},
        {"ints": [1, (1, 2, 3)]},
        {"operands": [(0,)]},
        {"waits": [(0, False)]},
    ],
)
def test_a_field_of_another_type_is_named(wrong):
    """The TypeError names the field of the instruction."""
    program = program_of(1)
    template = program.add_template(0, "t")
    fields = {"kernel": "", "label": "op", "extent": 1, "step": 1, "operands": [], **wrong}
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} has a value of another type"):
        program.add_instr(0, template, Instruction(**fields))


def test_missing_and_unknown_fields_are_rejected():
    """Fields and options are matched by name."""
    program = program_of(1)
    with pytest.raises(AttributeError, match="kernel"):
        program.add_instr(0, program.add_template(0, "t"), object())
    with pytest.raises(PlanError, match=r"f32, bf16, i32 or f64; got 'f16'"):
        program.add_tensor(0, tensor_entry(0, 1, 1, 1)._replace(dtype="f16"))
    with pytest.raises(TypeError, match=r"unknown; expected one of num_devices, .*deadline_s"):
        Executor(arena_bytes=[64], deadline=1.0)
    with pytest.raises(TypeError, match="window has a value of another type or out of its range; got str"):
        Executor(arena_bytes=[64], window="512")
    with pytest.raises(TypeError, match=r"window has .* out of its range; got int"):
        Executor(arena_bytes=[64], window=1 << 64)
    with pytest.raises(PlanError, match="num_signals and num_handles"):  # indices of 32 bits
        Executor(arena_bytes=[64], num_handles=1 << 32)


@pytest.mark.parametrize("struct", [Number, Operand, Wait, Notify], ids=lambda struct: struct.__name__)
def test_named_tuples_have_the_order_of_their_native_structs(struct):
    """Native code reads them by position, so their fields must have the order of the structs."""
    text = (
        Path(__file__).parents[3] / "native" / "programs" / ("number.h" if struct is Number else "program.h")
    ).read_text()
    body = re.search(rf"^struct {struct.__name__} \{{\n(.*?)^\}};", text, re.M | re.S)[1]
    assert re.findall(r"^  (?:\w+) (\w+)(?: = [^;(]*)?;", body, re.M) == list(struct._fields)


def test_deadlocks_are_rejected():
    """Devices that wait for each other are named before anything runs."""
    program = program_of(2)
    for d in range(2):
        template = program.add_template(d, "t")
        program.add_instr(d, template, Instruction("", "wait", 1, 0, [], waits=[Wait(0, False, 1)]))
        raises = [Notify(0, 1 - d, 0, False)]
        program.add_instr(d, template, Instruction("", "raise", 1, 0, [], notifies=raises))
        program.add_call(d, template, [])
    with pytest.raises(PlanError, match=r"device 0 waiting for ever in 'wait'\[0\] for signal 0 to reach 1"):
        program.finish([])
