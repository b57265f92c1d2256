"""Runs all benchmarks and writes their figures to one page.

Writes `figures.json` and `figures.html` to build/bench and lists the figures that miss their bounds
and the benchmarks that failed. With `--against`, an earlier figures.json, it also lists figures
that are worse by more than 5% and exits 1. Figures of another or a busy machine are not comparable.

Run: python benchmarks/page.py [NAME ...] [--against FILE] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

from demo_step import measure_peak
from figures import FILE, Figure
from machine import machine

from tilewise.machine import measure_bandwidth

HERE = Path(__file__).resolve().parent
SHARED = ("figures.py", "machine.py", "page.py")
WORSE = 1.05
STYLE = """
:root { color-scheme: light dark; --bar: #4878a8; --peer: #9a9a9a; --must: #c0504d; --goal: #5b9a4b; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; font-size: 1.1rem; } table { border-collapse: collapse; width: 100%; }
td, th { padding: .15rem .6rem .15rem 0; text-align: left; vertical-align: top; font-weight: normal; }
td.value { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.peer td { color: color-mix(in srgb, currentColor 60%, transparent); } .missed { color: var(--must); }
svg { display: block; width: 16rem; height: 1.1rem; } small { opacity: .7; }
"""


@dataclass(frozen=True)
class Measured:
    """A figure and its benchmark."""

    benchmark: str
    figure: Figure

    @property
    def key(self) -> tuple[str, str]:
        return self.benchmark, self.figure.name


def benchmarks() -> list[str]:
    """All benchmarks, by their paths here."""
    own = [path for path in sorted(HERE.glob("*.py")) if path.name not in SHARED]
    below = [
        *sorted(HERE.glob("kernels/*.py")),
        *sorted(HERE.glob("runtime/*.py")),
        *(HERE / n / "run.py" for n in ("processes", "task_overhead", "tile_programs")),
        HERE / "tile_programs" / "all_reduce.py",
    ]
    return [path.relative_to(HERE).as_posix() for path in [*own, *below]]


def measured(record: Mapping[str, Any]) -> Measured:
    """From a record of a file."""
    names = {field.name for field in fields(Figure)}
    return Measured(record["benchmark"], Figure(**{k: v for k, v in record.items() if k in names}))


def run(names: Sequence[str]) -> tuple[list[Measured], list[str]]:
    """Measured figures, and failures."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "figures.jsonl")
        records.touch()
        for number, name in enumerate(names, 1):
            print(f"-- {number} of {len(names)}: {name}", flush=True)
            began = time.monotonic()
            environment = {**os.environ, FILE: str(records)}
            done = subprocess.run([sys.executable, HERE / name], env=environment, check=False)
            print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
            if done.returncode:
                failed.append(f"{name} (exit status {done.returncode})")
        return [measured(json.loads(line)) for line in records.read_text().splitlines()], failed


def ceilings() -> list[Figure]:
    """Limits of the machine, on all cores that this process may use."""
    threads = len(os.sched_getaffinity(0))
    figures = [
        Figure(f"multiply-adds, {dt}", measure_peak(f"peak_{dt}", threads) / 1e9, "GFLOP/s")
        for dt in ("f32", "bf16")
    ]
    return [*figures, Figure("memory, read", measure_bandwidth() / 1e9, "GB/s")]


def worse(now: Sequence[Measured], before: Sequence[Measured]) -> list[str]:
    """Figures that got worse by more than 5%, and missing ones of a benchmark that was run."""
    new_figures, ran = {one.key: one.figure for one in now}, {one.benchmark for one in now}
    lines = []
    for old in before:
        new = new_figures.get(old.key)
        what = f"{old.benchmark}: {old.figure.name}"
        if new is None:
            lines += [f"{what}: no longer measured"] if old.benchmark in ran else []
        elif new.times(old.figure.value) * WORSE < 1:
            lines.append(f"{what}: {new.value:.4g} {new.unit}, was {old.figure.value:.4g}")
    return lines


def bars(figure: Figure) -> list[tuple[str, float, str, str]]:
    """Name, value, class of the row and drawing, of the figure and of its peers, all on one scale."""
    bounds = [("must", figure.must), ("goal", figure.goal), ("limit", figure.limit)]
    scale = max([figure.value, *figure.peers.values(), *(b for _, b in bounds if b is not None), 1e-12])
    ticks = "".join(
        f'<line x1="{b / scale:.4f}" x2="{b / scale:.4f}" y1="0" y2="1" stroke="var(--{name}, currentColor)" '
        f'vector-effect="non-scaling-stroke" stroke-width="2"><title>{name} {b:g}</title></line>'
        for name, b in bounds
        if b is not None
    )
    rows = [
        (figure.name, figure.value, "", "--bar"),
        *((n, v, "peer", "--peer") for n, v in figure.peers.items()),
    ]
    return [
        (
            name,
            value,
            kind,
            f'<svg viewBox="0 0 1 1" preserveAspectRatio="none" role="img" aria-label="{value / scale:.0%}">'
            f'<rect y=".2" height=".6" width="{max(value, 0) / scale:.4f}" fill="var({color})"/>{ticks}</svg>',
        )
        for name, value, kind, color in rows
    ]


def rows_of(figure: Figure) -> str:
    """A figure's rows of the table."""
    asked = ", ".join(
        f"{name} {bound:g}"
        for name, bound in (("must", figure.must), ("goal", figure.goal), ("limit", figure.limit))
        if bound is not None
    )
    lines = []
    for name, value, kind, drawing in bars(figure):
        said = (
            ""
            if kind
            else f'{asked} <b class="{figure.verdict}">{figure.verdict}</b> <small>{escape(figure.note)}</small>'
        )
        label = f"&emsp;{escape(name)}" if kind else escape(name)
        lines.append(
            f'<tr class="{kind}"><td>{label}</td><td class="value">{value:.4g} {escape(figure.unit)}</td>'
            f"<td>{drawing}</td><td>{said}</td></tr>"
        )
    return "\n".join(lines)


def page(
    about: str, limits: Sequence[Figure], measured_figures: Sequence[Measured], failed: Sequence[str]
) -> str:
    """The whole page; self-contained."""
    sections = [("what this machine permits", limits)]
    for name in dict.fromkeys(one.benchmark for one in measured_figures):
        sections.append((name, [one.figure for one in measured_figures if one.benchmark == name]))
    body = "".join(
        f"<h2>{escape(name)}</h2>\n<table>\n{''.join(rows_of(f) for f in figures)}\n</table>\n"
        for name, figures in sections
    )
    missing = f'<p class="missed">Failed: {escape(", ".join(failed))}.</p>' if failed else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Tilewise: figures</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}</style></head>\n<body><h1>What Tilewise reaches here</h1><p>{escape(about)}</p>{missing}"
        "<p>Blue is Tilewise, grey are others in the same run. Ticks: red what is asked, green the goal, "
        f"plain what the machine permits.</p>\n{body}</body></html>\n"
    )


