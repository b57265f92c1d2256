"""Strategies, and the layouts that they give to the tensors of a graph.

A strategy is a rule: it says which axis of the device mesh shards dims with which label.
"""

from tilewise.strategy.offload import (
    OFFLOADS,
    NothingToOffload,
    check_offload,
    offload_tensors,
    prefetch_states,
)
from tilewise.strategy.outputs import gather_outputs
from tilewise.strategy.propagate import propagate_layouts
from tilewise.strategy.reshard import insert_reshards
from tilewise.strategy.schedules import (
    FORWARD_ONLY,
    SCHEDULES,
    actions_for,
    microbatches_for,
    one_stage,
    read_actions,
    schedules_for,
    write_actions,
)
from tilewise.strategy.sharding import shard_states
from tilewise.strategy.stages import divide_into_stages, move_activations, resolve_stages
from tilewise.strategy.strategy import (
    DistributionStrategy,
    ParallelismMode,
    PipelineStages,
    StateSharding,
)
from tilewise.strategy.tables import gather_table_rows

__all__ = [
    "FORWARD_ONLY",
    "OFFLOADS",
    "SCHEDULES",
    "DistributionStrategy",
    "NothingToOffload",
    "ParallelismMode",
    "PipelineStages",
    "StateSharding",
    "actions_for",
    "check_offload",
    "divide_into_stages",
    "gather_outputs",
    "gather_table_rows",
    "insert_reshards",
    "microbatches_for",
    "move_activations",
    "offload_tensors",
    "one_stage",
    "prefetch_states",
    "propagate_layouts",
    "read_actions",
    "resolve_stages",
    "schedules_for",
    "shard_states",
    "write_actions",
]
