"""Matmul + all-reduce: like matmul + reduce-scatter, and every device wants the sums of all rows.

The owner of a tile adds the parts of all devices and puts the sum into every device's memory.
Nothing waits for all tiles: products, sums and puts of different tiles overlap.
"""

import numpy as np

import tilewise as tw
from tilewise import comm

M, K, N, ROWS = 512, 512, 256, 64


@tw.tile_program
def matmul_all_reduce(x, w, part, out, ready, done):
    """out = the sum over devices of x · wᵀ."""
    me, n = comm.rank(), comm.num_ranks()
    tiles = x.shape[0] // ROWS // n  # per device
    for step in range(1, n + 1):
        owner = (me + step) % n
        for t in comm.tiles(tiles):
            row = owner * tiles + t
            comm.matmul(part.tile(row, rows=ROWS), x.tile(row, rows=ROWS), w)
            comm.notify(ready[row], owner)
    for t in comm.tiles(tiles):
        row = me * tiles + t
        parts = comm.consume_token(part, comm.wait(ready[row], n)).tile(row, rows=ROWS)
        every = [comm.symm_at(parts, d) for d in range(n)]
        comm.kernel("tree_add", out=out.tile(row, rows=ROWS), x=every)
    for step in range(1, n):
        for t in comm.tiles(tiles):
            tile = out.tile(me * tiles + t, rows=ROWS)
            comm.put_signal(comm.symm_at(tile, (me + step) % n), tile, done[0])
    comm.wait(done[0], tiles * (n - 1))


def run(devices: int, x_all: np.ndarray, w_all: np.ndarray) -> np.ndarray:
    """x · wᵀ on some devices, each with some columns of x and w and the whole result."""
    with tw.DeviceGroup({"tp": devices}) as group:
        x, part, out = (group.symm_tensor((M, cols)) for cols in (K // devices, N, N))
        w = group.symm_tensor((N, K // devices), packed=True)
        for device in range(devices):
            for tensor, whole in ((x, x_all), (w, w_all)):
                tensor.write(np.split(whole, devices, axis=1)[device], device)
        matmul_all_reduce(x, w, part, out, group.signals(M // ROWS), group.signals(1))
        return out.read(devices - 1)


def main(devices: int = 2) -> int:
    """Run it on random numbers, and compare with NumPy."""
    x, w = (np.random.default_rng(rows).standard_normal((rows, K), np.float32) for rows in (M, N))
    error = np.abs(run(devices, x, w) - x @ w.T).max()
    print(f"largest difference from NumPy: {error:.1e}")
    return int(error > 1e-3)


if __name__ == "__main__":
    raise SystemExit(main())
