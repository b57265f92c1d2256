"""The figures of the task runtime, each next to its goal, its must and the limit of the machine.

Claim: every figure keeps its must; goal and must are the task runtime's design figures. `operations.cc` times single
operations on one thread in ticks of the time-stamp counter; `threads.cc` times patterns, start latency and memory with
two and three threads; this file times submission from Python and prints everything with the cache-line round trip
between two processors, the floor below every figure with two threads, which changes while virtual processors move.

A neighbour on the other half of a core makes everything half as slow again, for seconds or minutes. So every program
runs several times, the first also on two processors in turn; a figure is the median of the quietest pass, and the
median of the loudest stands next to it.

`--soak` runs 10^8 mixed tasks and checks that memory stays constant; `--instructions` counts instructions per
submission with valgrind. Peers stand next to these figures in benchmarks/task_overhead and benchmarks/task_bench.

Run: python benchmarks/runtime/run.py [--repetitions 9] [--passes 6] [--soak [TASKS]] [--instructions]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, show
from machine import machine

import tilewise
from tilewise.runtime import InOut, Input, Runtime

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[1] / "native"
PING_PONG = HERE.parent / "task_overhead" / "ping_pong.c"
COMPILER = [os.environ.get("CXX", "g++"), "-std=c++20", "-O3", "-DNDEBUG", "-ffp-contract=off"]

KERNEL = """
extern "C" int add_eight(void* const* buffers, const unsigned long*) {
  for (int i = 0; i < 8; ++i) static_cast<float*>(buffers[0])[i] += static_cast<float*>(buffers[1])[i];
  return 0;
}
"""


def build(folder: Path) -> None:
    """Compile the native programs; `operations` contains the runtime's sources, the others link the library."""
    sources = sorted(p for p in (NATIVE / "tasks").rglob("*.cc") if not p.stem.endswith("_test"))
    includes = [f"-I{NATIVE}", f"-I{NATIVE / 'include'}"]
    link = ["-ldl", "-lpthread"]
    objects = []
    for source in sources:
        if source.stem == "pto_api":
            continue
        objects.append(str(folder / f"{source.stem}.o"))
        subprocess.run([*COMPILER, *includes, "-c", str(source), "-o", objects[-1]], check=True)
    program = [str(HERE / "operations.cc"), *objects, "-o", str(folder / "operations")]
    subprocess.run([*COMPILER, *includes, *program, *link], check=True)
    library = tilewise.get_library()
    shared = [f"-I{tilewise.get_include()}", f"-L{library}", f"-Wl,-rpath,{library}"]
    for name in ("threads", "soak", "submissions"):
        program = [str(HERE / f"{name}.cc"), "-o", str(folder / name), "-ltilewise_pto", *link]
        subprocess.run([*COMPILER, *shared, *program], check=True)
    subprocess.run(["gcc", "-O2", str(PING_PONG), "-o", str(folder / "ping_pong"), "-lpthread"], check=True)


def round_trip_ns(folder: Path) -> float:
    """The round trip of a cache line between processors 0 and 1, at this moment."""
    done = subprocess.run([folder / "ping_pong", "0", "1"], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[0])


def table(command: list[str]) -> dict[str, list[float]]:
    """The output of a program: name|...|figures."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed: {done.stderr.strip()}")
    rows = {}
    for line in done.stdout.splitlines():
        *words, a, b, c = line.split("|")
        rows["|".join(words)] = [float(a), float(b), float(c)]
    return rows


def ticks_per_ns() -> float:
    """The time-stamp counter's rate, as the kernel measured it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines():
        if line.startswith("cpu MHz"):
            return float(line.split(":")[1]) / 1000
    return 1.0


