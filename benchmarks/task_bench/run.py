"""Task Bench (Slaughter et al. 2020) on this project's task runtime, next to its OpenMP driver.

Claims: every pattern passes the core's checks of every input byte, also with `-field 2`, where writers must wait for
readers; METG(50%) of the stencil on two threads is at most 500 ns and 0.15 of GNU OpenMP's. Our driver runs twice:
submitting every task (`tilewise`), and recording what repeats and replaying it (`tilewise_replay`). The physical
limit is `static`: no runtime at all, each thread walks through its own block of points, a counter per point.

METG(50%), the minimum effective task granularity, is the smallest time per task at which the kernel still reaches
half of the best FLOP/s; it is read off a sweep of the kernel's iterations, between two points by their logarithms.
The best FLOP/s is that of long tasks, measured next to every point: a machine whose speed changes by half while the
sweep runs would else be compared with its better self. Rounds visit all drivers at each point; METG is given for the
median of the rounds, and for each point's round with the fastest long tasks. A run is long enough, some 20 ms, that
what is done once, such as recording, counts for little. All is compiled by g++ -O3 with asserts, and every thread has
a processor of its own.

The core is not part of this repository: --core names a checkout of https://github.com/StanfordLegion/task-bench,
which is read and not written. The OpenMP driver takes at most 9 dependencies per task, ours 23; what a driver
cannot take is reported as "n/a".

Run: python benchmarks/task_bench/run.py --core DIR [--threads 2] [--rounds 5] [--width 4] [--steps 20000]
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATTERNS = [
    "trivial",
    "no_comm",
    "stencil_1d",
    "stencil_1d_periodic",
    "dom",
    "tree",
    "fft",
    "all_to_all",
    "nearest",
    "spread",
    "random_nearest",
]
PERIODIC = {"spread", "random_nearest"}  # those whose dependencies change from step to step
CHECKED_WIDTHS = [4, 16]
ITERATIONS = [2**exponent for exponent in range(15)]
OURS, OURS_REPLAYED, OPENMP, STATIC = "tilewise", "tilewise_replay", "gnu_openmp", "static"
LONG_ITERATIONS = 4096
SHORT_ITERATIONS = 64  # from here on a run has fewer steps, so that it takes no longer,
LEAST_STEPS = 1000  # down to these
OPENMP_MAX_DEPENDENCIES = 9
TIMEOUT_S = 120


@dataclass(frozen=True)
class Driver:
    """A program that runs Task Bench's options, and its own further options."""

    name: str
    path: Path
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The output of one run; `error` is empty on success."""

    flops_per_s: float = 0.0
    task_us: float = 0.0  # elapsed time times threads, divided by tasks
    error: str = ""
    peak: float = 0.0  # FLOP/s of long tasks, measured next to it

    @property
    def efficiency(self) -> float:
        """Share of what the machine could do at that moment."""
        return self.flops_per_s / self.peak


# ---- building --------------------------------------------------------------------------------------------


def compile_files(command: list[str]) -> None:
    """Run a compiler; on failure exit with its output."""
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{run.stderr}")


def build_core(core: Path, folder: Path) -> list[str]:
    """Compile the core next to the drivers, with the flags of its own Makefile; returns the objects."""
    cpuinfo = Path("/proc/cpuinfo")
    has_avx2 = cpuinfo.exists() and " avx2 " in cpuinfo.read_text()
    flags = ["-O3", *(["-mavx2", "-mfma"] if has_avx2 else [])]
    objects = []
    sources = ["core.cc", "core_c.cc", "core_kernel.cc", "timer.cc", "core_random.c", "siphash.c"]
    for source in sources:
        objects.append(str(folder / f"{source}.o"))
        compiler = ["g++", "-std=c++11"] if source.endswith(".cc") else ["gcc", "-std=c11"]
        compile_files([*compiler, *flags, "-c", str(core / "core" / source), "-o", objects[-1]])
    return objects


def build_openmp(core: Path, folder: Path, objects: list[str]) -> Driver:
    """Task Bench's own OpenMP driver, unchanged."""
    source, program = core / "openmp" / "main.cc", folder / "openmp_driver"
    flags = ["-O3", "-std=c++11", "-fopenmp", "-I", str(core / "core")]
    compile_files(["g++", *flags, str(source), *objects, "-o", str(program)])
    return Driver(OPENMP, program)


