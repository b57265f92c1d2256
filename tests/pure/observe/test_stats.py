"""What counters advise: only what was full or far too large is named, with the size to try."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewise.observe.stats import RuntimeStats

GOOD = RuntimeStats(
    num_submitted=9,
    num_completed=9,
    num_failed=0,
    num_helped=0,
    stall_ns=0,
    num_stalls=0,
    window=64,
    window_high=64,
    heap_bytes=1 << 20,
    heap_high_bytes=(1 << 19) + 1,
    handles=0,
    handles_high=0,
    regions=0,
    regions_high=0,
    metadata_bytes=0,
)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, None),
        ({"num_stalls": 3, "window_high": 63}, None),  # stalled for something else
        (
            {"num_stalls": 3, "stall_ns": 2_500_000},
            "The window of 64 tasks was full; submitters stalled 3 times for 2.5 ms. If workers idled meanwhile, try "
            "window=128.",
        ),
        (
            {"heap_high_bytes": round(0.95 * (1 << 20)) + 1},
            "The heap of 1048576 bytes was full; end scopes earlier, or try heap_bytes=2097152.",
        ),
        ({"heap_high_bytes": round(0.95 * (1 << 20)) - 1}, None),
        (
            {"heap_high_bytes": 1 << 19},
            "The heap was never fuller than 524288 of 1048576 bytes; heap_bytes=1048576 would do.",
        ),
        (
            {"heap_high_bytes": 5},
            "The heap was never fuller than 5 of 1048576 bytes; heap_bytes=262144 would do.",
        ),
    ],
)
def test_advice(changes, advice):
    """A window that was full while submitters stalled, and a heap that was full, or at most half full."""
    assert replace(GOOD, **changes).advice() == ([] if advice is None else [advice])
