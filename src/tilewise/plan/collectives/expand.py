"""The function that expands each kind of exchange to instructions and signals."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilewise.ir.lowering import Draft
from tilewise.ir.program import Collective
from tilewise.plan.collectives.all_gather import expand_all_gather_batch
from tilewise.plan.collectives.all_reduce import expand_all_reduce
from tilewise.plan.collectives.columns import expand_all_gather_columns, expand_reduce_scatter
from tilewise.plan.collectives.gather import expand_gather
from tilewise.plan.collectives.handshake import ClassLowering
from tilewise.plan.collectives.over_time import expand_add_microbatch
from tilewise.plan.collectives.storage_shards import expand_all_gather_parameters, expand_reduce_to_shards

__all__ = ["EXPAND"]

Expand = Callable[[ClassLowering, Collective, Draft | None], Collective]
EXPAND: Mapping[str, Expand] = {
    "all_reduce": expand_all_reduce,
    "reduce_scatter": expand_reduce_scatter,
    "reduce_to_shards": expand_reduce_to_shards,
    "add_microbatch": expand_add_microbatch,
    "all_gather_columns": expand_all_gather_columns,
    "all_gather_batch": expand_all_gather_batch,
    "all_gather_parameters": expand_all_gather_parameters,
    "gather": expand_gather,
}
"""Per kind. A function emits a record's instructions, and returns the record with what it added."""
