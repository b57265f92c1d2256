"""Submitting tasks: a tiled matrix product whose order follows from its data.

Each task multiplies a tile of A with a tile of B. The first one of a tile of C overwrites it
(Output), the others add to it (InOut): these wait for each other, and different tiles of C run in
parallel. Inputs are only read, so no task waits for them. The result is compared with NumPy, and
the exit code says whether they agree.
"""

import sys

import numpy as np

from tilewise.runtime import InOut, Input, Output, Runtime, TaskGroup, WorkerType

SIZE, TILE = 256, 64


def matmul(rt: Runtime, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """c = a b, one task per three tiles."""

    @rt.kernel
    def gemm(a: np.ndarray, b: np.ndarray, c: np.ndarray, is_first: bool) -> None:
        if is_first:
            np.matmul(a, b, out=c)
        else:
            c += a @ b

    tiles = [slice(at, at + TILE) for at in range(0, SIZE, TILE)]
    with rt.registered(a, b, c) as (ha, hb, hc), TaskGroup() as group:
        for i in tiles:
            for j in tiles:
                for k in tiles:
                    target = Output(hc[i, j]) if k is tiles[0] else InOut(hc[i, j])
                    params = [Input(ha[i, k]), Input(hb[k, j]), target]
                    group.add(rt.submit(gemm, params, scalars=[k is tiles[0]], worker_type=WorkerType.CUBE))


def main() -> int:
    """Multiply, compare, print the runtime's counters."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIZE, SIZE), dtype=np.float32) for _ in range(2))
    c = np.empty((SIZE, SIZE), np.float32)
    with Runtime() as rt:
        matmul(rt, a, b, c)
        num_tasks = rt.stats().num_completed
    error = float(np.abs(c - a @ b).max() / np.abs(c).max())
    print(f"{num_tasks} tasks on {rt.num_workers} worker(s), helped by the submitter")
    print(f"largest difference from NumPy: {error:.1e} of the largest element")
    return 0 if error < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
