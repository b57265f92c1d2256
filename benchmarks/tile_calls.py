"""The cost of a tile call beyond its kernel, from C++ and from Python.

Claim: a blocking call takes at most 0.2 us more than its kernel from C++, and at most 2 us from
Python; an asynchronous one, with the run of its task, does not take more. The kernel is `relu` on a
row of 16 elements, whose own time is measured in the same round (`kernels.isa.run`, many runs in one
call) and subtracted. The limit next to each figure is an empty task of the task runtime, submitted
in the same way and language: the order of two buffers without checks and kernel. Tiles that are
parts of one buffer are a figure of their own, because their order needs a comparison of boxes. All
figures are medians of rounds, in which every way has its turn.

Run: python benchmarks/tile_calls.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from figures import Figure, show
from machine import machine

import tilewise
from tilewise import tile
from tilewise.kernels.isa import run
from tilewise.runtime import Input, Output, Runtime

COUNT = 50_000
NATIVE = r"""
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tilewise/tile.hpp"

using namespace tilewise;

template <class Body>
void measure(const char* name, Body&& body) {
  constexpr int kCount = 200'000;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kCount; ++i) body();
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
  std::printf("%s %.1f\n", name, spent.count() / kCount);
}

int main(int, char** argv) {
  pto::Runtime rt({.num_workers = 1});
  std::vector<float> a(16, 1), b(16), c(32 * 64);
  const pto::Buffer x = rt.buffer(a), y = rt.buffer(b), z = rt.buffer(c);
  const auto src = tile::Tile::of<float>(x, 1, 16), dst = tile::Tile::of<float>(y, 1, 16);
  const auto whole = tile::Tile::of<float>(z, 32, 64);
  const auto from = whole.part(0, 0, 1, 16), to = whole.part(8, 16, 1, 16);
  const pto::Kernel nothing = rt.kernel("nothing", [](void* const*, const uint64_t*) { return PTO_OK; });
  pto_param params[] = {{PTO_INPUT, 0, x.handle(), {0}, nullptr, nullptr},
                        {PTO_OUTPUT, 0, y.handle(), {0}, nullptr, nullptr}};
  const pto::Region first = pto::range(0, 64), second = pto::range(2112, 64);
  pto_param parts[] = {{PTO_INPUT, 0, z.handle(), {0}, &first, nullptr},
                       {PTO_OUTPUT, 0, z.handle(), {0}, &second, nullptr}};
  pto_task_spec spec{};
  spec.kernel = nothing.id;
  spec.worker_type = PTO_VECTOR;
  spec.num_params = 2;
  spec.flags = PTO_KEEP | PTO_RUN_HERE;
  const auto empty = [&](pto_param* used) {
    spec.params = used;
    const pto_task task = pto_submit(rt.get(), &spec);
    pto_wait(rt.get(), task, PTO_FOREVER);
    pto_task_release(rt.get(), task);
  };
  for (int round = 0; round < std::atoi(argv[1]); ++round) {
    measure("blocking", [&] { tile::relu(src, dst); });
    measure("blocking-limit", [&] { empty(params); });
    measure("async", [&] { tile::relu_async(src, dst); });
    rt.wait_all();
    measure("async-limit", [&] { rt.submit(nothing, {pto::input(x), pto::output(y)}); });
    rt.wait_all();
    measure("parts", [&] { tile::relu(from, to); });
    measure("parts-limit", [&] { empty(parts); });
  }
}
"""


def native_rounds(rounds: int) -> dict[str, list[float]]:
    """Nanoseconds per call in C++, per round."""
    with tempfile.TemporaryDirectory() as name:
        source, program, library = Path(name, "calls.cpp"), Path(name, "calls"), tilewise.get_library()
        source.write_text(NATIVE, encoding="utf-8")
        flags = ["-std=c++20", "-O2", f"-I{tilewise.get_include()}", f"-L{library}", f"-Wl,-rpath,{library}"]
        links = ["-ltilewise_tile", "-ltilewise_pto", "-pthread"]
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *flags, str(source), "-o", str(program), *links], check=True)
        done = subprocess.run([program, str(rounds)], capture_output=True, text=True, check=True)
    figures: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        kind, value = line.split()
        figures.setdefault(kind, []).append(float(value))
    return figures


def spent_ns(call: Callable[[], object]) -> float:
    """Nanoseconds per call, without those of an empty one."""

    def loop(body: Callable[[], object]) -> float:
        begin = time.perf_counter_ns()
        for _ in range(COUNT):
            body()
        return (time.perf_counter_ns() - begin) / COUNT

    return loop(call) - loop(lambda: None)


def python_rounds(rounds: int) -> dict[str, list[float]]:
    """The same from Python, and nanoseconds of the kernel alone."""
    figures: dict[str, list[float]] = {}
    x, y, z = np.ones((1, 16), np.float32), np.ones((1, 16), np.float32), np.ones((32, 64), np.float32)
    with Runtime(num_workers=1) as rt, rt.registered(x, y, z) as (hx, hy, hz):
        source, target, params = hz[:1, :16], hz[8:9, 16:32], [Input(hx), Output(hy)]
        box_params = [Input(source), Output(target)]
        ways: dict[str, Callable[[], object]] = {
            "blocking": lambda: tile.relu(hx, hy),
            "blocking-limit": lambda: rt.submit(None, params).wait(),
            "async": lambda: tile.relu_async(hx, hy),
            "async-limit": lambda: rt.submit(None, params),
            "parts": lambda: tile.relu(source, target),
            "parts-limit": lambda: rt.submit(None, box_params).wait(),
        }
        for _ in range(rounds):
            for name, call in ways.items():
                figures.setdefault(name, []).append(spent_ns(call))
                rt.wait_all()
            begin = time.perf_counter_ns()
            run("relu_f32", [y, x], repeat=20 * COUNT)
            figures.setdefault("kernel", []).append((time.perf_counter_ns() - begin) / (20 * COUNT))
    return figures


def main() -> None:
    """Print a line per way to call."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f"{machine()}; the kernel is relu on 16 elements; 1 worker")
    python = python_rounds(rounds)
    kernel = statistics.median(python["kernel"])
    notes = {
        "blocking": "",
        "async": "with the run of its task",
        "parts": "blocking, two parts of one buffer",
    }
    for language, figures, must in (("C++", native_rounds(rounds), 0.2), ("Python", python, 2.0)):
        for way, note in notes.items():
            show(
                Figure(
                    f"tile call from {language}, {way}, beyond the kernel",
                    (statistics.median(figures[way]) - kernel) / 1e3,
                    "us",
                    less_is_better=True,
                    must=must,
                    limit=statistics.median(figures[f"{way}-limit"]) / 1e3,
                    note=note,
                )
            )


if __name__ == "__main__":
    main()
