"""`tilewise tune`: steps run under settings that change no bit, and the fastest is reported."""

import numpy as np
import pytest

from native.train.small_run import MODEL, make_config, write_toml
from tilewise.cli.main import _run
from tilewise.core import InternalError, PlanError, ResourceError
from tilewise.plan import tables as plans
from tilewise.session import GraphInstance
from tilewise.train import load_config, make_plan, tune_run, tuning

STEPS = 2


def tune(config, seconds=1000, lines=None):
    """All trials of a configuration."""
    return tune_run(config, STEPS, seconds, [].append if lines is None else lines.append)


def pretend(monkeypatch, tokens_per_s):
    """Replace the measured times of trials by a function of their configuration."""
    run = tuning._Search._run

    def of(self, config, graph, plan):
        trial = run(self, config, graph, plan)
        return tuning.Trial(config, trial.memory_bytes, tokens_per_s(config), trial.losses)

    monkeypatch.setattr(tuning._Search, "_run", of)


def test_the_fastest_wins(monkeypatch, tmp_path):
    """Every mesh is tried, then microbatches and tiles from the fastest on; measured in turns, it
    beats the original.
    """
    speeds = {"fsdp": 1500.0, "dp": 1200.0, "tp": 800.0}

    def speed(config):
        return speeds.get(next(iter(config.distribution.mesh), ""), 1000.0) + config.train.rows_per_tile / 64

    pretend(monkeypatch, speed)
    monkeypatch.setattr("tilewise.train.alternatives.num_cores", lambda: 2)
    lines = []
    result = tune(make_config(tmp_path, tmp_path, batch=8, rows_per_tile=32), lines=lines)
    best = result.best.config
    assert best.distribution.mesh == {"fsdp": 2} and best.train.rows_per_tile == 64
    assert result.gain == 1501 / 1000.5 and result.num_untried == 0
    tried = [(dict(t.config.distribution.mesh), t.config.train.accumulation) for t in result.trials]
    assert tried == [
        ({}, 1),
        ({"dp": 2}, 1),
        ({"fsdp": 2}, 1),
        ({"tp": 2}, 1),
        ({"pp": 2}, 1),
        ({"fsdp": 2}, 2),
        ({"fsdp": 2}, 1),
    ]
    assert len(lines) == len(tried) + 1
    assert all(t.losses == result.best.losses and len(t.losses) == STEPS + 1 for t in result.trials)


def test_small_gains_are_ignored(monkeypatch, tmp_path):
    """Half a percent is noise."""
    pretend(monkeypatch, lambda config: 1005.0 if config.distribution.mesh else 1000.0)
    config = make_config(tmp_path, tmp_path)
    result = tune(config)
    assert result.best.config == config and result.gain == 1.0


def test_the_time_ends_the_search(tmp_path):
    """The original settings are always tried; skipped candidates are counted."""
    result = tune(make_config(tmp_path, tmp_path), seconds=0)
    assert len(result.trials) == 1 and result.gain == 1.0 and result.num_untried >= 2


def test_an_encoder_with_padded_documents(tmp_path):
    """Every trainable configuration can be tuned."""
    sizes = {key: MODEL[key] for key in MODEL if key != "num_key_value_heads"}
    config = make_config(tmp_path, tmp_path, data={"documents": "padded"})
    config = config.model_validate({**config.model_dump(), "model": {"model_type": "bert", **sizes}})
    assert tune(config, seconds=0).best.tokens_per_s > 0


@pytest.mark.slow
def test_memory_is_saved_until_a_candidate_fits(monkeypatch, tmp_path):
    """If the file's settings need too much memory, the next that fit are used; without any, an error."""
    config = make_config(tmp_path, tmp_path, batch=8, batch_splits=8, data={"context": 64})
    need = make_plan(config)[1]
    need = need.total_bytes + sum(need.checkpoint_bytes)
    monkeypatch.setattr(plans, "available_memory", lambda: need - 1)
    lines = []
    result = tune(config, seconds=0, lines=lines)
    assert result.gain is None and result.trials and all(t.memory_bytes < need for t in result.trials)
    assert lines[0].startswith("rejected: one device") and "must fit" in lines[0]
    monkeypatch.setattr(plans, "available_memory", lambda: 1)
    with pytest.raises(ResourceError, match="must fit"):
        tune(config)


def test_rejected_meshes_are_reported(monkeypatch, tmp_path):
    """Three batch splits do not divide among two devices; the others are still tried."""
    monkeypatch.setattr("tilewise.train.alternatives.num_cores", lambda: 2)
    lines = []
    trials = tune(make_config(tmp_path, tmp_path, batch=3, batch_splits=3), lines=lines)
    rejected = [line for line in lines if line.startswith("rejected")]
    assert {line.split()[1].rstrip(",") for line in rejected} >= {"dp=2", "fsdp=2"}
    assert {"tp"} in [set(t.config.distribution.mesh) for t in trials.trials]


def test_settings_that_change_a_bit_are_an_error(monkeypatch, tmp_path):
    """Planted: the second trial's last loss is the next float."""
    step, count = GraphInstance.step, []

    def failing(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        count.append(result)
        if len(count) < 2 * (STEPS + 1):
            return result
        return type(result)(float(np.nextafter(result.loss, np.inf)), result.grad_norm)

    monkeypatch.setattr(GraphInstance, "step", failing)
    with pytest.raises(InternalError, match="must be bit-identical"):
        tune(make_config(tmp_path, tmp_path))


def test_arguments_are_checked(tmp_path):
    """Before any step."""
    config = make_config(tmp_path, tmp_path)
    for args in ((config, 0, 1.0), (config, 1, float("nan")), (config, True, 1.0)):
        with pytest.raises((PlanError, ValueError)):
            tune_run(*args, print)


def test_the_command_prints_lines_for_the_file(tmp_path, capsys):
    """Standard output has only TOML, with the file's own settings if no other was tried; nothing is written."""
    path = write_toml(make_config(tmp_path, tmp_path / "out"), tmp_path / "train.toml")
    assert _run(["tune", str(path), "--steps", "1", "--minutes", "0"]) == 0
    output = capsys.readouterr()
    assert "1.000" in output.err and "as fast as any" in output.err and not (tmp_path / "out").exists()
    (tmp_path / "tuned.toml").write_text(output.out)
    config, tuned = load_config(path), load_config(tmp_path / "tuned.toml")
    assert tuned.distribution == config.distribution
    for key in ("accumulation", "recompute", "rows_per_tile"):
        assert getattr(tuned.train, key) == getattr(config.train, key)
