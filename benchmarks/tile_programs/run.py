"""Tile programs of two devices: overlap of transfers and products, two hosts, signals.

Claims (issue figures; "must" and "goal" are printed next to each):

- `operators`: the programs of examples 08 and 09 take at most 1.05 and 1.01 times their bound, and have
  0.97 and 1.0 of the speed of the planner's own operators. The bound is the same products on the same
  two devices with all data present, and after them the copied bytes at the rate at which both cores copy
  them with the kernel of `put`, in tiles of the same size. Every term is measured in the same turn. It is
  a bound where transfers need the cores that compute: overlap hides waiting, and no copying. Examples
  10 and 11 are shown without bounds. All have the planner's bits.
- `hosts`: the program of example 08, and one that reads tiles with a few in flight, take at most 1.25 and
  1.1 times max(products, transfer) + the processor time of TCP, on two hosts with a link on which both
  take equally long (hosts.py).
- `signal`: 8 bytes and a signal are seen by a thread that spins on the signal within 2 and 1.5
  cache-line round trips in one process, 3 and 2 between two. This is below the level of tasks: the data
  is stored in the other side's memory and the signal is posted as a task's end posts it
  (../processes/signals.cc). Next to it, without bounds: the time from one `put_signal` task to the next
  in a program whose two devices wait for each other.

Everything takes turns in one process, and medians over turns are shown. If a must is missed, the profile
of one run follows.

Run: python benchmarks/tile_programs/run.py [--only operators ...] [--minutes 4]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
sys.path.append(str(Path(__file__).resolve().parents[1] / "processes"))  # times of signals
import hosts
from figures import Figure, show
from machine import run_parts
from operators import OPERATORS, Example, Sizes, nothing, planned
from signal_times import measure_signals, num_processors
from turns import Times, take_turns

import tilewise as tw
from tilewise import comm

WITH_A_TARGET = "all-gather + matmul", "matmul + reduce-scatter"
SIZES = {  # rows of a tile: the fastest of 32 to 512 here
    name: Sizes(m=1024, k=2048, n=2048, rows=128 if operator.is_reduced else 64)
    for name, operator in OPERATORS.items()
}
NUM_HOPS = 200
SIGNAL = {
    "put_threads": ("put_signal to wait, 8 bytes, one process", 2.0, 1.5),
    "put_processes": ("put_signal to wait, 8 bytes, two processes", 3.0, 2.0),
}

# ---- operators -------------------------------------------------------------------------------------------


def operators(options: argparse.Namespace, ends_at: float) -> None:
    """The examples over their bounds, and next to the planner's operators."""
    began = time.monotonic()
    for number, name in enumerate(OPERATORS, 1):
        with ExitStack() as opened:
            example = Example(name, SIZES[name], opened)
            call, wanted = planned(name, *example.operands, opened)
            if not np.array_equal(example.result_of(example.calls["example"]), wanted):
                sys.exit(f"{name}: the example must have the bits of the planner's operator; it has others")
            until = began + (ends_at - began) * number / len(OPERATORS)
            show_operator(example, take_turns({**example.calls, "planned": call}, until))


def show_operator(example: Example, seconds: Times) -> None:
    """Its ratios, of each turn, and its times."""
    name = example.name
    turns = [dict(zip(seconds, turn)) for turn in zip(*seconds.values())]
    over = [t["example"] / (t["products"] + t["copies"] - t["nothing"]) for t in turns]
    speed = [t["planned"] / t["example"] for t in turns]
    ms = {side: statistics.median(of) * 1e3 for side, of in seconds.items()}
    copy_ms = ms["copies"] - ms["nothing"]
    must, goal = (1.05, 1.01) if name in WITH_A_TARGET else (None, None)
    note = (
        f"{ms['example']:.2f} ms; products {ms['products']:.2f}, copies {copy_ms:.2f} "
        f"({example.copied_bytes / 2**20:.0f} MiB at {example.copied_bytes / copy_ms / 1e6:.1f} GB/s: "
        f"{example.operator.transfers}); {len(turns)} turns"
    )
    figure = Figure(
        f"{name}: over products + copies", statistics.median(over), "x", True, must, goal, limit=1, note=note
    )
    show(figure)
    if figure.verdict == "missed":
        for line in example.group.trace(example.calls["example"]).summary():
            print(f"  {line}")
    must, goal = (0.97, 1.0) if name in WITH_A_TARGET else (None, None)
    note = f"planned {ms['planned']:.2f} ms"
    show(
        Figure(
            f"{name}: speed of the planner's", statistics.median(speed), "x", must=must, goal=goal, note=note
        )
    )
    note = f"{ms['nothing'] / ms['example']:.2%} of the example's call"
    show(Figure(f"{name}: a call of an empty program", ms["nothing"] * 1e3, "us", True, note=note))


# ---- signals ---------------------------------------------------------------------------------------------


@tw.tile_program
def ping_pong(x: Any, seen: Any) -> None:
    """Two devices put 8 bytes into each other's memory, each after it has the other's."""
    me = comm.rank()
    for hop in range(NUM_HOPS):
        if me == hop % 2:
            tile = comm.consume_token(x, comm.wait(seen[0], (hop + 1) // 2)) if hop else x
            comm.put_signal(comm.symm_at(tile, 1 - me), tile, seen[0])
    if me == NUM_HOPS % 2:
        comm.wait(seen[0], NUM_HOPS // 2)


def signals(options: argparse.Namespace, ends_at: float) -> None:
    """8 bytes and a signal one way, next to a plain line there and back; then as tasks."""
    if num_processors() < 2:
        print("signal is left out: it needs two processors")
        return
    for times in measure_signals(SIGNAL):
        what, must, goal = SIGNAL[times.how]
        show(Figure(what, times.ratio, "round trips", True, must, goal, limit=0.5, note=times.note))
    with tw.DeviceGroup({"tp": 2}, workers_per_device=1) as group:
        x, seen = group.symm_tensor((1, 2)), group.signals(1)
        x.write(np.ones((1, 2), np.float32), 0)
        seconds = take_turns({"nothing": lambda: nothing(x), "hops": lambda: ping_pong(x, seen)}, ends_at, 50)
        if not all((x.numpy(device) == 1).all() for device in range(2)):
            sys.exit("ping_pong: the bytes of device 0 must arrive; got others")
    hops_s = statistics.median(h - n for h, n in zip(seconds["hops"], seconds["nothing"]))
    note = f"a task per hop, {NUM_HOPS} hops"
    show(
        Figure("put_signal to the next put_signal, as tasks", hops_s / NUM_HOPS * 1e9, "ns", True, note=note)
    )


# ---- all -------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Any, float], None]] = {
    "operators": operators,
    "hosts": hosts.measure,
    "signal": signals,
}
SHARES = {"operators": 0.6, "hosts": 0.3, "signal": 0.1}


def main() -> None:
    """Parse arguments and measure all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=4.0, help="no further turn begins after so long")
    options = parser.parse_args()
    run_parts(PARTS, SHARES, options, "numpy")


if __name__ == "__main__":
    main()
