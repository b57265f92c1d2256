"""Producer and consumer: one device sends tiles, the next one computes with them as they arrive.

The queue has room for two tiles, and a signal for each place. The producer puts a tile and signals;
before it overwrites a place, it waits until the consumer has read the tile that was there. The
function is traced once: its branches on `rank()` give the producer's and the consumer's
instructions, and the result is proven not to block and to be free of races before it runs.
"""

import numpy as np

import tilewise as tw
from tilewise import comm

TILES, ROWS, COLS, PLACES = 8, 4, 64, 2


@tw.tile_program
def pipeline(x, y, queue, ready, free):
    """Even devices produce tiles of x; the device after each computes y = silu(x)."""
    me = comm.rank()
    if me % 2 == 0:
        for t in range(TILES):
            remote = comm.symm_at(queue, me + 1)
            if t >= PLACES:  # the tile that was in this place has been read
                remote = comm.consume_token(remote, comm.wait(free[0], t - PLACES + 1))
            place = t % PLACES
            comm.put_signal(remote.tile(place, rows=ROWS), x.tile(t, rows=ROWS), ready[place])
        comm.wait(free[0], TILES)
    else:
        for t in range(TILES):
            token = comm.wait(ready[t % PLACES], t // PLACES + 1)
            tile = comm.consume_token(queue, token).tile(t % PLACES, rows=ROWS)
            comm.kernel("silu", out=y.tile(t, rows=ROWS), x=tile)
            comm.notify(free[0], me - 1)


def main(devices: int = 2) -> int:
    """Run it on pairs of devices, and compare with NumPy."""
    with tw.DeviceGroup({"pp": devices}) as group:
        x, y = group.symm_tensor((TILES * ROWS, COLS)), group.symm_tensor((TILES * ROWS, COLS))
        queue, ready, free = group.symm_tensor((PLACES * ROWS, COLS)), group.signals(PLACES), group.signals(1)
        rng = np.random.default_rng(0)
        for device in range(0, devices, 2):
            x.write(rng.standard_normal(x.shape, np.float32), device)
        print(pipeline.trace(x, y, queue, ready, free).explain())
        pipeline(x, y, queue, ready, free)
        wanted = [a / (1 + np.exp(-a)) for a in (x.read(d) for d in range(0, devices, 2))]
        error = max(np.abs(y.read(d + 1) - w).max() for d, w in zip(range(0, devices, 2), wanted))
    print(f"largest difference from NumPy: {error:.1e}")
    return 0 if error < 1e-6 else 1


if __name__ == "__main__":
    raise SystemExit(main())
