"""Rank swizzle: a loop over all tiles that starts at the device's own.

All-gather + matmul, where each device reads the others' tiles instead of receiving them. With
`tiles(n, first=...)` the loop visits all tiles in a circle. Device 0 starts with tile 0, device 1
with its own first tile, and so on: each starts with what it has, and two devices do not read from
the same third one at the same time. Only the order differs between devices, not the result.
"""

import numpy as np

import tilewise as tw
from tilewise import comm

M, K, N, ROWS = 512, 256, 512, 64


@tw.tile_program
def swizzled(x, gathered, w, out, ready):
    """out = all_gather(x) · wᵀ."""
    me, n = comm.rank(), comm.num_ranks()
    tiles = x.shape[0] // ROWS  # per device
    for t in comm.tiles(tiles):
        mine = me * tiles + t
        comm.get(gathered.tile(mine, rows=ROWS), x.tile(t, rows=ROWS))
        for device in range(n):
            comm.notify(ready[mine], device)
    for t in comm.tiles(n * tiles, first=me * tiles):
        owner = t // tiles
        there = comm.symm_at(gathered, owner)
        tile = comm.consume_token(there, comm.wait(ready[t])).tile(t, rows=ROWS)
        comm.matmul(out.tile(t, rows=ROWS), tile, w)


def run(devices: int, x_all: np.ndarray, w_all: np.ndarray) -> np.ndarray:
    """x · wᵀ on some devices, each with some rows of x and some columns of the result."""
    m, k, n = M // devices, K, N // devices
    with tw.DeviceGroup({"tp": devices}) as group:
        x, gathered, out = group.symm_tensor((m, k)), group.symm_tensor((M, k)), group.symm_tensor((M, n))
        w = group.symm_tensor((n, k), packed=True)
        for device in range(devices):
            x.write(np.split(x_all, devices)[device], device)
            w.write(np.split(w_all, devices)[device], device)
        swizzled(x, gathered, w, out, group.signals(M // ROWS))
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
