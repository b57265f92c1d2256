"""`Calls`: places all buffers of a plan in memory, and binds every use of a template to them.

Buffers for the whole run come first, then results of segments, then temporaries of templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.ir.graph import Graph
from tilewise.ir.program import Call
from tilewise.plan.bind import Binder
from tilewise.plan.buffers import RootTensors, align_for_files, apart, template_buffers
from tilewise.plan.memory import FILE_PAGE, Buffer, place_buffers, place_in_sequence
from tilewise.plan.prefetched_states import place_prefetched, prefetched_apart
from tilewise.plan.reuse import LiveInterval
from tilewise.plan.shapes import round_up
from tilewise.plan.tables import file_begin_of
from tilewise.plan.variants import Use, Variant, Variants

__all__ = ["Calls"]


class Calls:
    """Places buffers and binds uses.

    Args:
        graph: the root graph.
        tensors: its tensors.
        lasting: buffers for the whole run, in order.
        results: buffers that are passed between segments.

    Attributes:
        binder: fills the table of entries.
        calls: phase and call of each use.
        live_intervals: the temporaries of each variant's first use, by variant.
        outside: entries of tensors that users read or write; created first.
    """

    def __init__(
        self, graph: Graph, tensors: RootTensors, lasting: Sequence[Buffer], results: Sequence[Buffer]
    ) -> None:
        self._lasting, self._lasting_in_file = apart(lasting)
        self._results, self._results_in_file = apart(results)
        self._temporaries: list[Buffer] = []
        self._lasting_end = place_in_sequence(self._lasting, 0)
        if self._lasting_in_file or self._results_in_file:  # copies of tensors in files begin at a page
            self._lasting_end = round_up(self._lasting_end, FILE_PAGE)
            align_for_files([*self._results, *self._lasting_in_file, *self._results_in_file])
        self._results, prefetched = prefetched_apart(graph, self._results)
        end = place_buffers(self._results, self._lasting_end)
        place_prefetched(prefetched, self._results, self._lasting_end)
        self._results += prefetched
        self._end = self._workspace_end = max([end, *(b.end for b in prefetched)])
        self.binder = Binder(tensors, [*self._lasting, *self._results])
        self.calls: list[tuple[str, Call]] = []
        self.live_intervals: dict[int, list[LiveInterval]] = {}
        self.outside: dict[int, tuple[int, ...]] = {}
        if not (self._lasting_in_file or self._results_in_file):  # files begin after all temporaries
            self.outside = self.binder.outside()

    def take_all(self, variants: Variants) -> None:
        """Place the temporaries of all variants and bind all uses."""
        room = max((b.end for variant in variants.variants for b in variant.temporaries), default=0)
        for variant in variants.variants:
            self._place(variant, room)
        if self._lasting_in_file or self._results_in_file:
            self.placed()
            self.binder.add([*self._lasting_in_file, *self._results_in_file])
            self.outside = self.binder.outside()
        for use in variants.uses:
            self._bind(use)

    def placed(self) -> tuple[list[Buffer], Mapping[str, int]]:
        """All buffers with their offsets, and bytes per region, after all uses are bound."""
        regions = {
            "lasting": self._lasting_end,
            "activations": self._end - self._lasting_end,
            "temporaries": self._workspace_end - self._end,
        }
        begin = file_begin_of(regions)
        regions["files"] = (
            place_buffers(self._results_in_file, place_in_sequence(self._lasting_in_file, begin)) - begin
        )
        return [
            *self._lasting,
            *self._results,
            *self._temporaries,
            *self._lasting_in_file,
            *self._results_in_file,
        ], regions

    def _place(self, variant: Variant, room: int) -> None:
        """Place the temporaries of a template. Templates run one after another, so all temporaries start at one
        address; `room` is the size of the largest template's temporaries."""
        own = template_buffers(variant, self._end, room)
        self._workspace_end = max(self._workspace_end, *(b.end for b in own)) if own else self._workspace_end
        self._temporaries += own
        self.binder.add(own, [variant])

    def _bind(self, use: Use) -> None:
        call = self.binder.use(use)
        self.calls.append((use.segment.phase, call))
        if use.variant not in self.live_intervals:
            self.live_intervals[use.variant] = self.binder.live_intervals(use, call)
