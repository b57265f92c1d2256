"""Matmul + reduce-scatter: every device has some columns of x and of w, so each product is a part of
every row's sum; each device wants the sums of some rows.

A device multiplies the rows that others want first and signals every tile. The owner of a row adds
the parts of all devices as soon as they exist, reading them where they are. The parts are added as
a tree in the order of the devices, so the bits do not depend on who is first.
"""

import numpy as np

import tilewise as tw
from tilewise import comm

M, K, N, ROWS = 512, 512, 256, 64


@tw.tile_program
def matmul_reduce_scatter(x, w, part, out, ready):
    """out = the device's rows of the sum over devices of x · wᵀ."""
    me, n = comm.rank(), comm.num_ranks()
    tiles = out.shape[0] // ROWS  # per device
    for step in range(1, n + 1):
        owner = (me + step) % n  # the own rows are the last
        for t in comm.tiles(tiles):
            row = owner * tiles + t
            comm.matmul(part.tile(row, rows=ROWS), x.tile(row, rows=ROWS), w)
            comm.notify(ready[row], owner)
    for t in comm.tiles(tiles):
        row = me * tiles + t
        parts = comm.consume_token(part, comm.wait(ready[row], n)).tile(row, rows=ROWS)
        every = [comm.symm_at(parts, device) for device in range(n)]
        comm.kernel("tree_add", out=out.tile(t, rows=ROWS), x=every)


def run(devices: int, x_all: np.ndarray, w_all: np.ndarray) -> np.ndarray:
    """x · wᵀ on some devices, each with some columns of x and w and some rows of the result."""
    m, k = M // devices, K // devices
    with tw.DeviceGroup({"tp": devices}) as group:
        x, w = group.symm_tensor((M, k)), group.symm_tensor((N, k), packed=True)
        part, out = group.symm_tensor((M, N)), group.symm_tensor((m, N))
        for device in range(devices):
            x.write(np.split(x_all, devices, axis=1)[device], device)
            w.write(np.split(w_all, devices, axis=1)[device], device)
        matmul_reduce_scatter(x, w, part, out, group.signals(M // ROWS))
        return np.concatenate([out.read(device) for device in range(devices)])


def main(devices: int = 2) -> int:
    """Run it on random numbers, and compare with NumPy."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((size, K), np.float32) for size in (M, N))
    error = np.abs(run(devices, x, w) - x @ w.T).max()
    print(f"largest difference from NumPy: {error:.1e}")
    return int(error > 1e-3)


if __name__ == "__main__":
    raise SystemExit(main())
