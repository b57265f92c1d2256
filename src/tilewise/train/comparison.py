"""Verifies the strategy of a training configuration: runs its model, batch and optimizer on one
device and over a mesh.

The tokens are random (`RandomBatches`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.core import DeviceMesh, Validator
from tilewise.files.writing import writing
from tilewise.strategy import check_offload
from tilewise.train.random_batches import RandomBatches
from tilewise.train.train_config import TrainConfig, make_optimizer, make_strategy
from tilewise.train.trainer import make_graph

if TYPE_CHECKING:
    from tilewise.session.verify import VerifyReport

__all__ = ["compare_strategy"]

_MOST_STEPS = 10**9


def compare_strategy(
    config: TrainConfig, mesh: DeviceMesh, num_steps: int, report: Callable[[str], None]
) -> VerifyReport:
    """Compare some steps on one device with the same steps over `mesh`, to the bit.

    Args:
        report: called with a description of the current work.

    Raises:
        LayoutError, PlanError, ResourceError: the mesh is not possible for this model. Raised
            before any work.
    """
    from tilewise.session.verify import verify_strategy

    where = config.output.offload_directory
    if where is not None and check_offload(config.train.offload):
        with writing(Path(where)):
            Path(where).mkdir(parents=True, exist_ok=True)
    num_steps = Validator("train").integer("compare", "steps", num_steps, 1, _MOST_STEPS)
    graph = make_graph(config, is_padded=config.data.is_padded)
    graph.optimize(make_optimizer(config))
    return verify_strategy(
        graph,
        mesh,
        RandomBatches(config, num_steps),
        strategy=make_strategy(config, mesh),
        accumulation=config.train.accumulation,
        batch_splits=config.train.batch_splits,
        recompute=config.train.recompute,
        offload=config.train.offload,
        offload_directory=where,
        seed=config.train.seed,
        lr=config.optimizer.lr,
        report=report,
    )
