"""All-gather + matmul: every device has some rows of x and some columns of w, and needs all rows.

Each device puts its rows into every other device's memory, tile by tile, and signals each tile. It
multiplies its own rows at once, and the rows of another device as they arrive: transfers and
computation overlap, and no device waits for all data before it starts.
"""

import sys

import numpy as np

import tilewise as tw
from tilewise import comm

M, K, N, ROWS = 512, 256, 512, 64


@tw.tile_program
def all_gather_matmul(x, gathered, w, out, ready):
    """out = all_gather(x) · wᵀ."""
    me, n = comm.rank(), comm.num_ranks()
    tiles = x.shape[0] // ROWS  # per device
    for step in range(1, n):
        remote = comm.symm_at(gathered, (me + step) % n)
        for t in comm.tiles(tiles):
            mine = me * tiles + t
            comm.put_signal(remote.tile(mine, rows=ROWS), x.tile(t, rows=ROWS), ready[mine])
    for t in comm.tiles(tiles):  # own rows need no transfer
        comm.matmul(out.tile(me * tiles + t, rows=ROWS), x.tile(t, rows=ROWS), w)
    for step in range(1, n):  # the device before sends to this one first
        for t in comm.tiles(tiles):
            theirs = (me - step) % n * tiles + t
            tile = comm.consume_token(gathered, comm.wait(ready[theirs])).tile(theirs, rows=ROWS)
            comm.matmul(out.tile(theirs, rows=ROWS), tile, w)


def main(devices: int = 2) -> int:
    """Run it, and compare with NumPy."""
    rng = np.random.default_rng(0)
    x_all = rng.standard_normal((M, K), dtype=np.float32)
    w_all = rng.standard_normal((N, K), dtype=np.float32)
    with tw.DeviceGroup({"tp": devices}) as group:
        x, gathered = group.symm_tensor((M // devices, K)), group.symm_tensor((M, K))
        w = group.symm_tensor((N // devices, K), packed=True)
        out, ready = group.symm_tensor((M, N // devices)), group.signals(M // ROWS)
        for device, (rows, part) in enumerate(zip(np.split(x_all, devices), np.split(w_all, devices))):
            x.write(rows, device)
            w.write(part, device)
        all_gather_matmul(x, gathered, w, out, ready)
        result = np.concatenate([out.numpy(device) for device in range(devices)], axis=1)
    error = np.abs(result - x_all @ w_all.T).max()
    print(f"largest difference from NumPy: {error:.1e}")
    return 0 if error < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
