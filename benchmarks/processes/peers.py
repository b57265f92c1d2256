"""All-reduce of other libraries between two processes: PyTorch's gloo, and an MPI of its own environment.

Buffers take turns, as many as `--buffers`, and hold zeros. Rank 0 prints a JSON line: microseconds of a call, the
median of batches. MPI is measured in place and not; the better counts. `run.py` next to this starts it, and so says
which Python.

Run: python benchmarks/processes/peers.py gloo|mpi BYTES --buffers 1 --seconds 2 [--rank 0 --meet FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

PROCESSES = 2


def timed(call: Callable[[int], None], agree: Callable[[bool], bool], seconds: float, batch: int) -> float:
    """Seconds of a call, as the median of batches; rank 0 decides when there are enough of them."""
    call(0)
    medians: list[float] = []
    number, until = 0, time.monotonic() + seconds
    while agree(time.monotonic() < until or len(medians) < 3):
        started = time.perf_counter()
        for _ in range(batch):
            call(number)
            number += 1
        medians.append((time.perf_counter() - started) / batch)
    return statistics.median(medians)


def gloo(options: argparse.Namespace, batch: int) -> float:
    """PyTorch's, in place; it has no other."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.meet}", rank=options.rank, world_size=PROCESSES
    )
    buffers = [torch.zeros(options.bytes // 4) for _ in range(options.buffers)]

    def agree(own: bool) -> bool:
        said = torch.tensor(int(own))
        dist.broadcast(said, 0)
        return bool(said)

    seconds = timed(lambda i: dist.all_reduce(buffers[i % len(buffers)]), agree, options.seconds, batch)
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def mpi(options: argparse.Namespace, batch: int) -> float:
    """MPI's; sets the rank."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    options.rank = world.Get_rank()
    if world.Get_size() != PROCESSES:
        raise SystemExit(f"two processes are compared; got {world.Get_size()}")
    buffers = [bytearray(options.bytes) for _ in range(options.buffers)]

    def in_place(i: int) -> None:
        world.Allreduce(MPI.IN_PLACE, [buffers[i % len(buffers)], MPI.FLOAT])

    def out_of_place(i: int) -> None:
        own, other = buffers[2 * i % len(buffers)], buffers[(2 * i + 1) % len(buffers)]
        world.Allreduce([own, MPI.FLOAT], [other, MPI.FLOAT])

    def agree(own: bool) -> bool:
        return bool(world.bcast(own, 0))

    return min(timed(call, agree, options.seconds / 2, batch) for call in (in_place, out_of_place))


def main() -> None:
    """Be one of the two processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library", choices=("gloo", "mpi"))
    parser.add_argument("bytes", type=int)
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meet", metavar="FILE", help="where gloo's processes find each other")
    options = parser.parse_args()
    batch = 100 if options.bytes < 1 << 20 else 4
    seconds = {"gloo": gloo, "mpi": mpi}[options.library](options, batch)
    if options.rank == 0:
        print(json.dumps({"us": seconds * 1e6}), flush=True)


if __name__ == "__main__":
    main()