def build_ours(core: Path, folder: Path, objects: list[str]) -> list[Driver]:
    """Our driver, submitting and replaying, linked against the installed package; without the
    package None, with a message.
    """
    try:
        import tilewise

        include, library = str(tilewise.get_include()), str(tilewise.get_library())
    except (ImportError, AttributeError) as error:
        print(f"{OURS} is left out: the package must be installed, with its headers and library ({error})")
        return []
    program = folder / "tilewise_driver"
    # -Wno-deprecated-declarations: the core's header uses std::is_pod.
    flags = ["-O3", "-std=c++20", "-Wno-deprecated-declarations", "-I", str(core / "core"), "-I", include]
    libraries = ["-L", library, "-ltilewise_pto", f"-Wl,-rpath,{library}", "-pthread"]
    source = str(HERE / "tilewise_driver.cc")
    compile_files(["g++", *flags, source, *objects, *libraries, "-o", str(program)])
    return [Driver(OURS, program), Driver(OURS_REPLAYED, program, ("-replay",))]


def build_static(core: Path, folder: Path, objects: list[str]) -> Driver:
    """The limit: threads that own their points."""
    program = folder / "static_driver"
    flags = ["-O3", "-std=c++20", "-Wno-deprecated-declarations", "-I", str(core / "core"), "-pthread"]
    compile_files(["g++", *flags, str(HERE / "static_driver.cc"), *objects, "-o", str(program)])
    return Driver(STATIC, program)


# ---- running ---------------------------------------------------------------------------------------------


def find_number(text: str, label: str) -> float:
    """The number after a label at the beginning of a line of the core's report."""
    match = re.search(rf"^{re.escape(label)} ([0-9.e+-]+)", text, re.MULTILINE)
    return float(match[1]) if match else math.nan


def run_driver(driver: Driver, threads: int, options: list[str]) -> Result:
    """One run; a failed assert of the core ends the program by a signal."""
    command = [str(driver.path), "-worker", str(threads), *driver.options, *options]
    pinned = {**os.environ, "OMP_PROC_BIND": "true"}  # the other drivers do it themselves
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=pinned)
    except subprocess.TimeoutExpired:
        return Result(error=f"stopped after {TIMEOUT_S} s")
    if run.returncode != 0:
        lines = run.stderr.strip().splitlines() or ["no message"]
        return Result(error=f"status {run.returncode}: {lines[-1]}")
    elapsed_s, tasks = find_number(run.stdout, "Elapsed Time"), find_number(run.stdout, "Total Tasks")
    if math.isnan(elapsed_s) or math.isnan(tasks):
        return Result(error="no report was printed")
    return Result(find_number(run.stdout, "FLOP/s"), elapsed_s * threads / tasks * 1e6)


# ---- the checks ------------------------------------------------------------------------------------------


def pattern_options(pattern: str, width: int, steps: int, fields: int | None) -> list[str]:
    """The options of one checked run; 64 bytes per buffer, so that more than one pair of values is checked."""
    options = ["-type", pattern, "-width", str(width), "-steps", str(steps), "-output", "64"]
    if pattern in PERIODIC:
        options += ["-period", "2"]
    return options + (["-field", str(fields)] if fields else [])


def check_patterns(drivers: list[Driver], threads: int, steps: int) -> int:
    """Run every pattern on every driver; prints a table and returns how many runs failed."""
    print(f"\nchecks: {threads} threads, {steps} steps, every input byte compared by the core")
    print(f"{'pattern':<20} {'width':>5} {'fields':>6}  " + "".join(f"{d.name:<17}" for d in drivers))
    num_failed = 0
    for pattern, width, fields in (
        (pattern, width, fields) for pattern in PATTERNS for width in CHECKED_WIDTHS for fields in (None, 2)
    ):
        cells, errors = [], []
        for driver in drivers:
            if driver.name == OPENMP and pattern == "all_to_all" and width > OPENMP_MAX_DEPENDENCIES:
                cells.append("n/a")
                continue
            result = run_driver(driver, threads, pattern_options(pattern, width, steps, fields))
            cells.append("FAILED" if result.error else "passed")
            errors += [f"    {driver.name}: {result.error}"] if result.error else []
        num_failed += len(errors)
        print(f"{pattern:<20} {width:>5} {fields or steps:>6}  " + "".join(f"{c:<17}" for c in cells))
        print("\n".join(errors), end="\n" if errors else "")
    return num_failed


# ---- METG ------------------------------------------------------------------------------------------------


