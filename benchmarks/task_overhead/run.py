"""Nanoseconds per task of the task runtime next to OpenMP, Taskflow, oneTBB and StarPU, on one and two threads.

Claim: the lowest time per task at two threads in every pattern. `workload.h` has the patterns and the check that
every task ran in the order of its data; each other file here is one system. A round visits pattern by pattern and,
for each, all systems one after the other, so that a noisy machine hits all alike. `submit` is the whole of a
pattern: submitting (or building the graph), running, waiting. `replay` runs a graph that exists: a recording here,
a built graph in Taskflow and oneTBB, whose edges are given to them by hand. Registering data with us and StarPU,
finding edges for the other two and freeing graphs are not timed.

A system that is not installed is left out with a sentence. On Debian:
  apt-get install clang libomp-dev libtbb-dev libstarpu-dev
Taskflow is headers only: --taskflow (or TASKFLOW_DIR) names the folder that holds taskflow/taskflow.hpp.

Run: python benchmarks/task_overhead/run.py [--rounds 3] [--repetitions 3] [--taskflow DIR] [--only SYSTEM ...]
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
from figures import Figure, record
from machine import machine

HERE = Path(__file__).resolve().parent
PATTERNS = ["independent", "chain", "wavefront", "random"]
MODES = ["submit", "replay"]
THREADS = [1, 2]
OURS = "tilewise"
SLOW_NS = 2e9  # as in workload.h: what takes longer is run once, not once per round
TIMEOUT_S = 300


@dataclass(frozen=True)
class System:
    """One program: how it is built, or why it cannot be built."""

    name: str
    command: list[str] = field(default_factory=list)  # of the compiler, without -o
    version: str = ""
    absent: str = ""  # the reason, as a sentence


Key = tuple[str, str, str, int]  # pattern, mode, system, threads
Samples = dict[Key, list[float]]


# ---- the systems -----------------------------------------------------------------------------------------


def first_line(command: list[str]) -> str:
    """The first line that a command prints; empty when it fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip().split("\n")[0]


def is_compiled(compiler: str, flags: list[str], source: str) -> bool:
    """Whether a few lines compile and link: the same check for every installation."""
    language = "c" if compiler in ("gcc", "clang") else "c++"
    command = [compiler, "-x", language, "-", *flags, "-o", os.devnull]
    try:
        return subprocess.run(command, input=source, capture_output=True, text=True).returncode == 0
    except OSError:
        return False


def tilewise_system() -> System:
    """Ours, linked against the installed package."""
    try:
        import tilewise

        include, library = str(tilewise.get_include()), str(tilewise.get_library())
    except (ImportError, AttributeError) as error:
        return System(OURS, absent=f"the package must be installed, with its headers and library ({error})")
    flags = ["-I", include, "-L", library, "-ltilewise_pto", f"-Wl,-rpath,{library}", "-pthread"]
    return System(
        OURS, ["g++", "-O2", "-std=c++20", str(HERE / "tilewise.cpp"), *flags], tilewise.__version__
    )


def openmp_systems() -> list[System]:
    """One source, two run-time libraries."""
    probe = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
    systems = []
    for name, compiler in (("gnu_openmp", "gcc"), ("llvm_openmp", "clang")):
        if is_compiled(compiler, ["-fopenmp"], probe):
            command = [compiler, "-O2", "-fopenmp", str(HERE / "omp.c")]
            systems.append(System(name, command, first_line([compiler, "--version"])))
        else:
            systems.append(System(name, absent=f"`{compiler} -fopenmp` does not work here"))
    return systems


def taskflow_system(folder: str | None) -> System:
    """Headers that the caller has fetched."""
    name = "taskflow"
    if not folder or not (Path(folder) / "taskflow" / "taskflow.hpp").is_file():
        reason = f"no taskflow/taskflow.hpp in {folder}" if folder else "--taskflow was not given"
        return System(name, absent=reason)
    text = (Path(folder) / "taskflow" / "taskflow.hpp").read_text()
    match = re.search(r"#define TF_VERSION (\d+)", text)
    number = int(match[1]) if match else 0
    version = f"{number // 100000}.{number // 100 % 1000}.{number % 100}"
    command = ["g++", "-O2", "-std=c++20", "-isystem", folder, str(HERE / "taskflow.cpp"), "-pthread"]
    return System(name, command, version)


