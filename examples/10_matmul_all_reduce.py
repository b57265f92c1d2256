"""Matmul + all-reduce: like matmul + reduce-scatter, and every device wants the sums of all rows.

The owner of a tile of rows adds the parts of all devices and puts the sum into every device's
memory, with a signal. Nothing waits for all tiles: products, sums and puts of different tiles
overlap.
"""

import sys

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
        comm.kernel(
            "tree_add", out=out.tile(row, rows=ROWS), x=[comm.symm_at(parts, device) for device in range(n)]
        )
    for step in range(1, n):
        for t in comm.tiles(tiles):
            row = me * tiles + t
            tile = out.tile(row, rows=ROWS)
            comm.put_signal(comm.symm_at(tile, (me + step) % n), tile, done[0])
    comm.wait(done[0], tiles * (n - 1))


def main(devices: int = 2) -> int:
    """Run it, and compare with NumPy."""
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((devices, M, K // devices), dtype=np.float32)
    ws = rng.standard_normal((devices, N, K // devices), dtype=np.float32)
    with tw.DeviceGroup({"tp": devices}) as group:
        x, w = group.symm_tensor(xs.shape[1:]), group.symm_tensor(ws.shape[1:], packed=True)
        part, out = group.symm_tensor((M, N)), group.symm_tensor((M, N))
        for device in range(devices):
            x.write(xs[device], device)
            w.write(ws[device], device)
        matmul_all_reduce(x, w, part, out, group.signals(M // ROWS), group.signals(1))
        wanted = sum(a @ b.T for a, b in zip(xs, ws))
        error = max(np.abs(out.numpy(device) - wanted).max() for device in range(devices))
    print(f"largest difference from NumPy: {error:.1e}")
    return 0 if error < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
