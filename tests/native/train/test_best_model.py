"""The best model of a run, early stopping, epochs, TensorBoard files; and all of them when a run resumes."""

import os
import shutil
import signal

import numpy as np
import pytest

from native.train.small_run import is_same, make_config, run, silent, weights
from tilewise.checkpoint import EvaluationRecord, checkpoint_paths, open_checkpoint
from tilewise.core import CheckpointError, ConfigError
from tilewise.train import Trainer, plan_run, prepare_data, read_metrics, run_training
from tilewise.train import tensorboard as tensorboard_module
from tilewise.train.held_out import with_evaluation

LOSSES = {1: 5.0, 2: 4.0, 3: 4.5, 4: 3.9, 5: 3.95, 6: 4.2, 7: 3.0, 8: 3.5}


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations have the losses of `LOSSES`, by the number of steps done."""
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer: LOSSES[trainer.instance.step_count])


def _config(texts, directory, **changes):
    output = {"checkpoint_every": 3, **changes.pop("output", {})}
    watched = {"evaluate_every": 1, "load_best_model_at_end": True, "steps": 8, **changes}
    return make_config(texts, directory, output=output, optimizer={"schedule": "constant"}, **watched)


def test_patience_counts_as_in_transformers():
    """A gain below the threshold is no gain, but still the best model; NaN is no gain."""
    record = None
    for step, (loss, best_step, count) in enumerate(
        [
            (float("nan"), None, None),
            (2.0, 1, 0),
            (1.95, 2, 1),
            (float("nan"), 2, 2),
            (1.8, 4, 0),
            (1.8, 4, 1),
        ]
    ):
        record = with_evaluation(record, step, loss, 0.1)
        seen = (None, None) if record is None else (record.best_step, record.num_without_gain)
        assert seen == (best_step, count)


@pytest.mark.slow
def test_a_run_stops_early_with_its_best_model(texts, tmp_path, scripted):
    """Two evaluations without a gain end the run; the model is that of the best step, and resuming changes nothing."""
    config = _config(texts, tmp_path / "a", early_stopping_patience=2)
    result = run(config)
    assert (result.num_steps, result.interrupted) == (6, False)
    run(make_config(texts, tmp_path / "b", steps=4, optimizer={"schedule": "constant"}))
    assert is_same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    lines = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [line["held_out_loss"] for line in lines] == [LOSSES[n] for n in range(1, 7)]
    before = (tmp_path / "a" / "model" / "model.safetensors").stat().st_mtime_ns
    again = run(config, resume=True)
    assert again.num_steps == 6
    assert (tmp_path / "a" / "model" / "model.safetensors").stat().st_mtime_ns == before
    longer = _config(texts, tmp_path / "a", early_stopping_patience=3)
    assert run(longer, resume=True).num_steps == 8  # patience may change: the loss falls again
    assert {path.name for path in (tmp_path / "a" / "best").iterdir()} >= {"step-00000007"}


class Killed(BaseException):
    """Ends a run as a signal would."""


def _kill(config, num_steps, monkeypatch):
    """Start a run that is killed after some steps, also in the middle of two checkpoints."""
    step = Trainer.step

    def until(trainer, number):
        if number == num_steps:
            raise Killed
        return step(trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", until)
        with pytest.raises(Killed):
            run(config)


@pytest.mark.slow
def test_a_resumed_run_keeps_best_and_patience(texts, tmp_path, scripted, monkeypatch):
    """Killed at any step, with later models already written: equal to the bit to a run that never stopped."""
    patience = {"early_stopping_patience": 3}
    run(_config(texts, tmp_path / "whole", **patience))
    whole = open_checkpoint(checkpoint_paths(tmp_path / "whole" / "checkpoints")[-1])
    assert whole.evaluation == EvaluationRecord(best_loss=3.0, best_step=7, num_without_gain=1)
    for killed_after in (4, 5, 7):
        directory = tmp_path / f"killed-{killed_after}"
        config = _config(texts, directory, **patience)
        _kill(config, killed_after, monkeypatch)
        # the last checkpoint, or the first one, may not have been complete
        assert run_training(plan_run(config, None), silent()).num_steps == 8
        assert is_same(weights(directory), weights(tmp_path / "whole"))
        resumed = open_checkpoint(checkpoint_paths(directory / "checkpoints")[-1])
        assert resumed.evaluation == whole.evaluation


def test_a_missing_best_model_is_reported_before_work(texts, tmp_path, scripted, monkeypatch):
    """The checkpoint says which model is the best; without its directory the run does not continue."""
    config = _config(texts, tmp_path, output={"checkpoint_in_background": False})
    _kill(config, 5, monkeypatch)
    shutil.rmtree(tmp_path / "best")
    with pytest.raises(CheckpointError, match=r"needs its best model; got none in .*step-00000002"):
        plan_run(config, True)


@pytest.mark.slow
def test_an_interrupted_evaluation_is_not_lost(texts, tmp_path, scripted, monkeypatch):
    """Ctrl-C before the step with the best model ends: the resumed run has it, as one that never stopped."""
    step, config = Trainer.step, _config(texts, tmp_path)

    def interrupted(trainer, number):
        result = step(trainer, number)
        if number == 6:  # the seventh step, with the lowest loss
            os.kill(os.getpid(), signal.SIGINT)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        assert run(config).interrupted
    assert run(config, resume=True).num_steps == 8
    newest = open_checkpoint(checkpoint_paths(tmp_path / "checkpoints")[-1])
    assert newest.evaluation == EvaluationRecord(best_loss=3.0, best_step=7, num_without_gain=1)


@pytest.mark.slow
def test_epochs_are_resolved_when_the_data_is_read(texts, tmp_path):
    """A run over epochs equals one over as many steps; extending it needs `--set train.epochs`."""
    config = make_config(texts, tmp_path / "epochs", optimizer={"schedule": "constant"})
    windows = prepare_data(config, silent()).batches.num_windows
    train = {
        name: value for name, value in config.train.model_dump(exclude_none=True).items() if name != "steps"
    }
    epochs = 9.5 / windows  # ends within a step of 4 windows
    config = config.model_copy(update={"train": type(config.train)(**train, epochs=epochs)})
    assert run(config).num_steps == 3
    run(make_config(texts, tmp_path / "steps", steps=3, optimizer={"schedule": "constant"}))
    assert is_same(weights(tmp_path / "epochs"), weights(tmp_path / "steps"))
    longer = config.model_copy(update={"train": type(config.train)(**train, epochs=16 / windows)})
    with pytest.raises(CheckpointError, match=r"train.steps = 4 instead of 3"):
        run(longer, resume=True)
    planned = plan_run(longer, True, may_change=["train.epochs"])
    assert run_training(planned, silent()).num_steps == 4


@pytest.mark.slow
def test_figures_as_tensorboard_files(texts, tmp_path):
    """The figures of metrics.jsonl, by the tags of transformers; steps of an interrupted run are dropped."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    config = make_config(texts, tmp_path, evaluate_every=3, output={"report_to": "tensorboard"})
    run(config)
    values = {}
    for file in (tmp_path / "tensorboard").iterdir():
        for event in _records(file.read_bytes(), Event):
            for value in event.summary.value:
                values[value.tag, event.step] = value.simple_value
    lines = read_metrics(tmp_path / "metrics.jsonl")
    for line in lines:
        for name, tag in (("loss", "train/loss"), ("learning_rate", "train/learning_rate")):
            assert values[tag, line["step"] + 1] == np.float32(line[name])
    assert values["eval/loss", 3] == np.float32(lines[2]["held_out_loss"])
    assert values["eval/perplexity", 6] == np.float32(lines[5]["held_out_perplexity"])


def _records(content, kind):
    """The events of a file: length, checksum, content, checksum."""
    while content:
        size = int.from_bytes(content[:8], "little")
        event = kind()
        event.ParseFromString(content[12 : 12 + size])
        yield event
        content = content[16 + size :]


def test_tensorboard_needs_its_package(texts, tmp_path, monkeypatch):
    """The error comes before any work, and says what to install."""
    monkeypatch.setattr(tensorboard_module, "find_spec", lambda name: None)
    config = make_config(texts, tmp_path, output={"report_to": "tensorboard"})
    with pytest.raises(ConfigError, match=r"pip install 'tilewise\[tensorboard\]'"):
        plan_run(config, False)
    assert [*tmp_path.iterdir()] == []
