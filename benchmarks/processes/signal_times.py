"""Times of signals between two processors, from signals.cc, which is compiled here."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SignalTimes", "measure_signals", "num_processors"]

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[1] / "native"
COMPILER = [os.environ.get("CXX", "g++"), "-std=c++20", "-O3", "-DNDEBUG"]
ROUNDS = 3000


@dataclass(frozen=True)
class SignalTimes:
    """Medians over rounds, in turns with a plain cache line.

    Attributes:
        how: the mode of signals.cc.
        plain_ns: a plain line there and back.
        signal_ns: a signal there and back.
        ratio: a signal one way, over `plain_ns`.
        best, worst: the best and the worst tenth of `ratio`.
    """

    how: str
    plain_ns: float
    signal_ns: float
    ratio: float
    best: float
    worst: float

    @property
    def note(self) -> str:
        """The times, for people."""
        return (
            f"{self.signal_ns / 2:.0f} ns one way / {self.plain_ns:.0f} ns, a plain line there and back; nine "
            f"tenths of rounds above {self.best:.2f}, below {self.worst:.2f}"
        )


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def measure_signals(modes: Iterable[str]) -> Iterator[SignalTimes]:
    """Compile the program, and run it in each of these modes on the first two processors."""
    processors = [str(p) for p in sorted(os.sched_getaffinity(0))[:2]]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "signals")
        sources = [
            path
            for part in ("comm", "memory")
            for path in sorted((NATIVE / part).glob("*.cc"))
            if not path.stem.endswith("_test")
        ]
        includes = [f"-I{NATIVE}", f"-I{NATIVE / 'include'}"]
        command = [*COMPILER, *includes, str(HERE / "signals.cc"), *map(str, sources), "-o", str(program)]
        subprocess.run([*command, "-lpthread", "-ldl"], check=True)
        for how in modes:
            words = [program, how, *processors, str(ROUNDS)]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            yield SignalTimes(how, *map(float, done.stdout.split()))
