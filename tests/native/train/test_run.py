"""A training run as a user starts it: leaves what it promises, and goes on to the bit after being stopped."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tilewise.checkpoint import latest_checkpoint, open_weights
from tilewise.core import CheckpointError, ConfigError
from tilewise.train import TrainConfig, Trainer, make_plan, prepare_data, read_metrics, run_training

STEPS = 6


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    root = tmp_path_factory.mktemp("texts")
    for i in range(30):
        body = "\n".join(f"def function_{i}_{j}(x):\n    return x + {i * j}\n" for j in range(12))
        (root / f"module_{i}.py").write_text(body)
    return root


def _config(texts, directory, mesh=None, **train):
    strategy = {None: "single", ("dp",): "ddp", ("tp",): "tensor_parallel"}[tuple(mesh) if mesh else None]
    return TrainConfig.model_validate(
        {
            "model": {
                "vocab_size": 300,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            "data": {"path": str(texts), "context": 32},
            "train": {"steps": STEPS, "batch": 4, "leaves": 4, **train},
            "optimizer": {"warmup_steps": 2},
            "distribution": {"strategy": strategy, "mesh": mesh or {}},
            "output": {"directory": str(directory), "checkpoint_every": 4},
        }
    )


def _console():
    return Console(file=io.StringIO(), width=120)


def _weights(directory):
    return {name: np.array(tensor) for name, tensor in open_weights(directory / "model").items()}


def _assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.fixture(scope="module")
def whole_run(texts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    result = run_training(_config(texts, directory), False, _console())
    assert result.num_steps == STEPS and not result.interrupted
    return directory


def test_run_leaves_what_it_promises(whole_run):
    """Checkpoints, metrics, picture and a model directory stand in the output."""
    names = {path.name for path in whole_run.iterdir()}
    assert names == {"checkpoints", "metrics.jsonl", "loss.png", "model"}
    assert [line["step"] for line in read_metrics(whole_run / "metrics.jsonl")] == list(range(STEPS))
    config = json.loads((whole_run / "model" / "config.json").read_text())
    assert (
        config["architectures"] == ["LlamaForCausalLM"] and (whole_run / "model" / "tokenizer.json").is_file()
    )


@pytest.mark.parametrize("mesh", [None, {"dp": 2}, {"tp": 2}], ids=["one device", "dp=2", "tp=2"])
def test_stopped_and_resumed_equals_never_stopped(texts, whole_run, tmp_path, mesh):
    """Weights and losses after a stop are equal to the bit, also when going on over other devices."""
    config = _config(texts, tmp_path)
    with Trainer(config, prepare_data(config, _console()), *make_plan(config)) as trainer:
        done = trainer.run(0, lambda number, loss, norm: number < 2)
        trainer.save(tmp_path / "checkpoints", done)
    assert done == 3
    run_training(_config(texts, tmp_path, mesh), True, _console())
    _assert_same(_weights(tmp_path), _weights(whole_run))
    whole = [line["loss"] for line in read_metrics(whole_run / "metrics.jsonl")]
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == whole[3:]


def test_other_seed_is_another_run(texts, whole_run, tmp_path):
    """The comparison above can fail: another seed gives other weights."""
    run_training(_config(texts, tmp_path, seed=1), False, _console())
    with pytest.raises(AssertionError):
        _assert_same(_weights(tmp_path), _weights(whole_run))


def test_measuring_changes_nothing(texts, whole_run, tmp_path):
    """Timing some steps beforehand leaves the model as it was."""
    config = _config(texts, tmp_path)
    with Trainer(config, prepare_data(config, _console()), *make_plan(config)) as trainer:
        assert trainer.measure_step_s(2) > 0
        losses = []
        trainer.run(0, lambda number, loss, norm: losses.append(loss) is None)
    assert losses == [line["loss"] for line in read_metrics(whole_run / "metrics.jsonl")]


def test_checkpoints_are_not_mixed(texts, whole_run, tmp_path):
    """A new run does not write over checkpoints; a resumed one needs a checkpoint of its configuration."""
    with pytest.raises(ConfigError, match="--resume"):
        run_training(_config(texts, whole_run), False, _console())
    with pytest.raises(CheckpointError, match="must be those"):
        run_training(_config(texts, whole_run, seed=1), True, _console())
    with pytest.raises(CheckpointError, match="needs a whole checkpoint"):
        run_training(_config(texts, tmp_path), True, _console())


def _to_toml(config, path: Path):
    lines = []
    for section, values in config.model_dump().items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            if value is not None:
                lines.append(f"{key} = {json.dumps(value) if value != {} else '{}'}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_interrupt_writes_a_checkpoint(texts, tmp_path):
    """Ctrl-C ends a run with exit code 130 and a checkpoint that goes on."""
    config = _to_toml(_config(texts, tmp_path / "out", steps=100_000), tmp_path / "train.toml")
    process = subprocess.Popen(
        [sys.executable, "-c", "from tilewise.cli.main import main; main()", "train", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("step 1/"):
        assert line, "the run ended before its first step"
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in rest and "--resume" in rest
    found = latest_checkpoint(tmp_path / "out" / "checkpoints")
    assert found is not None and int(found.name.removeprefix("step-")) >= 1