def tbb_system() -> System:
    """oneTBB, from the system's packages."""
    if not is_compiled("g++", ["-ltbb"], "#include <tbb/flow_graph.h>\nint main() {}\n"):
        return System("onetbb", absent="tbb/flow_graph.h and libtbb were not found")
    command = ["g++", "-O2", "-std=c++20", str(HERE / "tbb.cpp"), "-ltbb", "-pthread"]
    return System("onetbb", command, first_line(["pkg-config", "--modversion", "tbb"]))


def starpu_system() -> System:
    """StarPU, where pkg-config knows it."""
    for package in ("starpu-1.4", "starpu-1.3"):
        flags = first_line(["pkg-config", "--cflags", "--libs", package]).split()
        if flags:
            command = ["gcc", "-O2", str(HERE / "starpu.c"), *flags]
            return System("starpu", command, first_line(["pkg-config", "--modversion", package]))
    return System("starpu", absent="pkg-config knows neither starpu-1.4 nor starpu-1.3")


def find_systems(taskflow: str | None) -> list[System]:
    """Every system of this folder, ours first."""
    return [tilewise_system(), *openmp_systems(), taskflow_system(taskflow), tbb_system(), starpu_system()]


def build(systems: list[System], folder: Path) -> list[System]:
    """Compile everything possible; return it, with the reasons for missing systems."""
    built = []
    for system in systems:
        if not system.absent:
            run = subprocess.run(
                [*system.command, "-o", str(folder / system.name)], capture_output=True, text=True
            )
            if run.returncode == 0:
                built.append(system)
                continue
        reason = system.absent or f"it does not compile:\n{run.stderr}"
        print(f"{system.name} is left out: {reason}")
    subprocess.run(
        ["gcc", "-O2", "-pthread", str(HERE / "ping_pong.c"), "-o", str(folder / "ping_pong")], check=True
    )
    return built


# ---- measuring -------------------------------------------------------------------------------------------


def choose_processors() -> list[int]:
    """The first processors that this process may use, one per thread."""
    return sorted(os.sched_getaffinity(0))[: max(THREADS)]


def pinned(processors: list[int]) -> list[str]:
    """A prefix that keeps a program on these processors, where there is one."""
    return ["taskset", "-c", ",".join(map(str, processors))] if shutil.which("taskset") else []


def run_program(folder: Path, name: str, threads: int, repetitions: int, pattern: str) -> Samples:
    """One process: its samples by key. A failed check ends everything if it is ours; a failed peer is skipped."""
    command = [*pinned(choose_processors()[:threads]), str(folder / name)]
    command += [str(threads), str(repetitions), pattern]
    environment = {**os.environ, "STARPU_HOME": str(folder), "STARPU_SILENT": "1"}
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"{name}, {threads} threads, {pattern}: stopped after {TIMEOUT_S} s")
        return {}
    if run.returncode != 0:
        message = f"{name}, {threads} threads, {pattern}: status {run.returncode}\n{run.stderr}"
        if name == OURS:
            sys.exit(message)
        print(message)
        return {}
    samples: Samples = {}
    for line in run.stdout.splitlines():
        words = line.split()
        if words and words[0] in PATTERNS:
            samples[words[0], words[1], name, threads] = [float(word) for word in words[3:]]
            if float(words[3]) * int(words[2]) > SLOW_NS:
                print(f"{name}, {threads} threads, {pattern}: slow, run once only")
    return samples


def is_slow(samples: Samples, repetitions: int, case: tuple[str, str, int]) -> bool:
    """Whether this pattern, system and number of threads was given up as slow or stopped."""
    measured = [values for key, values in samples.items() if (key[0], key[2], key[3]) == case]
    return not measured or any(len(values) < repetitions for values in measured)


