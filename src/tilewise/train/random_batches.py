"""Batches of random tokens for a configuration. Comparisons and timings use such batches, because
their results do not depend on the text. If documents are padded, their lengths are random too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise import models
from tilewise.data import IGNORED
from tilewise.train.train_config import TrainConfig, make_model_config

__all__ = ["RandomBatches"]

_Ids = NDArray[np.int32]


class RandomBatches(Sequence[Mapping[str, NDArray[Any]]]):
    """Batches of random tokens, which are generated on request. A batch depends only on the seed
    and the step. Reference log-probabilities of pairs are 0.
    """

    def __init__(self, config: TrainConfig, num_steps: int) -> None:
        self._seed = config.train.seed
        model = make_model_config(config)
        self._vocab_size, self._is_encoder = model.vocab_size, models.is_encoder(model)
        self._shape = config.num_sequences, config.data.context + 1
        self._loss = config.dpo.loss if config.dpo else None
        self._is_padded = config.data.is_padded
        self._has_documents = config.data.separates_documents
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

    def _with_inputs(self, tokens: _Ids, labels: _Ids, lengths: _Ids) -> dict[str, NDArray[Any]]:
        batch: dict[str, NDArray[Any]] = {"tokens": tokens, "labels": labels}
        if self._loss is not None:
            batch["reference_log_probs"] = np.zeros(len(tokens), np.float32)
        if self._loss is not None and self._loss.loss_type == "ipo":
            batch["inverse_lengths"] = (1.0 / lengths).astype(np.float32)
        if self._has_documents:  # two documents in each sequence
            half = tokens.shape[1] // 2
            first = np.repeat(np.array([0, half], np.int32), [half, tokens.shape[1] - half])
            batch["first"] = np.tile(first, (len(tokens), 1))
            batch["positions"] = np.arange(tokens.shape[1], dtype=np.int32) - batch["first"]
        if not self._is_encoder:
            return batch
        return {**batch, "token_types": np.zeros_like(tokens), "lengths": lengths}
