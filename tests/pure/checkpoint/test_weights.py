"""Weights in safetensors files: loaded lazily, written atomically."""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest

from tilewise import models
from tilewise.checkpoint import find_model, open_weights, write_weights
from tilewise.core import CheckpointError, ConfigError


def _tensors():
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((6, 4)).astype(np.float32),
        "b.weight": rng.standard_normal((5, 3)).astype(ml_dtypes.bfloat16),
        "c.weight": np.arange(7, dtype=np.int64),
    }


def test_only_the_bytes_of_a_slice_are_read(tmp_path, monkeypatch):
    """For rows and columns, and of a transpose too; NumPy accepts the tensor as an array."""
    write_weights(tmp_path, _tensors().items())
    stored, array = open_weights(tmp_path)["a.weight"], _tensors()["a.weight"]
    counted = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: counted.append(preadv(*args)) or counted[-1])
    for read, expected in (
        (lambda: stored[2:4], array[2:4]),
        (lambda: stored.columns(1, 2).read(), array[:, 1:3]),
        (lambda: stored.transpose()[1:3], array.T[1:3]),
        (lambda: stored.rows(1, 4).transpose().rows(2, 1).read(), array[1:5].T[2:3]),
        (lambda: stored[4:2], array[4:2]),
    ):
        np.testing.assert_array_equal(read(), expected)
        assert sum(counted) == expected.nbytes
        counted.clear()
    np.testing.assert_array_equal(stored, array)
    assert stored[1, 2] == array[1, 2] and stored[::2].shape == (3, 4) and len(stored) == 6
    assert np.asarray(stored, np.float64).dtype == np.float64


def test_file_that_shrinks_is_an_error(tmp_path):
    """Truncated after it was opened: an error with its name, where a mapped page would end the process."""
    write_weights(tmp_path, _tensors().items())
    stored = open_weights(tmp_path)["a.weight"]
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*shorter"):
        stored.read()


def test_several_files_with_index(tmp_path):
    """Tensors above the shard size are split over numbered files that the index names."""
    tensors = _tensors()
    write_weights(tmp_path, tensors.items(), max_shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    stored = open_weights(tmp_path)
    assert set(stored) == set(tensors) and not list(tmp_path.glob(".*"))
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype and stored[name].read().tobytes() == tensor.tobytes()


def _index(directory, change):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update({"a.weight": "../" + FIRST}), "not the name of a file"),
        (lambda m: m.update({"a.weight": "/etc/passwd"}), "not the name of a file"),
        (lambda m: m.update({"a.weight": ""}), "not the name of a file"),
        (lambda m: m.update({"a.weight": "absent"}), "no such file"),
        (lambda m: m.update({"a.weight": "nul\0"}), "null"),
        (lambda m: m.update({"a.weight": "pipe"}), "named pipe"),
        (lambda m: m.update({"a.weight": None}), "weight_map.a.weight"),
        (lambda m: m.update({"a.weight": SECOND}), "which does not have it"),
        (lambda m: m.pop("b.weight"), "does not list"),
        (lambda m: m.update(ghost=FIRST), "ghost"),
    ],
)
def test_index_maps_tensors_to_files_of_the_directory(tmp_path, change, words):
    """Names outside the directory, absent files, wrong types, and misplaced or omitted tensors are rejected."""
    write_weights(tmp_path, _tensors().items(), max_shard_bytes=100)
    os.mkfifo(tmp_path / "pipe")
    _index(tmp_path, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_weights(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="nowhere"):
        open_weights(tmp_path / "nowhere")


def test_files_that_are_links_are_opened(tmp_path):
    """Hugging Face's cache links its files to blobs elsewhere."""
    (tmp_path / "blobs").mkdir()
    write_weights(tmp_path / "blobs", _tensors().items())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to("../blobs/model.safetensors")
    assert set(open_weights(tmp_path / "model")) == set(_tensors())


def test_two_models_in_one_directory_are_rejected(tmp_path):
    """Files of an index and a single file next to them are ambiguous. Writing leaves only one."""
    write_weights(tmp_path, _tensors().items())
    write_weights(tmp_path, _tensors().items(), max_shard_bytes=100)
    assert set(open_weights(tmp_path)) == set(_tensors())
    write_weights(tmp_path / "..", _tensors().items())
    (tmp_path / ".." / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not one of its files"):
        open_weights(tmp_path)
    write_weights(tmp_path, _tensors().items())
    assert set(open_weights(tmp_path)) == set(_tensors())


@pytest.mark.parametrize(
    "content,words",
    [
        (b"PK\x03\x04" + b"\0" * 60, "an archive of torch.save"),
        (b"PK\x03\x04\x14" + b"\0" * 60, "not a complete torch.save archive"),
        (b"\x80\x02}q\x00." + b"\0" * 60, "pickled objects, .*, which may run any code"),
    ],
)
def test_other_formats_are_named(tmp_path, content, words):
    """Pickled weights are rejected with advice, and never opened, whatever the file is called."""
    for name in ("model.safetensors", "model.pt"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            open_weights(tmp_path / name)


def test_single_file_is_not_a_model(tmp_path):
    """The message says what to pass instead."""
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text("{}")
    for name, words in {
        "none": "none'; there is no such file or directory",
        "none.gguf": "none.gguf'; there is no such file or directory",
        "model.safetensors": f"give its directory, '{tmp_path}'",
        "config.json": f"give its directory, '{tmp_path}'",
        "state.pt": f"tilewise checkpoint convert {tmp_path}/state.pt NEW_DIRECTORY --model MODEL",
        "pytorch_model.bin": "tilewise checkpoint convert",
    }.items():
        if name.endswith(("pt", "bin")):
            (tmp_path / name).write_bytes(b"PK\x03\x04")
        with pytest.raises(ConfigError, match=re.escape(words)):
            models.open(tmp_path / name)
    for content, words in (
        (b"version https://git-lfs", "run git lfs pull"),
        (b"", "truncated"),
        (b"\0" * 99, "truncated"),
    ):
        (tmp_path / "m.gguf").write_bytes(content)
        for call in (open_weights, models.open, find_model):
            with pytest.raises(
                ConfigError, match=rf"a \.gguf file must begin with b'GGUF'; got .*m\.gguf'; .*{words}"
            ):
                call(tmp_path / "m.gguf")


def test_directory_of_pickled_weights_is_rejected_with_advice(tmp_path):
    """The error names the file; next to safetensors, pickled files are ignored."""
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00002\.bin.*convert"):
        open_weights(tmp_path)
    write_weights(tmp_path, _tensors().items())
    assert set(open_weights(tmp_path)) == set(_tensors())


def test_header_length_that_looks_like_a_pickle(tmp_path):
    """Its first byte may be any; only a file without a valid header is checked for other formats."""
    for length in range(100, 400):
        if (8 + length) % 256 == 0x80 or length == 0x80:
            content = b"{}" + b" " * (length - 2)
            (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + content)
            assert dict(open_weights(tmp_path)) == {}


def test_unaligned_tensors_are_read(tmp_path):
    """The format does not require aligned tensors; their values are equal all the same."""
    header = json.dumps(
        {
            "flag": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
            "x": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
            "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [9, 9]},
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        len(header).to_bytes(8, "little") + header + b"\1" + np.array([1, 2], np.float32).tobytes()
    )
    weights = open_weights(path)
    assert weights["x"].read().tolist() == [1, 2] and weights["none"].read().shape == (0, 3)
