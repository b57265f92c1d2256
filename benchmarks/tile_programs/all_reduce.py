"""`DeviceGroup.all_reduce` of a user's array over two devices, next to gloo and MPICH.

Claims (issue figures; "must" and "goal" are printed next to each): against the better of MPICH and gloo, 1.0 and 1.5
times their speed for 16 KiB, 1.2 and 3 times for 16 MiB. The devices are two threads of this process, or two processes;
the peers are two processes. A call is blocking: from Python to the result in all copies.

All take turns; in a turn each is measured for a short while, and the ratio is that of one turn. Shown are medians over
turns. 16 MiB take turns in several arrays, more than the caches hold. The bound of 16 MiB: a core reads 1.5 times the
bytes and writes as many (half of both arrays, half of the sum twice, the other half once), at the rate at which both
cores copy.

Run: python benchmarks/tile_programs/all_reduce.py [--turns 5] [--seconds 1] [--mpi-python PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
import two_devices
from figures import Figure, show
from machine import machine

import tilewise as tw
from tilewise.tiles import DeviceGroup, SymmTensor

PEERS = Path(__file__).resolve().parents[1] / "processes" / "peers.py"
SIZES = {"16 KiB": 16 << 10, "16 MiB": 16 << 20}
BOUNDS = {"16 KiB": (1.0, 1.5), "16 MiB": (1.2, 3.0)}
ARRAYS = {"16 KiB": 2, "16 MiB": 8}


class Side:
    """A device group, and the arrays of every size."""

    def __init__(self, opened: ExitStack) -> None:
        memory = sum(ARRAYS[size] * num_bytes for size, num_bytes in SIZES.items()) + (1 << 20)
        self._group = opened.enter_context(DeviceGroup({"d": 2}, memory_bytes=memory, workers_per_device=1))
        self._arrays = {size: [self._array(n) for _ in range(ARRAYS[size])] for size, n in SIZES.items()}

    def _array(self, num_bytes: int) -> SymmTensor:
        array = self._group.symm_tensor(num_bytes // 4)
        array.write(np.zeros(array.shape, np.float32))  # its pages are used
        self._group.all_reduce(array)
        return array

    def us(self, size: str, seconds: float) -> float:
        """Microseconds of a call, the median."""
        arrays, times = self._arrays[size], []
        until = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < until:
            for array in arrays:
                started = time.perf_counter()
                self._group.all_reduce(array)
                times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6


def peer_us(name: str, size: str, options: argparse.Namespace) -> float:
    """Microseconds of a peer's call between two processes, in one array of 16 KiB or several of 16 MiB."""
    asked = [str(SIZES[size]), "--buffers", str(ARRAYS[size]), "--seconds", str(options.seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        meet = ["--meet", str(Path(folder, "meet"))]
        commands = [
            [sys.executable, str(PEERS), "gloo", *asked, *meet, "--rank", str(rank)] for rank in range(2)
        ]
        if name == "MPICH":
            launcher = options.mpi_python.parent / "mpiexec"
            commands = [[str(launcher), "-n", "2", str(options.mpi_python), str(PEERS), "mpi", *asked]]
        running = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for command in commands
        ]
        said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"{name} has failed: {' '.join(commands[0])}")
    return float(json.loads(said[0])["us"])


def main() -> None:
    """Measure both sizes, all sides in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a side in a turn")
    parser.add_argument(
        "--mpi-python", type=Path, metavar="PATH", help="of an environment with MPICH and mpi4py"
    )
    options = parser.parse_args()
    print(machine("numpy", "torch"))
    print(f"load before the run: {os.getloadavg()[0]:.1f}")
    if options.mpi_python is None and find_spec("mpi4py") is not None:
        options.mpi_python = Path(sys.executable)
    peers = [
        name for name, is_there in (("gloo", find_spec("torch")), ("MPICH", options.mpi_python)) if is_there
    ]
    for name in {"gloo", "MPICH"} - {*peers}:
        print(f"{name} is left out: {'PyTorch is not installed' if name == 'gloo' else 'no --mpi-python'}")
    with ExitStack() as opened:
        sides = {"one process": Side(opened)}
        opened.enter_context(tw.ProcessGroup(2))
        sides["two processes"] = Side(opened)
        for size, num_bytes in SIZES.items():
            turns: dict[str, list[float]] = {name: [] for name in (*sides, *peers)}
            for _ in range(options.turns):
                for name in turns:
                    side = sides.get(name)
                    us = side.us(size, options.seconds) if side else peer_us(name, size, options)
                    turns[name].append(us)
            bound = 1.25 * num_bytes / two_devices.copy_bandwidth() * 1e6 if num_bytes > 1 << 20 else None
            medians = {name: statistics.median(times) for name, times in turns.items()}
            for name in sides:
                what, theirs = f"all_reduce of {size}, {name}", {peer: medians[peer] for peer in peers}
                show(Figure(what, medians[name], "us", True, peers=theirs, limit=bound))
                if peers:
                    ratios = [
                        min(others) / us for us, *others in zip(turns[name], *(turns[p] for p in peers))
                    ]
                    must, goal = BOUNDS[size]
                    show(
                        Figure(
                            f"{what}: times the better peer's",
                            statistics.median(ratios),
                            "x",
                            must=must,
                            goal=goal,
                        )
                    )


if __name__ == "__main__":
    main()
