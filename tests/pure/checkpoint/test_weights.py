"""Weights in safetensors files: lazily in, atomically out."""

import json

import ml_dtypes
import numpy as np
import pytest

from tilewise.checkpoint import open_weights, write_weights
from tilewise.core import CheckpointError


def _tensors():
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((6, 4)).astype(np.float32),
        "b.weight": rng.standard_normal((5, 3)).astype(ml_dtypes.bfloat16),
        "c.weight": np.arange(7, dtype=np.int64),
    }


def test_round_trip(tmp_path):
    """Tensors come back with their bits and dtypes, bf16 included."""
    tensors = _tensors()
    write_weights(tmp_path, tensors.items())
    read = open_weights(tmp_path)
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].tobytes() == tensor.tobytes()


def test_row_slices_are_views_of_the_file(tmp_path):
    """Slicing rows copies nothing."""
    write_weights(tmp_path, _tensors().items())
    whole = open_weights(tmp_path)["a.weight"]
    assert np.shares_memory(whole, whole[2:4])
    assert not whole.flags.owndata and not whole.flags.writeable


def test_several_files_with_index(tmp_path):
    """Tensors over the shard size are spread over numbered files that the index names."""
    tensors = _tensors()
    write_weights(tmp_path, tensors.items(), max_shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    read = open_weights(tmp_path)
    assert all(read[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_file_is_refused(tmp_path, keep):
    """A file cut anywhere is one clear error at opening."""
    write_weights(tmp_path, _tensors().items())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="must be whole safetensors"):
        open_weights(tmp_path)


def test_missing_path_is_refused(tmp_path):
    """A path without weights is named in the error."""
    with pytest.raises(CheckpointError, match="nowhere"):
        open_weights(tmp_path / "nowhere")


def test_index_that_promises_too_much_is_refused(tmp_path):
    """An index naming a tensor that its file lacks is an error with the tensor's name."""
    write_weights(tmp_path, _tensors().items(), max_shard_bytes=100)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="ghost"):
        open_weights(tmp_path)
