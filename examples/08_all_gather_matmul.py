"""All-gather + matmul: every device has some rows of x and some columns of w, and needs all rows.

Each device puts its rows into every other device's memory, tile by tile, and signals each tile. It
multiplies its own rows at once, and the rows of another device as they arrive: transfers and
computation overlap, and no device waits for all data before it starts.
"""

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


def run(devices: int, x_all: np.ndarray, w_all: np.ndarray) -> np.ndarray:
    """x · wᵀ on some devices, each with some rows of x and some columns of the result."""
    m, k, n = M // devices, K, N // devices
    with tw.DeviceGroup({"tp": devices}) as group:
        x, gathered, out = group.symm_tensor((m, k)), group.symm_tensor((M, k)), group.symm_tensor((M, n))
        w = group.symm_tensor((n, k), packed=True)
        for device in range(devices):
            x.write(np.split(x_all, devices)[device], device)
            w.write(np.split(w_all, devices)[device], device)
        all_gather_matmul(x, gathered, w, out, group.signals(M // ROWS))
        return np.concatenate([out.read(device) for device in range(devices)], axis=1)


def main(devices: int = 2) -> int:
    """Run it on random numbers, and compare with NumPy."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((size, K), np.float32) for size in (M, N))
    error = np.abs(run(devices, x, w) - x @ w.T).max()
    print(f"largest difference from NumPy: {error:.1e}")
    return int(error > 1e-3)


if __name__ == "__main__":
    raise SystemExit(main())