def sweep(
    drivers: list[Driver], threads: int, rounds: int, options: list[str], steps: int
) -> dict[str, list[list[Result]]]:
    """For each driver and each number of iterations the results of all rounds; steps: of the shortest tasks."""
    results: dict[str, list[list[Result]]] = {d.name: [[] for _ in ITERATIONS] for d in drivers}

    def run(driver: Driver, iterations: int) -> Result:
        fewer = min(steps, max(LEAST_STEPS, steps * SHORT_ITERATIONS // max(iterations, SHORT_ITERATIONS)))
        result = run_driver(driver, threads, [*options, "-iter", str(iterations), "-steps", str(fewer)])
        if result.error:
            sys.exit(f"{driver.name}, {iterations} iterations: {result.error}")
        return result

    for _ in range(rounds):
        for index, iterations in enumerate(ITERATIONS):
            for driver in drivers:
                before = run(drivers[0], LONG_ITERATIONS).flops_per_s
                result = run(driver, iterations)
                after = run(drivers[0], LONG_ITERATIONS).flops_per_s
                results[driver.name][index].append(replace(result, peak=(before + after) / 2))
    return results


def median_of(results: list[Result]) -> Result:
    """The result of the median round, by efficiency."""
    return sorted(results, key=lambda result: result.efficiency)[(len(results) - 1) // 2]


def fastest_of(results: list[Result]) -> Result:
    """The result of the round in which the machine was fastest."""
    return max(results, key=lambda result: result.peak)


def metg_us(points: list[Result]) -> float:
    """The smallest time per task, in microseconds, at which half of the peak is reached; nan if it never is.

    The points go from few iterations to many; the last crossing counts, so that a noisy point below cannot flatter.
    """
    efficiencies = [point.efficiency for point in points]
    above = next((i for i in range(len(points)) if min(efficiencies[i:]) >= 0.5), None)
    if above is None:
        return math.nan
    if above == 0:
        return points[0].task_us
    low, high = points[above - 1], points[above]
    share = math.log(0.5 / efficiencies[above - 1]) / math.log(efficiencies[above] / efficiencies[above - 1])
    return float(low.task_us * (high.task_us / low.task_us) ** share)


def report_metg(results: dict[str, list[list[Result]]]) -> None:
    """The sweep as a table, then METG of each driver and the ratio."""
    medians = {name: [median_of(each) for each in sweeps] for name, sweeps in results.items()}
    fastest = {name: [fastest_of(each) for each in sweeps] for name, sweeps in results.items()}
    print(f"{'iterations':>10}" + "".join(f"  {name + ' us/task, of peak':>32}" for name in medians))
    for index, iterations in enumerate(ITERATIONS):
        cells = (f"{m[index].task_us:>18.3f} {m[index].efficiency:>13.0%}" for m in medians.values())
        print(f"{iterations:>10}" + "".join(f"  {cell}" for cell in cells))
    for label, chosen in (("median of the rounds", medians), ("rounds with the fastest long tasks", fastest)):
        metg = {name: metg_us(points) for name, points in chosen.items()}
        listed = ", ".join(
            f"{name} not reached" if math.isnan(value) else f"{name} {value * 1e3:.0f} ns"
            for name, value in metg.items()
        )
        print(f"METG(50%), {label}: {listed}")
        for peer in (OPENMP, STATIC):
            # A peer that never gets there needs more than its longest tasks.
            is_bound = math.isnan(metg[peer])
            theirs = chosen[peer][-1].task_us if is_bound else metg[peer]
            ratios = ", ".join(f"{name} {metg[name] / theirs:.3f}" for name in metg if name.startswith(OURS))
            print(f"    of that of {peer}: {'less than ' if is_bound else ''}{ratios}")


def main() -> None:
    """Build, check, sweep."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--core", type=Path, required=True, metavar="DIR", help="a checkout of task-bench")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="of the sweep")
    parser.add_argument("--width", type=int, default=4, help="of the swept stencil")
    parser.add_argument(
        "--steps",
        type=int,
        default=20000,
        help="of the sweep's short tasks; long ones and the checks take fewer",
    )
    parser.add_argument("--checks-only", action="store_true")
    options = parser.parse_args()
    if not (options.core / "core" / "core.h").is_file():
        parser.error(f"--core: no core/core.h in {options.core}; it must be a checkout of task-bench")
    with tempfile.TemporaryDirectory(prefix="task_bench_") as name:
        print(
            f"load average before the run: {os.getloadavg()[0]:.2f} (OpenMP's tasks suffer most from neighbours)"
        )
        objects = build_core(options.core, Path(name))
        ours = build_ours(options.core, Path(name), objects)
        drivers = [
            *ours,
            build_openmp(options.core, Path(name), objects),
            build_static(options.core, Path(name), objects),
        ]
        num_failed = check_patterns(drivers, options.threads, min(options.steps, LEAST_STEPS))
        if not options.checks_only:
            stencil = ["-type", "stencil_1d", "-kernel", "compute_bound", "-field", "2"]
            stencil += ["-width", str(options.width)]
            print(
                f"\nsweep: {' '.join(stencil)} -steps {options.steps} or fewer, {options.threads} threads, "
                f"{options.rounds} rounds, medians"
            )
            report_metg(sweep(drivers, options.threads, options.rounds, stencil, options.steps))
    if num_failed:
        sys.exit(f"{num_failed} runs failed")


if __name__ == "__main__":
    main()
