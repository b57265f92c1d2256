"""Wrong values in every argument of calls that write files: our errors, nothing written."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pure.hostile import accepted
from tilewise.checkpoint import (
    Box,
    LazyTensor,
    PartedTensor,
    TensorPart,
    TrainingState,
    open_weights,
    save_checkpoint,
    save_pretrained,
    write_weights,
)
from tilewise.core import CheckpointError
from tilewise.data import train_tokenizer
from tilewise.models.llama import LlamaConfig

TENSORS = {"w": np.zeros(3, np.float32)}
CONFIG = LlamaConfig(300, 32, 48, 1, 4, num_key_value_heads=2)


def _save(step, tensors):
    save_checkpoint("out", TrainingState(step, tensors), {})


CALLS = {
    "save_checkpoint": (
        partial(save_checkpoint, "out", TrainingState(3, TENSORS)),
        {"config": {"a": 1.5}, "keep_last": 2},
    ),
    "TrainingState": (_save, {"step": 3, "tensors": TENSORS}),
    "tensor": (lambda tensor: _save(3, {"w": tensor}), {"tensor": TENSORS["w"]}),
    "setting": (
        lambda setting: save_checkpoint("out", TrainingState(3, TENSORS), {"a": setting}),
        {"setting": 1},
    ),
    "write_weights": (
        lambda tensors, max_shard_bytes: write_weights(".", tensors, max_shard_bytes),
        {"tensors": [("w", TENSORS["w"])], "max_shard_bytes": 8},
    ),
    "pair": (
        lambda name, tensor: write_weights(".", [(name, tensor)]),
        {"name": "w", "tensor": TENSORS["w"]},
    ),
    "save_pretrained": (
        lambda config, generation_config, tokenizer: save_pretrained(
            "model", config, [("w", TENSORS["w"])], tokenizer, generation_config
        ),
        {"config": {"a": [1, None]}, "generation_config": {"eos_token_id": 0}, "tokenizer": None},
    ),
}


TEXTS = {"''", "'name'", "'x\\0y'"}
TAKEN: dict[str, dict[str, set[str]]] = {
    "save_checkpoint": {"config": {"{}", "{'a': 1}"}},
    "TrainingState": {"step": {"0"}, "tensors": {"{}"}},
    "tensor": {"tensor": {"array"}},
    "setting": {
        "setting": {"None", "True", "-1", "0", "2**70", "2.5", "[]", "[[1], 2]", "{}", "{'a': 1}", *TEXTS}
    },
    "write_weights": {"tensors": {"()", "[]"}},
    "pair": {"name": {"'name'"}, "tensor": {"array"}},
    "save_pretrained": {
        "config": {"{}", "{'a': 1}"},
        "generation_config": {"None", "{}", "{'a': 1}"},
        "tokenizer": {"None"},
    },
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current directory, with a model in `whole` and a checkpoint in `saved`."""
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer(["a"], vocab_size=300)
    save_pretrained("whole", CONFIG.to_dict(), TENSORS.items(), tokenizer, {"eos_token_id": 0})
    save_checkpoint("saved", TrainingState(7, TENSORS), {})
    return tmp_path


@pytest.mark.parametrize("name", CALLS)
def test_calls_reject_with_our_errors(name, place):
    """Every value that would be written to a file; the table has the valid ones."""
    assert accepted(*CALLS[name]) == TAKEN.get(name, {})


def test_unsupported_dtypes_are_rejected_before_writing(tmp_path):
    """Existing files are unchanged."""
    tensor = np.zeros(3, np.complex64)
    write_weights(tmp_path, [("w", TENSORS["w"])])
    save_checkpoint(tmp_path, TrainingState(1, TENSORS), {})
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="safetensors can hold"):
        write_weights(tmp_path, [("w", tensor)])
    with pytest.raises(CheckpointError, match="safetensors can hold"):
        save_checkpoint(tmp_path, TrainingState(2, {"w": tensor}), {})
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    np.testing.assert_array_equal(open_weights(tmp_path)["w"], TENSORS["w"])


def test_masked_arrays_are_rejected_before_writing(tmp_path):
    """Masked values were once written as if they were valid: of whole arrays, of parts, of lazy tensors."""
    masked = np.ma.masked_less(np.arange(4, dtype=np.float32), 2)
    save_checkpoint(tmp_path, TrainingState(1, TENSORS), {})
    write_weights(tmp_path, [("w", TENSORS["w"])])
    before = sorted(tmp_path.rglob("*"))
    part = PartedTensor((4,), masked.dtype, (TensorPart(Box.whole((4,)), masked, 0),))
    lazy = LazyTensor((4,), masked.dtype, lambda: masked)
    for write in (
        lambda: save_checkpoint(tmp_path, TrainingState(2, {"a mask": masked}), {}),
        lambda: save_checkpoint(tmp_path, TrainingState(2, {"a mask": part}), {}),
        lambda: write_weights(tmp_path, [("a mask", masked)]),
        lambda: write_weights(tmp_path, [("w", lazy)]),
    ):
        with pytest.raises(CheckpointError, match=r"(a mask'|a tensor) must be an array without a mask"):
            write()
    assert sorted(tmp_path.rglob("*")) == before
    np.testing.assert_array_equal(open_weights(tmp_path)["w"], TENSORS["w"])
    save_checkpoint(
        tmp_path, TrainingState(2, {"whole": np.ma.asarray(TENSORS["w"])}), {}
    )  # nothing is masked


@pytest.mark.parametrize("names", [("w", "w"), ("__metadata__",)])
def test_duplicate_and_reserved_names_are_rejected(names, tmp_path):
    """The second array of a name would hide the first; `__metadata__` would be read as metadata."""
    with pytest.raises(CheckpointError, match="once"):
        write_weights(tmp_path, [(name, TENSORS["w"]) for name in names])


@pytest.mark.parametrize("config", [{1: 2}, {"a": {3: 4}}])
def test_a_configuration_that_json_would_change_is_rejected(config, tmp_path):
    """The loaded configuration would be different."""
    with pytest.raises(CheckpointError, match=r"JSON can hold|dictionary"):
        save_checkpoint(tmp_path, TrainingState(1, TENSORS), config)
