"""A small model directory with pairs of sequences, and the configuration of a run on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tilewise as tw
from native.train.small_run import MODEL
from tilewise import models
from tilewise.checkpoint import model_files, save_model_directory
from tilewise.data import END_OF_TEXT, train_tokenizer
from tilewise.train import TrainConfig

_STRATEGIES = {(): "single", ("dp",): "ddp", ("fsdp",): "fsdp", ("tp",): "tensor_parallel"}


def write_base_model(directory: Path, texts: Path) -> Path:
    """Write `model`, a model of random weights in f32 whose tokenizer is trained on texts."""
    words = [path.read_text() for path in sorted(texts.iterdir())]
    tokenizer = train_tokenizer(words, MODEL["vocab_size"], special_tokens=(END_OF_TEXT,))
    tokens = {"eos_token_id": 0, "bos_token_id": 0}
    content = {**MODEL, **tokens, "model_type": "llama", "max_position_embeddings": 64}
    config = models.config_from_dict(content)
    graph = tw.ComputeGraph("base")
    models.build_training_graph(graph, config, 1, 8, "f32")
    with graph.instantiate(graph.plan()) as model:
        model.initialize(seed=4, scale=0.1)
        stored = list(models.stored_tensors(config, model.parameters()))
        files = model_files({**config.to_dict(), "torch_dtype": "float32"}, tokenizer, tokens)
        save_model_directory(directory / "model", files, stored)
    return directory


def write_pairs(directory: Path, pairs: Sequence[Mapping[str, Any]]) -> None:
    """Write `pairs.jsonl`."""
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def dpo_config(
    base: Path,
    directory: Path,
    mesh: Mapping[str, int] | None = None,
    dpo: Mapping[str, Any] | None = None,
    held_out_percent: float = 25.0,
    **train: Any,
) -> TrainConfig:
    """A run on the pairs of a directory; `train` are keys of `[train]`."""
    return TrainConfig.model_validate(
        {
            "model": {"path": str(base / "model")},
            "data": {
                "type": "preference",
                "path": str(base / "pairs.jsonl"),
                "context": 32,
                "held_out_percent": held_out_percent,
            },
            "train": {"steps": 6, "batch": 4, "dtype": "f32", **train},
            "optimizer": {"lr": 1e-3, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0},
            "dpo": dict(dpo or {}),
            "distribution": {
                "strategy": _STRATEGIES.get(tuple(mesh or {}), "hybrid"),
                "mesh": dict(mesh or {}),
            },
            "output": {"directory": str(directory), "checkpoint_every": 4},
        }
    )
