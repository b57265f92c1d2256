"""Training configurations: every key known, every mistake one line."""

from pathlib import Path

import pytest

from tilewise.core import ConfigError
from tilewise.train.config import TrainConfig, load_config

ROOT = Path(__file__).parents[3]


def _write(tmp_path, text):
    path = tmp_path / "train.toml"
    path.write_text(text)
    return path


def test_example_is_valid_and_complete():
    """The example file loads, and mentions every key there is."""
    path = ROOT / "examples" / "train.toml"
    config = load_config(path)
    text = path.read_text()
    missing = [key for section in config.model_dump().values() for key in section if key not in text]
    assert not missing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nstpes = 3\n", "train.stpes must be a known key"),
        ("[train]\nsteps = 'many'\n", "train.steps"),
        ("[train]\nbatch = 6\nleaves = 4\n", "train.batch must divide by train.leaves"),
        ("[distribution]\nstrategy = 'ddp'\nmesh = { tp = 2 }\n", "must name dp"),
        ("[distribution]\nstrategy = 'magic'\n", "distribution.strategy"),
        ("[optimizer]\nlr = -1\n", "optimizer.lr"),
        ("[model]\nnum_attention_heads = 6\nhidden_size = 256\n", "hidden_size must divide"),
        ("[model\n", "must be TOML"),
        ("[optimizer]\nlr = inf\n", "optimizer.lr"),
        ("[optimizer]\nlr = nan\n", "optimizer.lr"),
        ("[optimizer]\nmax_grad_norm = inf\n", "optimizer.max_grad_norm"),
        ("[optimizer]\nweight_decay = nan\n", "optimizer.weight_decay"),
        ("[model]\nrope_theta = inf\n", "model.rope_theta"),
        ("[data]\nheld_out_percent = nan\n", "data.held_out_percent"),
        ("[data]\ncontext = 100000000\n", "data.context"),
        ("[data]\ncontext = 131072\n[train]\nbatch = 65536\n", "batch x data.context must be at most"),
        ("[model]\nhidden_size = 100000000\n", "model.hidden_size"),
        ("[model]\nvocab_size = 100000000\n", "model.vocab_size"),
        ("[model]\nnum_hidden_layers = 100000000\n", "model.num_hidden_layers"),
        ("[train]\nseed = 100000000000000000000\n", "train.seed"),
        ("[distribution]\nstrategy = 'ddp'\nmesh = { dp = 1048576 }\n", "every axis of the mesh"),
    ],
)
def test_mistakes_are_one_line_with_their_place(tmp_path, text, words):
    """A wrong key, type, value or combination is one line that says where and what."""
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(_write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    """A file that is not there is one clear error."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")


def test_paths_are_relative_to_the_file(tmp_path):
    """Relative paths of data and output start at the configuration's directory; absolute ones stay."""
    config = load_config(_write(tmp_path, "[data]\npath = 'texts'\n[output]\ndirectory = 'out'\n"))
    assert (config.data.path, config.output.directory) == (str(tmp_path / "texts"), str(tmp_path / "out"))
    config = load_config(_write(tmp_path, "[data]\npath = '/texts'\n[output]\ndirectory = '/out'\n"))
    assert (config.data.path, config.output.directory) == ("/texts", "/out")


def test_strategy_and_output_do_not_decide_the_result():
    """What must match when resuming leaves out devices and places."""
    here = TrainConfig()
    there = TrainConfig.model_validate(
        {
            "distribution": {"strategy": "ddp", "mesh": {"dp": 2}},
            "output": {"directory": "elsewhere"},
            "data": {"path": "elsewhere"},
        }
    )
    assert here.what_must_match() == there.what_must_match()
    other = TrainConfig.model_validate({"optimizer": {"lr": 1e-4}})
    assert here.what_must_match() != other.what_must_match()
