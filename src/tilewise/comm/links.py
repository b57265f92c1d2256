"""Measures how fast the leader receives bytes from processes that a launcher started, over the path
that tiles take, and the offset of their clocks.

`busy_bytes_per_s` is the speed of a link while the cores at the other end compute. MPI transfers
nothing by itself, so a link that is slow in this state also slows training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tilewise._native.connection import World
from tilewise.core.errors import PeerLost

__all__ = ["BUSY_S", "ClockOffset", "Link", "bandwidth", "clock_offset", "compute", "round_trip"]

_ROUND_TRIPS, _TRANSFERS, _QUESTIONS = 200, 8, 16
_LARGE = 16 << 20
_PATIENCE_S = 60.0
BUSY_S = 2.0
_SIDE = 512  # rows and columns of the matrices that keep a core busy


@dataclass(frozen=True)
class Link:
    """The connection between the leader and a worker, as medians.

    Attributes:
        process: the worker's number.
        host: number of the worker's host; the leader's host is 0.
        round_trip_s: time to request and receive eight bytes.
        bytes_per_s: bandwidth of transfers of 16 MiB.
        busy_bytes_per_s: bandwidth of the same transfers while one of the worker's cores computes.
    """

    process: int
    host: int
    round_trip_s: float
    bytes_per_s: float
    busy_bytes_per_s: float


def round_trip(world: World, process: int) -> float:
    """Seconds to request and receive eight bytes from a process.

    Raises:
        PeerLost: the process does not answer.
    """
    return _median_s(world, process, 8, _ROUND_TRIPS)


def bandwidth(world: World, process: int) -> float:
    """Bytes per second that this process receives from another process.

    Raises:
        PeerLost: the other process does not answer.
    """
    return _LARGE / _median_s(world, process, _LARGE, _TRANSFERS)


def _median_s(world: World, process: int, num_bytes: int, times: int) -> float:
    times_s = [world.probe(process, num_bytes, _PATIENCE_S) for _ in range(times)]
    if min(times_s) < 0:
        raise PeerLost(
            f"[comm.links] a process must answer; got nothing from process {process} for {_PATIENCE_S:g} s"
            f"{': ' if world.cause else ''}{world.cause}; see that its host can be reached"
        )
    return statistics.median(times_s)


class ClockOffset(NamedTuple):
    """Nanoseconds by which another clock is ahead of the clock of this process, and the largest
    error of this number.
    """

    ahead_ns: int
    error_ns: int


def clock_offset(ask: Callable[[], int]) -> ClockOffset:
    """Measure the offset of another clock. The fastest of some round trips determines it; the error
    is at most half of that round trip.

    Args:
        ask: requests the other side's `time.monotonic_ns`.
    """
    samples: list[tuple[int, int]] = []
    for _ in range(_QUESTIONS):
        asked = time.monotonic_ns()
        answer = ask()
        answered = time.monotonic_ns()
        samples.append((answered - asked, answer - (asked + answered) // 2))
    round_trip_ns, ahead_ns = min(samples)
    return ClockOffset(ahead_ns, -(-round_trip_ns // 2))


def compute(seconds: float) -> int:
    """Keep a core busy for some time. Returns the number of matrix products computed."""
    matrix = np.ones((_SIDE, _SIDE), np.float32)
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        np.matmul(matrix, matrix)
        count += 1
    return count
