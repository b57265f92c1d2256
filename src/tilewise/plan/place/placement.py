"""Places all buffers of a plan in a device's arena and file.

Buffers for the whole run come first, then results of segments, then temporaries of templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewise.plan.lower import Variants
from tilewise.plan.memory import (
    FILE_PAGE,
    Buffer,
    Placed,
    align_for_files,
    apart,
    file_begin_of,
    gap_for,
    place_buffers,
    place_in_sequence,
)
from tilewise.plan.place.buffers import carry_and_ring_buffers, lasting_buffers, template_buffers
from tilewise.plan.schedule import Scheduled, prefetched_apart, result_buffers
from tilewise.plan.shapes import round_up

__all__ = ["Placement", "place"]


@dataclass(frozen=True)
class Placement:
    """Where everything is in a device's memory and file; equal on all devices.

    Attributes:
        buffers: all buffers with their offsets.
        regions: bytes of the regions of the arena and of the file, by name: lasting, activations,
            temporaries, files.
    """

    buffers: tuple[Buffer, ...]
    regions: Mapping[str, int]


def place(scheduled: Scheduled, lowered: Variants) -> Placement:
    """Give every buffer of a plan its offset.

    Templates run one after another, so the temporaries of all templates start at one address.
    """
    tensors = scheduled.tensors
    lasting, lasting_in_file = apart([*carry_and_ring_buffers(tensors, lowered), *lasting_buffers(tensors)])
    results, results_in_file = apart(result_buffers(tensors, scheduled.segments))
    lasting, lasting_end = place_in_sequence(lasting, 0)
    if lasting_in_file or results_in_file:  # copies of tensors in files begin at a page
        lasting_end = round_up(lasting_end, FILE_PAGE)
        results, lasting_in_file, results_in_file = map(
            align_for_files, (results, lasting_in_file, results_in_file)
        )
    others, prefetched = prefetched_apart(scheduled.graph, results)
    results, end = _in_gaps(prefetched, *place_buffers(others, lasting_end), lasting_end)
    room = max((b.end for variant in lowered.variants for b in variant.temporaries), default=0)
    temporaries = [b for variant in lowered.variants for b in template_buffers(variant, end, room)]
    regions = {
        "lasting": lasting_end,
        "activations": end - lasting_end,
        "temporaries": max((b.end for b in temporaries), default=end) - end,
    }
    begin = file_begin_of(regions)
    lasting_in_file, file_end = place_in_sequence(lasting_in_file, begin)
    results_in_file, file_end = place_buffers(results_in_file, file_end)
    return Placement(
        (*lasting, *results, *temporaries, *lasting_in_file, *results_in_file),
        {**regions, "files": file_end - begin},
    )


def _in_gaps(prefetched: Sequence[Buffer], placed: Sequence[Buffer], end: int, base: int) -> Placed:
    """Placed buffers and prefetched states, in the order in which these were chosen."""
    everything = [*placed]
    for buffer in prefetched:
        everything.append(buffer._replace(offset=gap_for(buffer, everything, base)))
    return everything, max([end, *(b.end for b in everything[len(placed) :])])
