"""Traced tile programs give the results of the same functions called eagerly (`comm.local`)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise import comm

ROWS, COLS = 2, 16

Steps = st.lists(
    st.tuples(
        st.sampled_from(["push", "count", "pull", "root", "fence"]),
        st.integers(0, 3),  # distance of the other device, or the root
        st.booleans(),  # a tile loop, or repeated statements
        st.integers(0, 3),  # where the loop starts, per rank
    ),
    min_size=1,
    max_size=3,
)


def program_of(steps, tiles, fault=None):
    """A function that exchanges tiles of x, adds them up, and uses every primitive of traced programs."""

    def program(x, y, z, signals):
        me, n = comm.rank(), comm.num_ranks()
        for i, (kind, distance, is_loop, start) in enumerate(steps):
            s = signals[2 * tiles * i : 2 * tiles * (i + 1)]
            to, source = (me + distance) % n, (me + n - distance % n) % n

            def loop(is_loop=is_loop, start=start):
                return comm.tiles(tiles, first=me * start) if is_loop else range(tiles)

            def add(tile, t):
                comm.kernel("add", out=x.tile(t, rows=ROWS), a=x.tile(t, rows=ROWS), b=tile)

            if kind in ("push", "count"):
                for t in comm.tiles(tiles) if is_loop else range(tiles):
                    signal = s[0] if kind == "count" else s[t]
                    comm.put_signal(comm.symm_at(y, to).tile(t, rows=ROWS), x.tile(t, rows=ROWS), signal)
                for t in comm.tiles(tiles) if kind == "count" else loop():
                    token = comm.wait(s[0], t + 1) if kind == "count" else comm.wait(s[t])
                    whole = y if fault == "token" else comm.consume_token(y, token)
                    add(whole.tile(t, rows=ROWS), t)
            elif kind == "pull":
                for t in loop():
                    comm.kernel("copy", out=z.tile(t, rows=ROWS), x=x.tile(t, rows=ROWS))
                    comm.notify(s[t], to)
                for t in loop():
                    there = comm.consume_token(comm.symm_at(z, source), comm.wait(s[t]))
                    add(there.tile(t, rows=ROWS), t)
            elif kind == "root":
                root = distance % n
                if me == root:
                    for other in range(n):
                        if other != root:
                            comm.put_signal(comm.symm_at(y, other), x, s[0], 2)
                else:
                    whole = comm.consume_token(y, comm.wait(s[0], 2))
                    for t in loop():
                        add(whole.tile(t, rows=ROWS), t)
            else:
                comm.put(comm.symm_at(y, to)[:ROWS], x[:ROWS])
                comm.fence()
                comm.put(comm.symm_at(z, to)[:ROWS], x[ROWS : 2 * ROWS])
                comm.quiet()
                comm.notify(s[0], to)
                token = comm.wait(s[0])
                add(comm.consume_token(y, token)[:ROWS], 0)
                add(comm.consume_token(z, token)[:ROWS], 1)
            comm.barrier()

    return program


def run_both(steps, devices, tiles, runs=2):
    """Contents of all tensors after two runs, traced and eager."""
    program, rng = program_of(steps, tiles), np.random.default_rng(0)
    first = rng.integers(-8, 8, (devices, tiles * ROWS, COLS)).astype(np.float32)
    traced = tw.tile_program(program)
    shape = tiles * ROWS, COLS
    with tw.DeviceGroup({"tp": devices}, memory_bytes=1 << 20, num_signals=64) as group:
        tensors = [group.symm_tensor(shape) for _ in range(3)]
        signals = group.signals(2 * tiles * len(steps))
        for device in range(devices):
            tensors[0].write(first[device], device)
        for _ in range(runs):
            traced(*tensors, signals)
        results = [t.read(device) for t in tensors for device in range(devices)]
    group = comm.local(devices)
    copies = [group.symm_tensor(shape) for _ in range(3)]
    for device in range(devices):
        copies[0].numpy(device)[:] = first[device]
    for _ in range(runs):
        group.run(program, *copies, group.signals(2 * tiles * len(steps)))
    return results, [c.numpy(device) for c in copies for device in range(devices)]


@given(Steps, st.integers(2, 4), st.integers(2, 4))
@settings(max_examples=25)
def test_traced_programs_equal_eager_ones(steps, devices, tiles):
    """Random exchanges on two to four devices, run twice."""
    traced, eager = run_both(steps, devices, tiles)
    for a, b in zip(traced, eager, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_forgotten_token_is_found():
    """The programs above can fail: without its token, a read races with the put."""
    program = tw.tile_program(program_of([("push", 1, True, 0)], 2, fault="token"))
    with tw.DeviceGroup({"tp": 2}, memory_bytes=1 << 20, num_signals=64) as group:
        tensors = [group.symm_tensor((2 * ROWS, COLS)) for _ in range(3)]
        with pytest.raises(tw.TilewiseError, match="must be read after a wait"):
            program(*tensors, group.signals(4))


def test_ranks_along_an_axis():
    """On a mesh of two axes, devices that differ along one axis exchange their rows."""

    def program(x, y, s):
        n, me = comm.num_ranks("tp"), comm.rank("tp")
        there = comm.symm_at(y, (me + 1) % n, axis="tp")
        comm.put_signal(there, x, s[0])
        y = comm.consume_token(y, comm.wait(s[0]))
        comm.kernel("add", out=x, a=x, b=y)
        comm.notify(s[1], 0, axis="dp")
        if comm.rank("dp") == 0:
            comm.wait(s[1], comm.num_ranks("dp"))

    mesh = {"dp": 2, "tp": 3}
    with tw.DeviceGroup(mesh, memory_bytes=1 << 20) as group:
        x, y, s = group.symm_tensor((1, COLS)), group.symm_tensor((1, COLS)), group.signals(2)
        for device in range(6):
            x.numpy(device)[:] = 10**device
        traced = tw.tile_program(program)
        traced(x, y, s)
        assert [x.read(d)[0, 0] for d in range(6)] == [101, 11, 110, 101000, 11000, 110000]
        assert len(traced.trace(x, y, s).emitted.program.classes) == 2
    group = comm.local(mesh)
    x, y = group.symm_tensor((1, COLS)), group.symm_tensor((1, COLS))
    for device in range(6):
        x.numpy(device)[:] = 10**device
    group.run(program, x, y, group.signals(2))
    assert [x.numpy(d)[0, 0] for d in range(6)] == [101, 11, 110, 101000, 11000, 110000]


def test_columns_and_sizes_of_tiles():
    """Slices of columns that depend on the rank, and tiles of two sizes in one loop."""

    @tw.tile_program
    def program(x, y, z):
        first = comm.rank() * 8
        for t in comm.tiles(4):
            comm.kernel("copy", out=y.tile(t, rows=2)[:, 8:], x=x.tile(t, rows=2)[:, first : first + 8])
        for t in comm.tiles(2):
            comm.kernel("tree_add", out=z.tile(t, rows=4), x=[x.tile(t, rows=4), y.tile(t, rows=4)])
            comm.kernel("scale", out=z[8:].tile(t, rows=1), x=x[4:].tile(t, rows=1), factor=2.0)

    with tw.DeviceGroup({"tp": 2}, memory_bytes=1 << 16) as group:
        x, y, z = (group.symm_tensor((rows, COLS)) for rows in (8, 8, 10))
        values = np.random.default_rng(0).standard_normal((8, COLS), np.float32)
        x.write(values)
        program(x, y, z)
        for device in range(2):
            want = np.zeros((8, COLS), np.float32)
            want[:, 8:] = values[:, device * 8 : device * 8 + 8]
            np.testing.assert_array_equal(y.read(device), want)
            np.testing.assert_array_equal(z.read(device)[:8], values + want)
            np.testing.assert_array_equal(z.read(device)[8:], 2 * values[4:6])
