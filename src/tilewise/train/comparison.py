"""A strategy put to the test for a configuration: its model, batch and optimizer on one device and over a mesh.

Tokens, and lengths where documents are padded, are drawn at random, for equality does not depend on what they are; so
no data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewise import models
from tilewise.core import Border, DeviceMesh
from tilewise.core.writing import writing
from tilewise.data import IGNORED
from tilewise.strategy import check_offload
from tilewise.train.config import TrainConfig, make_model_config, make_optimizer, make_strategy
from tilewise.train.trainer import make_graph

if TYPE_CHECKING:
    from tilewise.session.verify import VerifyReport

__all__ = ["compare_strategy"]

_MOST_STEPS = 10**9
_Ids = NDArray[np.int32]


class _RandomBatches(Sequence[Mapping[str, NDArray[np.int32]]]):
    """Batches of random tokens, drawn when they are asked for: a function of seed and step."""

    def __init__(self, config: TrainConfig, num_steps: int) -> None:
        self._seed = config.train.seed
        model = make_model_config(config)
        self._vocab_size, self._is_encoder = model.vocab_size, models.is_encoder(model)
        self._shape = config.train.batch, config.data.context + 1
        self._is_padded = config.data.is_padded
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: Any) -> Any:
        if not 0 <= step < self._num_steps:
            raise IndexError(step)
        generator = np.random.Generator(np.random.Philox(key=np.array([self._seed, step], np.uint64)))
        ids = generator.integers(0, self._vocab_size, self._shape, dtype=np.int32)
        tokens, labels = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
        if not self._is_padded:
            return self._with_inputs(tokens, labels, np.full(len(tokens), tokens.shape[1], np.int32))
        lengths = generator.integers(1, tokens.shape[1], len(tokens), endpoint=True)
        labels[np.arange(tokens.shape[1]) >= lengths[:, None]] = IGNORED
        longest = lengths.max()
        return self._with_inputs(tokens[:, :longest], labels[:, :longest], lengths.astype(np.int32))

    def _with_inputs(self, tokens: _Ids, labels: _Ids, lengths: _Ids) -> dict[str, _Ids]:
        batch = {"tokens": tokens, "labels": labels}
        if not self._is_encoder:
            return batch
        return {**batch, "token_types": np.zeros_like(tokens), "lengths": lengths}


def compare_strategy(
    config: TrainConfig, mesh: DeviceMesh, num_steps: int, report: Callable[[str], None]
) -> VerifyReport:
    """Compare some steps on one device with the same steps over `mesh`, to the bit.

    Args:
        report: told what is being done.

    Raises:
        LayoutError, PlanError, ResourceError: the mesh cannot take this model; before any work.
    """
    from tilewise.session.verify import verify_strategy

    where = config.output.offload_directory
    if where is not None and check_offload(config.train.offload):
        with writing(Path(where)):
            Path(where).mkdir(parents=True, exist_ok=True)
    num_steps = Border("train").integer("compare", "steps", num_steps, 1, _MOST_STEPS)
    graph = make_graph(config, is_padded=config.data.is_padded)
    graph.optimize(make_optimizer(config))
    return verify_strategy(
        graph,
        mesh,
        _RandomBatches(config, num_steps),
        strategy=make_strategy(config, mesh),
        accumulation=config.train.accumulation,
        leaves=config.train.leaves,
        recompute=config.train.recompute,
        offload=config.train.offload,
        offload_directory=where,
        seed=config.train.seed,
        lr=config.optimizer.lr,
        report=report,
    )
