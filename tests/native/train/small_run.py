"""A small run for all tests of training: texts, a configuration, the command line, a comparison."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tilewise.checkpoint import open_weights
from tilewise.train import RunResult, TrainConfig, plan_run, run_training

STEPS = 6
MODEL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_STRATEGIES = {
    (): "single",
    ("dp",): "ddp",
    ("fsdp",): "fsdp",
    ("dp", "fsdp"): "fsdp",
    ("tp",): "tensor_parallel",
}


def write_texts(root: Path, num_files: int = 30) -> Path:
    """Write small Python files as training text."""
    root.mkdir(parents=True, exist_ok=True)
    for i in range(num_files):
        body = "\n".join(f"def function_{i}_{j}(x):\n    return x + {i * j}\n" for j in range(12))
        (root / f"module_{i}.py").write_text(body)
    return root


def make_config(
    texts: Path, directory: Path, mesh: dict[str, int] | None = None, **changes: Any
) -> TrainConfig:
    """A run of `STEPS` steps; `changes` are sections, or keys of `[train]`."""
    sections = {
        "model": MODEL,
        "data": {"path": str(texts), "context": 32},
        "train": {"steps": STEPS, "batch": 4, "batch_splits": 4},
        "optimizer": {"warmup_steps": 2},
        "distribution": {"strategy": _STRATEGIES.get(tuple(mesh or {}), "hybrid"), "mesh": mesh or {}},
        "output": {"directory": str(directory), "checkpoint_every": 4},
    }
    if "path" in changes.get("model", {}):
        sections["model"] = {}
    for name, value in changes.items():
        if isinstance(value, dict):
            sections[name] = {**sections.get(name, {}), **value}
        else:
            sections["train"][name] = value
    return TrainConfig.model_validate(sections)


def write_toml(config: TrainConfig, path: Path) -> Path:
    """The configuration as a file."""
    lines = []
    sections = config.model_dump(exclude={"data"}, exclude_none=True)
    sections["sequences"] = config.data.model_dump(exclude={"sources"})
    for section, values in (
        *sections.items(),
        *(("[data]", s.model_dump(exclude_unset=True)) for s in config.data.sources),
    ):
        lines.append(f"[{section}]")
        for key, value in values.items():
            if isinstance(value, dict):
                inner = ", ".join(f"{name} = {size}" for name, size in value.items())
                lines.append(f"{key} = {{ {inner} }}")
            elif value is not None:
                lines.append(f"{key} = {json.dumps(value)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def silent() -> Console:
    """A console that discards its output."""
    return Console(file=io.StringIO(), width=120)


def run(config: TrainConfig, resume: bool = False) -> RunResult:
    """Plan and train."""
    return run_training(plan_run(config, resume), silent())


def command(*arguments: object) -> list[str]:
    """The words of a `tilewise` process."""
    return [sys.executable, "-c", "from tilewise.cli.main import main; main()", *map(str, arguments)]


def tilewise(
    *arguments: object, timeout: float = 300, extra_environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `tilewise` to its end in its own process."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **(extra_environment or {})},
        **options,
    )


def weights(directory: Path) -> dict[str, np.ndarray]:
    """The finished model's weights."""
    return {name: np.array(tensor) for name, tensor in open_weights(directory / "model").items()}


def is_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Whether two models are equal to the bit."""
    return a.keys() == b.keys() and all(
        np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes() for name in a
    )