def measure(
    folder: Path, systems: list[System], rounds: int, repetitions: int
) -> tuple[Samples, list[float]]:
    """All samples, and the round trips of a cache line at the beginning of each round."""
    samples: Samples = {}
    trips: list[float] = []
    threads_here = [threads for threads in THREADS if threads <= len(choose_processors())]
    for number in range(rounds):
        if len(threads_here) > 1:
            trips.append(float(first_line([str(folder / "ping_pong"), *map(str, choose_processors())])))
        for case in ((p, s.name, t) for p in PATTERNS for t in threads_here for s in systems):
            if number > 0 and is_slow(samples, repetitions, case):
                continue
            pattern, name, threads = case
            for key, values in run_program(folder, name, threads, repetitions, pattern).items():
                samples.setdefault(key, []).extend(values)
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    return samples, trips


# ---- the table -------------------------------------------------------------------------------------------


def quantile(values: list[float], share: float) -> float:
    """The value below which this share lies, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def rows(samples: Samples) -> Iterator[str]:
    """One line per pattern, mode, threads and system; fastest first."""
    for pattern, mode, threads in ((p, m, t) for p in PATTERNS for m in MODES for t in THREADS):
        medians = {
            key[2]: statistics.median(values)
            for key, values in samples.items()
            if (key[0], key[1], key[3]) == (pattern, mode, threads)
        }
        for name, median in sorted(medians.items(), key=lambda item: item[1]):
            values = samples[pattern, mode, name, threads]
            ratio = f"{median / medians[OURS]:9.2f}" if OURS in medians else f"{'':>9}"
            yield (
                f"{pattern:<12} {mode:<7} {threads:>7} {name:<12} {median:>9.1f} {min(values):>9.1f} "
                f"{quantile(values, 0.9):>9.1f} {ratio} {len(values):>5}"
            )


def record_all(samples: Samples) -> None:
    """Ours next to every other system, for the page."""
    medians = {key: statistics.median(values) for key, values in samples.items()}
    for (pattern, mode, name, threads), median in medians.items():
        if name == OURS:
            at = (pattern, mode, threads)
            peers = {
                key[2]: m for key, m in medians.items() if (key[0], key[1], key[3]) == at and key[2] != OURS
            }
            what = f"{pattern}, {mode}, {threads} threads"
            record(Figure(what, median, "ns", less_is_better=True, peers=peers))


def report(systems: list[System], samples: Samples, trips: list[float]) -> None:
    """The machine, the versions and the one table."""
    print(f"\n{machine()}; {platform.system()} {platform.release()}")
    for system in systems:
        print(f"{system.name}: {system.version}")
    if trips:
        listed = ", ".join(f"{trip:.0f}" for trip in trips)
        print(f"round trip of a cache line between the two processors, per round: {listed} ns")
    print("ns per task; the ratio is a system's median over ours (above 1: ours is faster)\n")
    print(
        f"{'pattern':<12} {'mode':<7} {'threads':>7} {'system':<12} {'median':>9} {'min':>9} {'p90':>9} "
        f"{'ratio':>9} {'runs':>5}"
    )
    print("\n".join(rows(samples)))
    record_all(samples)


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=3, help="per round and program, after a warm-up")
    parser.add_argument("--taskflow", default=os.environ.get("TASKFLOW_DIR"), metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="SYSTEM", help="a few systems")
    options = parser.parse_args()
    systems = find_systems(options.taskflow)
    if options.only:
        systems = [system for system in systems if system.name in options.only]
    print(
        f"load average before the run: {os.getloadavg()[0]:.2f} (a busy machine distorts the two-thread figures)"
    )
    with tempfile.TemporaryDirectory(prefix="task_overhead_") as name:
        built = build(systems, Path(name))
        samples, trips = measure(Path(name), built, options.rounds, options.repetitions)
    report(built, samples, trips)


if __name__ == "__main__":
    main()
