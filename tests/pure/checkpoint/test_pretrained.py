"""Hugging Face directories as wholes."""

import json

import numpy as np
import pytest

from tilewise.checkpoint import load_generation_config, load_tokenizer, open_weights, save_pretrained
from tilewise.core import CheckpointError


def test_directory_is_replaced_as_a_whole(tmp_path):
    """A second save replaces the first and leaves nothing hidden behind."""
    target = tmp_path / "model"
    save_pretrained(
        target, {"a": 1}, [("w", np.zeros(3, np.float32))], generation_config={"eos_token_id": [0, 1]}
    )
    save_pretrained(target, {"a": 2}, [("w", np.ones(3, np.float32))])
    assert json.loads((target / "config.json").read_text()) == {"a": 2}
    assert load_generation_config(target) == {}
    np.testing.assert_array_equal(open_weights(target)["w"], np.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_failed_save_leaves_the_old_directory(tmp_path):
    """An error while writing keeps what stood there."""
    target = tmp_path / "model"
    save_pretrained(target, {"a": 1}, [("w", np.zeros(3, np.float32))])

    def broken():
        yield "w", np.ones(3, np.float32)
        raise RuntimeError("device gone")

    with pytest.raises(RuntimeError):
        save_pretrained(target, {"a": 2}, broken())
    assert json.loads((target / "config.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_missing_tokenizer_is_named(tmp_path):
    """A directory without tokenizer.json is one clear error."""
    with pytest.raises(CheckpointError, match=r"must hold tokenizer\.json"):
        load_tokenizer(tmp_path)