def python_submit_ns(folder: Path) -> list[float]:
    """A native kernel on three handles, submitted from Python: median, p99, minimum of batches of 500."""
    samples = []
    source, library = folder / "kernel.cc", folder / "kernel.so"
    source.write_text(KERNEL, encoding="ascii")
    subprocess.run([*COMPILER, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with Runtime(window=1024) as rt:
        buffers = [rt.register(np.zeros(8, np.float32)) for _ in range(30)]
        rt.load_library(library)
        kernel = rt.kernel("add_eight")
        params = [[InOut(buffers[i]), Input(buffers[i + 10]), Input(buffers[i + 20])] for i in range(10)]
        for batch in range(60):
            begin = time.perf_counter_ns()
            for i in range(500):
                rt.submit(kernel, params[i % 10], scalars=(32,))
            spent = (time.perf_counter_ns() - begin) / 500
            rt.wait_all()
            if batch >= 5:
                samples.append(spent)
    samples.sort()
    return [statistics.median(samples), samples[len(samples) * 99 // 100], samples[0]]


def quietest(passes: list[dict[str, list[float]]], name: str) -> tuple[float, float, float]:
    """Median and p99 of a figure in the pass with the least median, and the greatest median of all."""
    figures = [each[name] for each in passes]
    median, p99, _ = min(figures)
    return median, p99, max(figures)[0]


def figures(folder: Path, repetitions: int, passes: int) -> tuple[list[Figure], list[str]]:
    """All rows, and sentences about the conditions."""
    processors = [str(p) for p in sorted(os.sched_getaffinity(0))[:2]]
    ones, twos, threes, trips = [], [], [], []
    for number in range(passes):
        ones.append(table([str(folder / "operations"), processors[number % len(processors)]]))
        trips.append(round_trip_ns(folder))
        twos.append(table([str(folder / "threads"), "1", str(repetitions)]))
        trips.append(round_trip_ns(folder))
        threes.append(table([str(folder / "threads"), "2", str(repetitions)]))
    rate = ticks_per_ns()
    rows = []

    def ticks(name: str, goal: float, must: float, key: str | None = None) -> None:
        median, p99, loudest = quietest(ones, f"{key or name}|warm")
        cold = quietest(ones, f"{key or name}|cold")[0]
        note = f"p99 {p99:.0f}, cold {cold:.0f}, {median / rate:.1f} ns; loudest pass {loudest:.1f}"
        rows.append(Figure(name, median, "ticks", True, must, goal, note=note))

    ticks("slot allocation and reclaim", 5, 10)
    ticks("heap allocation", 5, 15)
    ticks("handle lookup", 5, 15)
    ticks("handle insert", 5, 15)
    ticks("region insert", 20, 60)
    ticks("region exact lookup", 30, 80)
    ticks("lookup among 120 overlapping views", 300, 600)
    ticks("submit, three parameters, no live producer", 40, 100)
    ticks("submit, three parameters, three live producers", 100, 200)
    ticks("complete, two consumers", 40, 100)
    ticks("replay, per task, one thread", 20, 60, "replay of a wavefront, submission and running")
    rate_goal, rate_must = (8, 4) if min(trips) > 300 else (20, 8)
    median, _, loudest = quietest(twos, "independent_ns")
    note = f"loudest pass {1e3 / loudest:.1f}"
    rows.append(Figure("sustained empty tasks", 1e3 / median, "M/s", False, rate_must, rate_goal, note=note))
    median, p99, loudest = quietest(twos, "start_ticks")
    number = next(n for n, two in enumerate(twos) if two["start_ticks"][0] == median)
    trip = twos[number]["trip_ticks"][0]  # of the same threads, between the submissions
    note = f"{median / rate:.0f} ns, p99 {p99 / rate:.0f} ns, round trip {trip / rate:.0f} ns; "
    note += f"loudest pass {loudest / rate:.0f} ns"
    rows.append(Figure("submit to start", median / trip, "round trips", True, 3, 1.5, note=note))
    for pattern, goal, must in (("independent", 15, 40), ("chain", 25, 60), ("wavefront", 30, 80)):
        median, p99, loudest = quietest(twos, f"{pattern}_ns")
        note = f"p99 {p99:.0f}; loudest pass {loudest:.0f}"
        rows.append(Figure(f"{pattern}, two threads", median, "ns", True, must, goal, note=note))
    for pattern in ("independent", "chain", "wavefront"):
        ratio = quietest(threes, f"{pattern}_ns")[0] / quietest(twos, f"{pattern}_ns")[0]
        rows.append(Figure(f"three threads on two cores, {pattern}", ratio, "x two threads", True, 1.5, 1.2))
    median, p99, least = python_submit_ns(folder)
    note = f"p99 {p99:.0f}, least {least:.0f}"
    rows.append(Figure("Python submit of a native kernel", median, "ns", True, 1000, 300, note=note))
    memory = twos[0]["memory_bytes"][0] / 1e6
    rows.append(Figure("memory at default sizes, heap apart", memory, "MB", True, 4, 1))
    filed = quietest(ones, "region insert, then one overlap query|warm")[0]
    said = [
        f"region insert: tiles of a grid, filed at the first question for overlaps; with that {filed:.0f} ticks",
        f"{passes} passes; cache-line round trip {min(trips):.0f} to {max(trips):.0f} ns; "
        f"counter {rate:.3f} ticks per ns",
    ]
    return rows, said


def instructions(folder: Path) -> list[str]:
    """Instructions per submission, by callgrind; the difference of two lengths, so that start-up does not count."""
    if shutil.which("valgrind") is None:
        return ["instructions per submission: valgrind is not installed"]

    def count(kind: str, tasks: int) -> int:
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={folder}/out",
            "--toggle-collect=pto_submit_task",
        ]
        done = subprocess.run(
            [*command, str(folder / "submissions"), kind, str(tasks)],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stderr.split("Collected : ")[1].split()[0])

    return [
        f"instructions per submission, {kind}: {(count(kind, 900) - count(kind, 100)) / 800:.0f}"
        for kind in ("none", "one", "three")
    ]


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=9, help="of every pattern in a pass")
    parser.add_argument("--passes", type=int, default=6, help="of all programs")
    parser.add_argument(
        "--soak", type=int, nargs="?", const=100_000_000, help="run this many mixed tasks instead"
    )
    parser.add_argument("--instructions", action="store_true", help="also count instructions with valgrind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        if arguments.soak:
            sys.exit(subprocess.run([folder / "soak", str(arguments.soak)], check=False).returncode)
        rows, said = figures(folder, arguments.repetitions, arguments.passes)
        print(machine())
        for sentence in said + (instructions(folder) if arguments.instructions else []):
            print(sentence)
        for row in rows:
            show(row)


if __name__ == "__main__":
    main()
