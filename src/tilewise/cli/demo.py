"""`tilewise demo`: trains a small model and generates Python code with it in a few minutes, and
shows all figures.

The demo uses the public interface in the order in which a user would: data, plan, training with
data parallelism, saving, evaluation, loading with tensor parallelism, generation. It writes to
`out`: model/ and untrained/ (Hugging Face directories), loss.png, metrics.jsonl, timeline.json,
checkpoints/.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.checkpoint import check_replaceable, check_writable, lock_directory, remove_leftovers
from tilewise.cli.before_work import before_work
from tilewise.cli.demo_report import show_compression, show_memory, show_side_by_side, show_stages
from tilewise.cli.write import Writing, stream
from tilewise.core import ConfigError
from tilewise.generate import Sampling
from tilewise.serve import Engine
from tilewise.train import (
    TimeBudget,
    TrainConfig,
    Trainer,
    TrainingData,
    check_config,
    compress_files,
    draw_loss_curve,
    evaluate_model,
    make_model_config,
    make_plan,
    prepare_data,
    read_metrics,
    train_steps,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["run_demo"]

_LEFT_BEHIND = {
    "checkpoints": True,
    "model": True,
    "untrained": True,
    "loss.png": False,
    "metrics.jsonl": False,
    "timeline.json": False,
}
_TP = 2
_FIRST_GUESS = 1000  # steps to plan for, until the first are measured
_MINUTES = 3.0
ENOUGH_STEPS = 750  # enough to beat gzip on Python's sources; without --minutes, also done on a slow machine
_CHECKPOINT_EVERY = 400
_SAMPLE_PROMPT = 'def read_lines(path):\n    """'
_PROMPTS = (
    _SAMPLE_PROMPT,
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main(argv=None):\n",
)
_SAMPLING = Sampling(max_tokens=96, temperature=0.7, top_p=0.9, seed=1)


