"""Matmul + reduce-scatter: every device has some columns of x and of w, so each product is a part of
every row's sum; each device wants the sums of some rows.

A device multiplies the rows that others want first and signals every tile. The owner of a row adds
the parts of all devices as soon as they exist, reading them where they are. The parts are added as
a tree in the order of the devices, so the bits do not depend on who is first.
"""

import sys

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
        comm.kernel(
            "tree_add", out=out.tile(t, rows=ROWS), x=[comm.symm_at(parts, device) for device in range(n)]
        )


def main(devices: int = 2) -> int:
    """Run it, and compare with NumPy."""
    rng = np.random.default_rng(0)
    x_all = rng.standard_normal((M, K), dtype=np.float32)
    w_all = rng.standard_normal((N, K), dtype=np.float32)
    with tw.DeviceGroup({"tp": devices}) as group:
        x, w = group.symm_tensor((M, K // devices)), group.symm_tensor((N, K // devices), packed=True)
        part, out = group.symm_tensor((M, N)), group.symm_tensor((M // devices, N))
        ready = group.signals(M // ROWS)
        for device in range(devices):
            x.write(np.split(x_all, devices, axis=1)[device], device)
            w.write(np.split(w_all, devices, axis=1)[device], device)
        matmul_reduce_scatter(x, w, part, out, ready)
        result = np.concatenate([out.numpy(device) for device in range(devices)])
    error = np.abs(result - x_all @ w_all.T).max()
    print(f"largest difference from NumPy: {error:.1e}")
    return 0 if error < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
