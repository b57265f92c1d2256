"""The proof of a strategy for a configuration: its model, batch and optimizer on one device and over a mesh.

Tokens are drawn at random, for equality does not depend on what they are; so no data is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tilewise.core import DeviceMesh
from tilewise.train.config import TrainConfig, make_optimizer
from tilewise.train.trainer import make_graph

if TYPE_CHECKING:
    from tilewise.session.verify import VerifyReport

__all__ = ["prove_strategy"]


def prove_strategy(
    config: TrainConfig, mesh: DeviceMesh, num_steps: int, report: Callable[[str], None]
) -> VerifyReport:
    """Compare some steps on one device with the same steps over `mesh`, to the bit.

    Args:
        report: told what is being done.

    Raises:
        LayoutError, PlanError: the mesh cannot take this model; before any work.
    """
    from tilewise.session.verify import verify_strategy

    graph = make_graph(config)
    graph.optimize(make_optimizer(config))
    shape = (num_steps, config.train.batch, config.data.context + 1)
    generator = np.random.Generator(np.random.Philox(key=config.train.seed))
    ids = generator.integers(0, config.model.vocab_size, shape, dtype=np.int32)
    batches = [
        {"tokens": np.ascontiguousarray(step[:, :-1]), "labels": np.ascontiguousarray(step[:, 1:])}
        for step in ids
    ]
    return verify_strategy(
        graph,
        mesh,
        batches,
        accumulation=config.train.accumulation,
        leaves=config.train.leaves,
        seed=config.train.seed,
        lr=config.optimizer.lr,
        report=report,
    )
