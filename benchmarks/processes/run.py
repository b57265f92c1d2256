"""The devices of one host in one process and in several, over shared memory: signals, all-reduce, steps, start.

Claims (issue figures; "must" and "goal" are printed next to each):

- `signal`: a post is seen by a thread that spins on it within 1.5 and 1 cache-line round trips in one process, 2 and
  1.2 between two. Two sides post each other's signal in turn; half of there and back is one way, and is divided by a
  whole round trip of a plain line between the same two processors, measured in turns with it (signals.cc).
- `all-reduce`: of 16 KiB fp32 over two devices 8 and 5 us in one process, 12 and 8 us in two, 20 and 40 times gloo's;
  of 16 MiB 70% and 85% of the bound, 1.2 and 1.6 times MPICH's. Ours is what planning makes of a product whose inner
  dim is shared: a chain of them (16 KiB: each waits for the one before), or several into outputs of their own (16 MiB:
  256 MiB in all). The same products without an all-reduce, on the same two devices, are taken off. The bound: a core
  reads 1.5 times the bytes and writes as many (half of both partial sums, half of the sum twice, the other half once),
  at the rate at which both cores copy.
- `start`: 8 processes, an executor of GPT-2 small's shape over 8 devices in them, ready within 3 and 1.5 s. Weights are
  not written.
- `four`: four devices on two cores take at most 1.3 and 1.1 times as long as two, per sequence: each device trains one.
- `step`: a training step of GPT-2 small's shape on two devices, as benchmarks/two_devices.py has it: two processes
  reach 0.95 and 0.99 of one's speed. With PyTorch next to it is measured there.

Everything takes turns, and medians are compared. What a run costs that does nothing is shown too.

Run: python benchmarks/processes/run.py [--only signal ...] [--minutes 10] [--mpi-python PATH]
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
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
import two_devices
from demo_step import CONTEXT, GPT2, Contestant, batch_of
from figures import Figure, show
from machine import run_parts
from signal_times import measure_signals, num_processors

import tilewise as tw
from tilewise import models
from tilewise.models import llama
from tilewise.nn import linear
from tilewise.strategy import ParallelismMode

HERE = Path(__file__).resolve().parent
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
SMALL, LARGE = 16 << 10, 16 << 20
NUM_CHAINED, NUM_APART = 200, 8
STARTED = 8
FOUR = {**GPT2, "num_hidden_layers": 2, "vocab_size": 8192}
PLACES = {"one process": 1, "two processes": 2}
ALL_REDUCE_US = {"one process": (8.0, 5.0), "two processes": (12.0, 8.0)}  # must and goal
TIMES: dict[int, dict[str, tuple[float, float]]] = {
    SMALL: {"gloo": (20, 40)},
    LARGE: {"MPICH": (1.2, 1.6)},
}
SIGNAL = {
    "threads": ("a signal, one process", 1.5, 1.0),
    "processes": ("a signal, two processes", 2.0, 1.2),
    "notified": ("a signal that notifies a waiting task, one process", None, None),
}


# ---- signals ---------------------------------------------------------------------------------------------


def signals(options: argparse.Namespace, ends_at: float) -> None:
    """A signal one way next to a plain line there and back."""
    if num_processors() < 2:
        print("signal is left out: it needs two processors")
        return
    for times in measure_signals(SIGNAL):
        what, must, goal = SIGNAL[times.how]
        show(Figure(what, times.ratio, "round trips", True, must, goal, limit=0.5, note=times.note))


# ---- all-reduce ------------------------------------------------------------------------------------------


def products(num_bytes: int, is_reduced: bool) -> tuple[tw.ComputeGraph, int]:
    """A graph of products over two devices, and their number: with an all-reduce after each, or on
    each device's own rows.

    Both have the same local products: of rows with one column of the inner dim.
    """
    cut, rows_label = tw.DimLabel("cut", 1), tw.DimLabel("rows", 1)
    is_chain = num_bytes == SMALL
    rows, width = (128, SMALL // 512) if is_chain else (2048, LARGE // 8192)
    inner, rows = (2, rows) if is_reduced else (1, 2 * rows)
    label = cut if is_reduced else None
    graph = tw.ComputeGraph("products")
    first = None if is_reduced else rows_label
    x = graph.input(
        [rows, width if is_chain else inner], name="x", labels=[first, None if is_chain else label]
    )
    count = NUM_CHAINED if is_chain else NUM_APART
    y = x
    for i in range(count):
        y = linear(graph, y, f"down{i}.weight", inner, out_label=label) if is_chain else x
        y = linear(graph, y, f"up{i}.weight", width, in_label=label)
        if not is_chain or i == count - 1:
            graph.output(y, f"y{i}")
    used = (cut if is_reduced else rows_label).name
    graph.set_distribution(tw.DistributionStrategy(ParallelismMode.HYBRID, {"d": 2}, {used: "d"}))
    return graph, count


def empty() -> tw.ComputeGraph:
    """A graph that adds two vectors of a row, on each of two devices."""
    graph, rows = tw.ComputeGraph("empty"), tw.DimLabel("rows", 1)
    x = graph.input([2, 16], name="x", labels=[rows, None])
    graph.output(graph.add(x, x), "y")
    graph.set_distribution(tw.DistributionStrategy(ParallelismMode.HYBRID, {"d": 2}, {rows.name: "d"}))
    return graph


class Forward:
    """A graph that is ready to run, and the times of its runs."""

    def __init__(self, graph: tw.ComputeGraph, opened: ExitStack) -> None:
        self.model = opened.enter_context(graph.instantiate(graph.plan(workers_per_device=1)))
        self.model.initialize(0, 0.5)
        self._x = np.ones([int(str(size)) for size in graph.find("x").shape], np.float32)
        self._seconds: list[float] = []
        for _ in range(3):
            self.model.forward(x=self._x)

    def play(self, times: int) -> None:
        """A turn."""
        for _ in range(times):
            started = time.perf_counter()
            self.model.forward(x=self._x)
            self._seconds.append(time.perf_counter() - started)

    @property
    def us(self) -> float:
        """Of a run, the median."""
        return statistics.median(self._seconds) * 1e6


def own_all_reduce(place: str, num_bytes: int, until: float) -> tuple[float, float]:
    """Microseconds of one, without and with the products around it."""
    with ExitStack() as opened:
        opened.enter_context(tw.ProcessGroup(PLACES[place]))
        graph, count = products(num_bytes, True)
        whole, bare = Forward(graph, opened), Forward(products(num_bytes, False)[0], opened)
        turns = 0
        while turns < 5 or time.monotonic() < until:
            for side in (whole, bare):
                side.play(10 if num_bytes == SMALL else 1)
            turns += 1
        return (whole.us - bare.us) / count, whole.us / count


def peer_all_reduce(options: argparse.Namespace, num_bytes: int, seconds: float) -> dict[str, float]:
    """Microseconds of gloo's and of MPI's, as far as they are installed."""
    results, peers = {}, str(HERE / "peers.py")
    asked = [str(num_bytes), "--buffers", "2" if num_bytes == SMALL else "16", "--seconds", str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if find_spec("torch") is not None:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, peers, "gloo", *asked, "--meet", str(Path(folder, "meet"))]
            results["gloo"] = answer_of([[*command, "--rank", str(rank)] for rank in range(2)], environment)
    if options.mpi_python is not None:
        launcher = options.mpi_python.parent / "mpiexec"
        command = [str(launcher), "-n", "2", str(options.mpi_python), peers, "mpi", *asked]
        results["MPICH"] = answer_of([command], environment)
    return {name: us for name, us in results.items() if us is not None}


def answer_of(commands: list[list[str]], environment: dict[str, str]) -> float | None:
    """The output of the first of these processes; None, and a line, if it fails."""
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        print(f"left out: {' '.join(commands[0])} has failed")
        return None
    return float(json.loads(said[0])["us"])


def all_reduce(options: argparse.Namespace, ends_at: float) -> None:
    """Both sizes, in both ways, with peers and the bound."""
    for name, module in (("gloo", find_spec("torch")), ("MPICH", options.mpi_python)):
        if module is None:
            print(
                f"{name} is left out: {'PyTorch is not installed' if name == 'gloo' else 'no --mpi-python'}"
            )
    seconds = max(1.0, (ends_at - time.monotonic()) / 12)
    for place, processes in PLACES.items():
        with ExitStack() as opened:
            opened.enter_context(tw.ProcessGroup(processes))
            run = Forward(empty(), opened)
            run.play(500)
            show(Figure(f"a run that does nothing, {place}", run.us, "us", True))
    for num_bytes, size in ((SMALL, "16 KiB"), (LARGE, "16 MiB")):
        peers = peer_all_reduce(options, num_bytes, min(seconds, 4.0))
        bound = 1.25 * num_bytes / two_devices.copy_bandwidth() * 1e6
        for place in PLACES:
            us, whole = own_all_reduce(place, num_bytes, time.monotonic() + seconds)
            what = f"all-reduce of {size}, {place}"
            note = f"{whole:.1f} us with the products around it"
            if num_bytes == SMALL:
                must, goal = ALL_REDUCE_US[place]
                show(Figure(what, us, "us", True, must, goal, peers=peers, note=note))
            else:
                show(Figure(what, us, "us", True, peers=peers, limit=bound, note=note))
                share = 100 * bound / us
                show(Figure(f"{what}: share of the bound", share, "%", must=70, goal=85, limit=100))
            for peer, (must, goal) in TIMES[num_bytes].items():
                if peer in peers:
                    show(Figure(f"{what}: times {peer}'s", peers[peer] / us, "x", must=must, goal=goal))


# ---- start -----------------------------------------------------------------------------------------------


def start(options: argparse.Namespace, ends_at: float) -> None:
    """From a group of 8 to an executor that may run."""
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, llama.LlamaConfig(**GPT2), STARTED, CONTEXT, dtype="bf16")
    graph.optimize(tw.optim.AdamW())
    plan = graph.plan({"fsdp": STARTED}, workers_per_device=1)

    def opening() -> float:
        began = time.perf_counter()
        with graph.instantiate(plan):
            return time.perf_counter() - began

    alone = opening()
    rows: list[tuple[float, float]] = []
    while len(rows) < 3 or (len(rows) < 5 and time.monotonic() < ends_at):
        began = time.perf_counter()
        with tw.ProcessGroup(STARTED) as group:
            group.start()
            started = time.perf_counter() - began
            rows.append((started, opening()))
    first, second = (statistics.median(column) for column in zip(*rows))
    note = f"processes {first:.2f} s, executor {second:.2f} s; an executor in one process {alone:.2f} s"
    whole = statistics.median(sum(row) for row in rows)
    show(Figure(f"start of {STARTED} processes", whole, "s", True, must=3, goal=1.5, note=note))


# ---- more devices than cores -----------------------------------------------------------------------------


def serve(mode: str) -> None:
    """Train on so many devices in so many processes; each line of standard input is a number of steps."""
    devices, processes = map(int, mode.split(":"))
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, llama.LlamaConfig(**FOUR), devices, CONTEXT, dtype="f32")
    graph.optimize(tw.optim.AdamW())
    plan = graph.plan({"dp": devices}, workers_per_device=1)
    with tw.ProcessGroup(processes), graph.instantiate(plan) as model:
        model.initialize(seed=0)
        number = 0
        for line in sys.stdin:
            seconds, loss = [], 0.0
            for _ in range(int(line)):
                tokens, labels = batch_of(number, FOUR["vocab_size"], devices)
                began = time.perf_counter()
                loss = float(model.step({"tokens": tokens, "labels": labels}, lr=3e-4).loss)
                seconds.append(time.perf_counter() - began)
                number += 1
            print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)


def four(options: argparse.Namespace, ends_at: float) -> None:
    """Four devices compared with two, a sequence for each, on the same cores."""
    for place, modes in (("one process", ("2:1", "4:1")), ("a process each", ("2:2", "4:4"))):
        sides = [Contestant(mode, 1, None, __file__) for mode in modes]
        able = [side.take_turn(1, is_counted=False) for side in sides]
        turns = 0
        while all(able) and (turns < 3 or (turns < 10 and time.monotonic() < ends_at)):
            able = [side.take_turn(2, is_counted=True) for side in sides]
            turns += 1
        for side in sides:
            side.close()
        if not all(able):
            raise SystemExit(f"four devices in {place}: a side has ended")
        two, more = (side.step_s for side in sides)
        note = f"steps of 2 and 4 sequences: {two * 1e3:.0f} and {more * 1e3:.0f} ms"
        what = f"four devices against two, {place}"
        show(Figure(what, more / 2 / two, "x the time", True, must=1.3, goal=1.1, note=note))


# ---- steps -----------------------------------------------------------------------------------------------


def step(options: argparse.Namespace, ends_at: float) -> None:
    """Ours of two_devices.py, without its peers."""
    print(f"  huge pages for memory between processes: {HUGE_PAGES.read_text().strip()}")
    turns = argparse.Namespace(rounds=4, steps=2)
    for number, comparison in enumerate(options.comparisons):
        left = ends_at - time.monotonic()
        if left < 0 and number:
            print(f"{comparison} is left out: it would take too long; raise --minutes")
            continue
        until = time.monotonic() + left / (len(options.comparisons) - number)
        sides = two_devices.compete(list(two_devices.modes(comparison, False, None)), turns, until)
        two_devices.show_processes(sides, comparison)


# ---- all -------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Any, float], None]] = {
    "signal": signals,
    "all-reduce": all_reduce,
    "start": start,
    "four": four,
    "step": step,
}
SHARES = {"signal": 0.05, "all-reduce": 0.15, "start": 0.1, "four": 0.15, "step": 0.55}


def main() -> None:
    """Parse arguments; be one side, or measure all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="no further round begins after so long")
    parser.add_argument(
        "--mpi-python", type=Path, metavar="PATH", help="of an environment with MPICH and mpi4py"
    )
    parser.add_argument(
        "--comparisons", nargs="+", choices=two_devices.COMPARISONS, default=two_devices.COMPARISONS
    )
    parser.add_argument("--serve", metavar="MODE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--threads", type=int, help=argparse.SUPPRESS
    )  # as other benchmarks are asked to serve
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    run_parts(PARTS, SHARES, options, "numpy", "torch")


if __name__ == "__main__":
    main()
