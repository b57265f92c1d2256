"""Collectives as tile tasks.

A collective is stated once, as a record (`ir.program.Collective`): which devices exchange what. For
each kind there is a function that makes the record, and one that expands it to instructions and
signals. `checks.py` checks a record against the layouts, before its instructions are used. To add a
kind, write both functions and a check, and enter the check in its table.

A device group is a set of devices that communicate. The other members of the group are a device's
peers. Devices synchronize by signals: counters that a task posts (increases) on a peer, and that a
task of this peer waits for.

Devices read tiles of their peers in place. For every tile of a device group of n devices:

    producer     writes its partial tile, then posts `ready` on every peer
    reduce       waits for `ready` of every peer; combines the n partial values of its own part of the rows along the
                 fixed tree, adds the residual, rounds once; then posts `done` and `ack partial` on every peer
    gather       waits for `done` of every peer; copies their parts; then posts `ack result` on them
    ack tasks    keep the partial value and the result as readers until all peers have read them, so that reuse of the
                 memory waits for peers as for any other reader

A device reads (n-1)/n of the tile in `reduce` and the same amount in `gather`. Signals count up and
are never reset. Each signal is posted by one device only, and the device's tasks post it in the
order of submission (native/programs/run/expand.cc). A peer is named by its place in a device group,
so the same instructions serve all devices of a class.

`arrays.py` makes programs that consist of one exchange, for the collectives of `tiles.DeviceGroup`.
Their records and expansions are the same, but the sources are complete before the program begins,
and nothing overwrites them: `ready` and `ack` are left out.
"""

from tilewise.plan.collectives.checks import check_collective
from tilewise.plan.collectives.columns import all_gather_columns, gather, slice_columns
from tilewise.plan.collectives.handshake import SITE_SHIFT, gather_label, place_signals, reduce_label
from tilewise.plan.collectives.moves import move
from tilewise.plan.collectives.over_time import add_microbatch
from tilewise.plan.collectives.rows import all_gather_batch, all_reduce, all_reduce_in_place
from tilewise.plan.collectives.storage_shards import all_gather_parameters, reduce_to_shards

__all__ = [
    "SITE_SHIFT",
    "add_microbatch",
    "all_gather_batch",
    "all_gather_columns",
    "all_gather_parameters",
    "all_reduce",
    "all_reduce_in_place",
    "check_collective",
    "gather",
    "gather_label",
    "move",
    "place_signals",
    "reduce_label",
    "reduce_to_shards",
    "slice_columns",
]