@dataclass
class _Stages:
    """The time of each stage, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def run_demo(
    *, minutes: float | None, steps: int | None, dp: int, out: Path, data: str, console: Console
) -> None:
    """Run the demo and print its report on `console`.

    Raises:
        ConfigError, LayoutError, PlanError: an argument is invalid, or the model cannot be planned.
            Raised before any work.
    """
    if minutes is not None and math.isnan(minutes):
        raise ConfigError(f"[cli.demo] --minutes must be a number; got {minutes}; choose 3, for example")
    config = _configure(dp, out, data, _FIRST_GUESS if steps is None else steps)
    with before_work():  # an impossible configuration fails here, before the data is read
        make_plan(config)
        _check_tensor_parallel(config)
    check_writable(out)
    check_writable(out / "checkpoints")
    for name, is_directory in _LEFT_BEHIND.items():
        check_replaceable(out / name, is_directory=is_directory)
    _check_own(out)
    with lock_directory(out):
        remove_leftovers(out)
        _run_alone(config, minutes, steps, console)


def _check_own(out: Path) -> None:
    """Reject an output directory with checkpoints or a model that no demo wrote. A demo's directory
    is recognized by `untrained`, which a demo writes first.
    """
    existing = [name for name in ("checkpoints", "model") if (out / name).exists()]
    if existing and not (out / "untrained").exists():
        raise ConfigError(
            f"[cli.demo] --out must be a directory without other programs' files; got "
            f"{str(out / existing[0])!r}, which another program wrote; choose another directory"
        )


def _run_alone(config: TrainConfig, minutes: float | None, steps: int | None, console: Console) -> None:
    """Run the demo in an output directory that no other run writes to."""
    stages, out = _Stages(), Path(config.output.directory)
    with stages.measure("tokenizer and data"):
        prepared = prepare_data(config, console)
    _describe(config, prepared, console)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    budget = None if steps is not None else _budget(minutes, console)
    untrained = _train(config, prepared, budget, stages, console)
    _write(config, untrained, stages, console)
    show_stages(stages.seconds, console)


def _budget(minutes: float | None, console: Console) -> TimeBudget:
    if minutes is not None:
        return TimeBudget(60 * minutes)
    console.print(
        f"training: about {_MINUTES:g} minutes, or {ENOUGH_STEPS:,} steps if they take longer",
        highlight=False,
    )
    return TimeBudget(60 * _MINUTES, ENOUGH_STEPS)


def _configure(dp: int, out: Path, data: str, steps: int) -> TrainConfig:
    """The demo's configuration: the defaults of `TrainConfig`, over `dp` devices."""
    return check_config(
        {
            "data": {"path": data},
            "train": {"steps": steps},
            "optimizer": {"warmup_steps": min(50, steps // 10)},
            "distribution": {"strategy": "ddp", "mesh": {"dp": dp}} if dp > 1 else {},
            "output": {"directory": str(out), "checkpoint_every": max(1, min(_CHECKPOINT_EVERY, steps // 3))},
        },
        "the demo's options",
    )


def _check_tensor_parallel(config: TrainConfig) -> None:
    import tilewise as tw
    from tilewise import models

    graph = tw.ComputeGraph("demo")
    models.build_decoding_graph(graph, make_model_config(config), 64, 1, 4, "bf16")
    graph.set_distribution(tw.DistributionStrategy.tensor_parallel(_TP))
    graph.plan()


def _describe(config: TrainConfig, data: TrainingData, console: Console) -> None:
    from tilewise.models import num_parameters

    corpus, model = data.corpus, make_model_config(config)
    console.print(
        f"data: {len(corpus.train):,} files, {corpus.num_bytes / 1e6:.1f} MB, "
        f"{data.sources[0].counts.tokens:,} tokens of "
        f"{data.tokenizer.get_vocab_size():,} kinds; {len(corpus.held_out)} files held out\n"
        f"model: {model.num_hidden_layers} layers x {model.hidden_size}, "
        f"{num_parameters(model) / 1e6:.2f} million "
        f"parameters; {config.train.dtype} with fp32 masters; {config.train.batch} x "
        f"{config.data.context} tokens a step"
        f" over dp={config.distribution.mesh.get('dp', 1)}",
        highlight=False,
    )


def _train(
    config: TrainConfig, data: TrainingData, budget: TimeBudget | None, stages: _Stages, console: Console
) -> Path:
    """Train, save and evaluate. Returns the directory of the untrained model."""
    out = Path(config.output.directory)
    with Trainer(config, data, *make_plan(config)) as trainer:
        trainer.save_model(out / "untrained")
        with stages.measure("training"):
            num_steps = train_steps(trainer, 0, out, console, budget)
        if num_steps < trainer.config.train.steps:
            raise KeyboardInterrupt
        losses = [line["loss"] for line in read_metrics(out / "metrics.jsonl") if line["loss"] is not None]
        draw_loss_curve(out / "loss.png", losses, f"tilewise demo: loss over {len(losses)} steps")
        with stages.measure("saving"):
            trainer.save_model(out / "model")
        console.print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; curve in {out / 'loss.png'}; model in "
            f"{out / 'model'}",
            highlight=False,
        )
        show_memory("training", trainer.instance.memory_usage(), console)
        with stages.measure("held-out files"):
            _judge(config, data, console)
        _trace_step(trainer, num_steps, out / "timeline.json", console)
    return out / "untrained"


def _judge(config: TrainConfig, data: TrainingData, console: Console) -> None:
    files = data.corpus.held_out
    if not files:
        console.print("no files are held out, so there is no evaluation")
        return
    bits = evaluate_model(config, data, Path(config.output.directory) / "model", console)
    show_compression(bits, compress_files(files), len(files), sum(file.num_bytes for file in files), console)


def _trace_step(trainer: Trainer, number: int, path: Path, console: Console) -> None:
    """Write the timeline of one step, and print for how much of the time all devices were busy."""
    from tilewise.observe import Profile

    trainer.instance.trace(True)
    trainer.step(number)
    profile = Profile(trainer.instance.timeline())
    trainer.instance.trace(False)
    profile.perfetto(path)
    console.print(
        f"timeline of one step: all devices busy for {profile.trace.all_busy_share:.0%} of it; {path} opens in "
        "Perfetto",
        highlight=False,
    )


def _write(config: TrainConfig, untrained: Path, stages: _Stages, console: Console) -> None:
    """Generate text with the saved model over tp=2, and check that one device generates the same."""
    model_dir = Path(config.output.directory) / "model"
    with _open(untrained, _TP) as engine:
        before = stream(engine, _SAMPLE_PROMPT, _SAMPLING, None)
    with stages.measure(f"loading with tp={_TP}"):
        engine = _open(model_dir, _TP)
    with engine, stages.measure(f"generating with tp={_TP}"):
        written = [_write_snippet(engine, prompt, console) for prompt in _PROMPTS]
        memory = engine.memory_usage()
    show_side_by_side(_SAMPLE_PROMPT, before.text, written[0].text, console)
    show_memory(f"generating with tp={_TP}", memory, console)
    console.print(
        f"first token after {sum(w.first_s for w in written) / len(written) * 1e3:.0f} ms, then "
        f"{sum(len(w.tokens) - 1 for w in written) / max(1e-9, sum(w.rest_s for w in written)):.0f} tokens/s",
        highlight=False,
    )
    with _open(model_dir, 1) as engine, stages.measure("generating with one device"):
        again = [stream(engine, prompt, _SAMPLING, None) for prompt in _PROMPTS]
    _say_whether_equal(written, again, console)


def _open(model_dir: Path, tp: int) -> Engine:
    return Engine(model_dir, tensor_parallel_size=tp, dtype="bf16", max_num_seqs=1)


def _write_snippet(engine: Engine, prompt: str, console: Console) -> Writing:
    console.rule(style="dim")
    console.file.write(prompt)
    writing = stream(engine, prompt, _SAMPLING, sys.stdout)
    console.file.write("\n")
    return writing


def _say_whether_equal(several: list[Writing], one: list[Writing], console: Console) -> None:
    count = sum(len(writing.tokens) for writing in several)
    if [writing.tokens for writing in several] == [writing.tokens for writing in one]:
        console.print(f"one device generates the same {count} tokens: yes", highlight=False)
    else:
        console.print("one device generates the same tokens: NO, please report this", style="bold red")
