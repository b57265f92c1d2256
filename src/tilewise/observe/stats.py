"""Counters and high-water marks of a runtime, with advice on its options.

`Runtime.stats` reads them. Every figure covers the whole life of the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RuntimeStats"]

ROOMY = 0.5  # a resource whose highest fill stayed below this share could be smaller
FULL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeStats:
    """Counters of a runtime, and its high-water marks.

    Attributes:
        num_submitted, num_completed, num_failed: numbers of tasks. Cancelled tasks, and poisoned
            tasks (a predecessor failed), count as failed.
        num_helped: tasks that waiting submitters ran themselves.
        num_stalls, stall_ns: how often and how long submitters waited for window, heap, handles or
            regions.
        window, window_high: tasks of a thread that are submitted and not yet complete: the
            capacity, and the highest number seen. The number is sampled at every 256th submission
            while nothing is recorded, and when a thread finds the window full.
        heap_bytes, heap_high_bytes: bytes for outputs that the runtime allocates: the capacity, and
            the highest use seen.
        handles, handles_high, regions, regions_high: registered buffers and regions now, and the
            highest numbers seen.
        metadata_bytes: memory of the runtime itself, without the heap.
    """

    num_submitted: int
    num_completed: int
    num_failed: int
    num_helped: int
    stall_ns: int
    num_stalls: int
    window: int
    window_high: int
    heap_bytes: int
    heap_high_bytes: int
    handles: int
    handles_high: int
    regions: int
    regions_high: int
    metadata_bytes: int

    def advice(self) -> list[str]:
        """Sentences on how to size the runtime for the work so far; empty if no option needs a change."""
        sentences = []
        if self.num_stalls > 0 and self.window_high >= self.window:
            sentences.append(
                f"The window of {self.window} tasks was full; submitters stalled {self.num_stalls} times for "
                f"{self.stall_ns / 1e6:.1f} ms. If workers idled meanwhile, try window={2 * self.window}."
            )
        if self.heap_high_bytes >= FULL * self.heap_bytes:
            sentences.append(
                f"The heap of {self.heap_bytes} bytes was full; end scopes earlier, or try "
                f"heap_bytes={2 * self.heap_bytes}."
            )
        elif self.heap_high_bytes <= ROOMY * self.heap_bytes:
            sentences.append(
                f"The heap was never fuller than {self.heap_high_bytes} of {self.heap_bytes} bytes; "
                f"heap_bytes={max(1 << 18, 2 * self.heap_high_bytes)} would do."
            )
        return sentences