def read(path: Path) -> list[Measured]:
    """Figures of an earlier run."""
    try:
        return [measured(record) for record in json.loads(path.read_text(encoding="utf-8"))["figures"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"--against needs a figures.json of this program; got {str(path)!r}: {error}"
        ) from None


def main() -> int:
    """Run, write, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {', '.join(benchmarks())}")
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier figures.json")
    parser.add_argument("--output", type=Path, metavar="FOLDER", default=HERE.parent / "build" / "bench")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in benchmarks()]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; choose from {', '.join(benchmarks())}")
    before = read(options.against) if options.against else []
    options.output.mkdir(parents=True, exist_ok=True)
    about, limits = machine("numpy", "torch", "transformers"), ceilings()
    for limit in limits:
        print(limit.line())
    measurements, failed = run(options.names or benchmarks())
    records = [{"benchmark": one.benchmark, **asdict(one.figure)} for one in measurements]
    content = {
        "machine": about,
        "ceilings": [asdict(limit) for limit in limits],
        "failed": failed,
        "figures": records,
    }
    (options.output / "figures.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (options.output / "figures.html").write_text(page(about, limits, measurements, failed), encoding="utf-8")
    print(
        f"{len(measurements)} figures: {options.output / 'figures.html'}, {options.output / 'figures.json'}"
    )
    for one in measurements:
        if one.figure.verdict == "missed":
            print(f"missed: {one.benchmark}: {one.figure.line()}")
    lines = worse(measurements, before)
    for line in [*(f"failed: {name}" for name in failed), *(f"worse: {line}" for line in lines)]:
        print(line)
    return 1 if failed or lines else 0


if __name__ == "__main__":
    sys.exit(main())
