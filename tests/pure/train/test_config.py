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


def test_data_path_is_relative_to_the_file(tmp_path):
    """A relative data path starts at the configuration's directory."""
    config = load_config(_write(tmp_path, "[data]\npath = 'texts'\n"))
    assert config.data.path == str(tmp_path / "texts")


def test_strategy_and_output_do_not_decide_the_result():
    """What must match when resuming leaves out devices and directories."""
    here = TrainConfig()
    there = TrainConfig.model_validate(
        {"distribution": {"strategy": "ddp", "mesh": {"dp": 2}}, "output": {"directory": "elsewhere"}}
    )
    assert here.what_must_match() == there.what_must_match()
    other = TrainConfig.model_validate({"optimizer": {"lr": 1e-4}})
    assert here.what_must_match() != other.what_must_match()
