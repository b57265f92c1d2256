"""Tile programs over two processes, and kernels of users in them."""

import numpy as np
import pytest

import tilewise as tw
from native.distributed.test_group import two_processes
from native.programs.test_user_kernels import affine, library  # noqa: F401
from native.tiles.test_tile_examples import GATHERED, REDUCED, example
from tilewise import comm

ROWS, COLS = 4, 16


def results():
    """What the examples compute on two and on four devices."""
    rng = np.random.default_rng(5)
    products = []
    for name in (*GATHERED, *REDUCED):
        module = example(name)
        x, w = (rng.standard_normal((size, module.K), np.float32) for size in (module.M, module.N))
        products += [module.run(devices, x, w) for devices in (2, 4)]
    return products


def test_programs_over_processes_have_the_same_bits():
    """Several programs, one after another, on groups with one and two devices per process."""
    alone = results()
    with two_processes():
        assert example("07_producer_consumer").main(4) == 0
        for a, b in zip(results(), alone, strict=True):
            np.testing.assert_array_equal(a, b)


def user_program(kernel):
    """Each device computes from its rows into the next device's."""

    def program(x, y, s):
        n = comm.num_ranks()
        to = comm.symm_at(y, (comm.rank() + 1) % n)
        for t in comm.tiles(2):
            comm.kernel(kernel, y=to.tile(t, rows=ROWS), x=x.tile(t, rows=ROWS), plus=7, never=-1, factor=2.0)
            comm.notify(s[t], (comm.rank() + 1) % n)
        for t in comm.tiles(2):
            tile = comm.consume_token(y, comm.wait(s[t])).tile(t, rows=ROWS)
            comm.kernel("copy", out=x.tile(t, rows=ROWS), x=tile)

    return tw.tile_program(program)


def run_with(kernel):
    """The result of `user_program` on two devices."""
    with tw.DeviceGroup({"tp": 2}, memory_bytes=1 << 20) as group:
        x, y = (group.symm_tensor((2 * ROWS, COLS)) for _ in range(2))
        for device in range(2):
            x.write(np.full(x.shape, device, np.float32), device)
        user_program(kernel)(x, y, group.signals(2))
        return x.read(0)


DECLARED = {"operands": {"y": "out f32", "x": "in f32"}, "ints": ["plus", "never"], "floats": ["factor"]}


def test_kernels_of_users(library):  # noqa: F811
    """A kernel of a C library and a Numba cfunc, in one process, in two, and eagerly."""
    wanted = np.repeat(2.0 * 1 + 7 + np.arange(2 * ROWS)[:, None], COLS, axis=1).astype(np.float32)
    in_library = tw.tile_kernel((library._name, "affine"), name="affine_of_c", **DECLARED)
    compiled = tw.tile_kernel(affine, name="affine_of_numba", **DECLARED)
    for kernel in (in_library, compiled):
        np.testing.assert_array_equal(run_with(kernel), wanted)
    with two_processes():
        np.testing.assert_array_equal(run_with(in_library), wanted)
        with pytest.raises(tw.TilewiseError, match="must be one of a library"):
            run_with(compiled)
    devices = comm.local(2)
    x, y = (devices.symm_tensor((2 * ROWS, COLS)) for _ in range(2))
    x.numpy(1)[:] = 1
    devices.run(user_program(compiled).function, x, y, devices.signals(2))
    # eagerly, a kernel does not see the row of a loop
    np.testing.assert_array_equal(x.numpy(0), np.concatenate([wanted[:ROWS], wanted[:ROWS]]))
    with pytest.raises(tw.TilewiseError, match="keeps its name"):
        tw.tile_kernel(affine, name="matmul", **DECLARED)
    with pytest.raises(tw.TilewiseError, match="must be native code"):
        tw.tile_kernel(len, name="mine", **DECLARED)
    with pytest.raises(tw.TilewiseError, match="an operand must be in, out, inout"):
        tw.tile_kernel(affine, name="mine", operands={"x": " "})
