"""`tilewise doctor`: reports what slows programs down on this machine, what to change, and how fast
the machine is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from tilewise.cli.options import make_console

__all__ = ["doctor"]


def doctor(
    is_measured: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Measure cores and memory; takes a second and 256 MiB."),
    ] = True,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Report what slows programs down on this machine, and what to change.

    Checks the processor, cores and a container's limits, frequency, memory and its nodes, huge
    pages, open files, clock, load, compiler and MPI; measures the speed of cores and memory.
    Changes nothing. Lines begin with `ok`, `note` (worth knowing) or `warning` (it costs speed, or
    work will fail).

    If mpiexec has started several processes, it also reports how fast the first one reaches the
    others, idle and while their cores compute: `mpiexec -n 2 tilewise doctor`.

    Example: `tilewise doctor` and `tilewise doctor --json | jq '.findings[] | select(.state ==
    "warning")'`
    """
    from tilewise.comm import active_group
    from tilewise.machine import check_machine

    findings = check_machine()
    speeds = _speeds() if is_measured else {}
    group = active_group() if is_measured else None
    links = group.measure_links() if group is not None else []
    if is_json:
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"findings": rows, "speeds": speeds, "links": list(map(asdict, links))}, indent=1))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.state:8}{finding.name:{width}}  {finding.description}")
        if finding.advice:
            print(f"{'':8}{'':{width}}  -> {finding.advice}")
    for name, unit, scale in _SPEEDS:
        if name in speeds:
            print(f"{'speed':8}{name:{width}}  {speeds[name] / scale:,.1f} {unit}")
    for link in links:
        trip, rates = link.round_trip_s * 1e6, (link.bytes_per_s / 1e9, link.busy_bytes_per_s / 1e9)
        name = f"process {link.process}"
        print(
            f"{'link':8}{name:{width}}  host {link.host}: {trip:,.0f} us there and back, {rates[0]:.2f} GB/s, "
            f"{rates[1]:.2f} GB/s while it computes"
        )


_SPEEDS: Sequence[tuple[str, str, float]] = (
    ("f32", "GFLOP/s, all cores", 1e9),
    ("bf16", "GFLOP/s, all cores", 1e9),
    ("memory", "GB/s read", 1e9),
)


def _speeds() -> dict[str, float]:
    """Operations and bytes per second."""
    from tilewise.machine import measure_bandwidth, measure_flops

    speeds = {name: measure_flops(name) for name in ("f32", "bf16")}
    try:
        speeds["memory"] = measure_bandwidth()
    except MemoryError:
        make_console(stderr=True).print(
            "memory: not measured, because there is not enough free memory", highlight=False
        )
    return speeds
