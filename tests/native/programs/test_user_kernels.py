"""Kernels of users in tile programs: C functions and Numba cfuncs, by address."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numba
import numpy as np
import pytest
from numba import types

import tilewise
from native.programs.sample_programs import (
    COLS,
    ROWS,
    TILE_ROWS,
    add_loop,
    add_tensors,
    program_of,
    row,
    view,
)
from tilewise.core.errors import PlanError, TaskFailed
from tilewise.kernels.user import KERNEL_ARGS, TILE
from tilewise.runtime import Access, Mode, Operand, Program

NO_ROW = -1


@numba.extending.intrinsic
def pointer(_, address):
    """An address as a pointer."""

    def code(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.uint64), code


@numba.cfunc(types.int32(types.CPointer(numba.from_dtype(KERNEL_ARGS))))
def affine(args):
    """The kernel of tile_kernels.c."""
    of = numba.carray(args, 1)[0]
    tiles = numba.carray(pointer(of.tiles), (of.num_tiles,), TILE)
    ints = numba.carray(pointer(of.ints), (of.num_ints,), np.int64)
    factor = numba.carray(pointer(of.floats), (of.num_floats,), np.float64)[0]
    if of.row_begin == ints[1]:
        return 3
    y = numba.carray(pointer(tiles[0].data), (tiles[0].rows, tiles[0].stride), np.float32)
    x = numba.carray(pointer(tiles[1].data), (tiles[1].rows, tiles[1].stride), np.float32)
    for r in range(tiles[0].rows):
        for c in range(tiles[0].cols):
            y[r, c] = factor * x[r, c] + (ints[0] + of.row_begin + r)
    return 0


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    """tile_kernels.c, compiled as a user would."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or "cc"
    target = tmp_path_factory.mktemp("kernels") / "libtile_kernels.so"
    flags = [
        "-std=c99",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{tilewise.get_include()}",
    ]
    source = Path(__file__).with_name("tile_kernels.c")
    subprocess.run(
        [compiler, *flags, str(source), "-o", str(target)], check=True, capture_output=True, text=True
    )
    return ctypes.CDLL(str(target))


def address_in(library: ctypes.CDLL, kind: str) -> int:
    """The address of `affine` in C, or compiled by Numba."""
    if kind == "numba":
        return affine.address
    address = ctypes.cast(library.affine, ctypes.c_void_p).value
    assert address is not None
    return address


def program_with(address: int, failing_row: int) -> Program:
    """Two devices: device 0 computes from its tensor 0 into tensor 1 of device 1."""
    program = program_of(2)
    program.add_kernel("affine", address)
    for device in range(2):
        tensors = add_tensors(program, device, 2)
        template = program.add_template(device, "t")
        if device == 0:
            target = Operand(1, Mode.ROW, Access.NONE, 0, 1, role=Access.OUT)
            add_loop(
                program, 0, template, "affine", "maps", [target, row(0)],
                ints=(5, failing_row), floats=(2.0,), first=3,
            )  # fmt: skip
        program.add_call(device, template, tensors)
    program.finish([])
    return program


@pytest.mark.parametrize("kind", ["c", "numba"])
def test_a_kernel_of_the_user(make_executor, library, kind):
    """It gets tiles, integers, floats and the row; its status fails the task; it may write a peer's tile."""
    program = program_with(address_in(library, kind), NO_ROW)
    assert program.tasks(0)["tasks"][:, 3].tolist() == [3, 4, 5, 0, 1, 2]
    assert set(program.tasks(0)["views"][:, 7]) == {Access.IN, Access.OUT}
    executor = make_executor(program, 2)
    view(executor, 0, 0)[:] = np.random.default_rng(1).integers(-99, 99, (ROWS, COLS))
    executor.run(program, [])
    expected = 2 * view(executor, 0, 0) + np.float32(5) + np.arange(ROWS, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(view(executor, 1, 1), expected)
    assert executor.transfers() == {"maps": [ROWS * COLS, 0]}
    failing = program_with(address_in(library, kind), 2 * TILE_ROWS)
    with pytest.raises(TaskFailed, match="got 'status 3' from kernel 'affine'") as caught:
        executor.run(failing, [])
    assert (caught.value.op, caught.value.tile, caught.value.device) == ("maps", 2, 0)


@pytest.mark.parametrize(
    ("name", "address", "message"),
    [
        ("", 8, "a kernel must have an address, and a name"),
        ("copy_pairs_mine", 8, "does not begin with copy_pairs"),
        ("mine", 0, "got address 0 for 'mine'"),
        ("add_f32", 8, "a name of the kernel table; got 'add_f32'"),
    ],
)
def test_kernels_that_cannot_be_named(name, address, message):
    """A kernel needs an address and a new name."""
    program = program_of(1)
    with pytest.raises(PlanError, match=message):
        program.add_kernel(name, address)
        program.finish([])
