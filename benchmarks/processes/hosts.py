"""A training step of GPT-2 small's shape on two hosts, one device each, next to the same two devices in one process.

Claim (issue figure; "must" and "goal" are printed next to it): over a link that is not shaped, two
hosts keep 0.8 and 0.95 of one host's speed, by data and with sharded state.

The hosts are network namespaces of this machine, joined by a switch (tests/support/hosts.py), so
they share its two cores, and what the network costs is taken from computing: the system copies
every byte of a link three times. Both are as benchmarks/two_devices.py has them, and compute the
same bits; the hosts reach each other through MPICH (`pip install mpich`), started by its mpiexec.
They take turns, and medians are compared. Next to each figure: what moves between the hosts in a
step, and how long that takes at the rate at which MPI moves large messages over that link, measured
in the same run: the physical limit of a step is the larger of that and its kernels.

Run, as root: python benchmarks/processes/hosts.py [--only f32:dp ...] [--rounds 4] [--minutes 8]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # hosts to try
import two_devices
from figures import Figure, show
from machine import machine

from support.hosts import Hosts, missing
from tilewise.distributed import ProcessGroup

COMPARISONS = ("f32:dp", "f32:fsdp", "bf16:dp", "bf16:fsdp")
MUST, GOAL = 0.8, 0.95


def link_rate() -> float:
    """Bytes a second of large messages from the first process to the second."""
    with ProcessGroup() as group:
        return group.measure_links()[0].bytes_per_s


def compare(hosts: Hosts, options: argparse.Namespace, ends_at: float, rate: float) -> None:
    """All comparisons, as far as time permits."""
    for number, comparison in enumerate(options.only):
        left = ends_at - time.monotonic()
        if left < 0 and number:
            print(f"{comparison} is left out: it would take too long; raise --minutes")
            continue
        one, two = f"tilewise:{comparison}:1", f"tilewise:{comparison}:1:processes"
        until = time.monotonic() + left / (len(options.only) - number)
        entries = [(one, None), (two, None)]
        sides = two_devices.compete(entries, options, until, {two: hosts.over_mpi})
        if len(sides) < 2:
            continue
        seconds, alone = sides[1].median(), sides[0].median()
        moved = sides[1].median("moved")
        note = (
            f"{seconds * 1e3:.1f} and {alone * 1e3:.1f} ms; {moved / 1e6:.0f} MB to each host, "
            f"{moved / rate * 1e3:.0f} ms of the link"
        )
        show(
            Figure(
                f"{comparison}, two hosts: speed of one",
                alone / seconds,
                "x",
                must=MUST,
                goal=GOAL,
                note=note,
            )
        )
        if sides[0].loss != sides[1].loss:
            sys.exit(
                f"two hosts must compute the bits of one; got losses {sides[1].loss} and {sides[0].loss}"
            )


def main() -> None:
    """Parse arguments and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="in a turn, after one that is not counted")
    parser.add_argument("--minutes", type=float, default=8.0, help="no further round begins after so long")
    parser.add_argument("--link", action="store_true", help=argparse.SUPPRESS)  # one of both hosts
    options = parser.parse_args()
    if options.link:
        print(json.dumps(link_rate()))
        return
    reason = missing()
    if reason:
        sys.exit(f"this benchmark makes hosts of its own: {reason}")
    print(machine("numpy"))
    print(f"load before the run: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, Hosts(folder) as hosts:
        rate = json.loads(hosts.run([sys.executable, __file__, "--link"]).stdout)
        print(f"link: {rate / 1e9:.2f} GB/s in large messages", flush=True)
        compare(hosts, options, time.monotonic() + options.minutes * 60, rate)


if __name__ == "__main__":
    main()
