"""Tables of stored tensors: read by the graph's names, written by the files' names."""

import re

import ml_dtypes
import numpy as np
import pytest

from tilewise.checkpoint import StoredTensor, StoredWeights, open_weights, store_parameters, write_weights
from tilewise.core import CheckpointError

TABLE = [
    StoredTensor("model.embed", (("embed", 6),)),
    StoredTensor("model.attn", (("q", 4), ("k", 2), ("v", 2)), is_transposed=True),
    StoredTensor("model.attn.bias", (("q.bias", 4), ("k.bias", 2), ("v.bias", 2))),
    StoredTensor("model.mlp", (("gate", 5), ("up", 5))),
]


def _parameters():
    rng = np.random.default_rng(0)
    shapes = {"embed": (6, 3), "q": (4, 3), "k": (2, 3), "v": (2, 3), "q.bias": (4,), "k.bias": (2,)}
    shapes |= {"v.bias": (2,), "gate": (5, 3), "up": (5, 3)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _stored():
    return {name: np.asarray(tensor) for name, tensor in store_parameters(TABLE, _parameters())}


@pytest.mark.parametrize("in_files", [False, True])
def test_tables_round_trip(tmp_path, in_files):
    """Concatenated, transposed and plain tensors; from files and from arrays; slices of rows and columns too."""
    stored = _stored()
    assert stored["model.attn"].shape == (3, 8) and stored["model.mlp"].shape == (10, 3)
    if in_files:
        write_weights(tmp_path, stored.items(), max_shard_bytes=100)
        stored = open_weights(tmp_path)
    weights = StoredWeights(stored, TABLE)
    assert list(weights) == list(_parameters())
    for name, value in _parameters().items():
        assert weights[name].shape == value.shape
        np.testing.assert_array_equal(weights[name], value)
        np.testing.assert_array_equal(weights[name][1:2], value[1:2])
        if in_files and value.ndim == 2:
            np.testing.assert_array_equal(weights[name].rows(1, 1).columns(1, 2).read(), value[1:2, 1:3])


def test_files_may_omit_a_prefix(tmp_path):
    """From all names, as headless models are saved; another prefix is another name."""
    stored = {name.removeprefix("model."): tensor for name, tensor in _stored().items()}
    np.testing.assert_array_equal(StoredWeights(stored, TABLE, prefix="model.")["k"], _parameters()["k"])
    with pytest.raises(CheckpointError, match=r"got no 'model\.embed'"):
        StoredWeights(stored, TABLE, prefix="bert.")


@pytest.mark.parametrize(
    "change,words",
    [
        ({"model.mlp": None}, r"got no 'model\.mlp'"),
        ({"model.more": np.ones(3)}, r"'model\.more' and 0 more"),
        ({"model.mlp": np.ones((9, 3), np.float32)}, r"'model\.mlp' with the 10 rows.*\[9, 3\]"),
        ({"model.attn": np.ones((8, 3), np.float32)}, r"'model\.attn' with the 8 columns.*\[8, 3\]"),
        ({"model.mlp": np.ones((10, 3, 1), np.float32)}, r"\[10, 3, 1\]"),
        ({"model.mlp": np.ones((10, 3), np.int8)}, r"'model\.mlp' as floating-point.*int8.*quantized"),
        ({"head": np.ones((6, 3), np.float32)}, r"'head' equal to 'model\.embed'"),
        ({"head": np.ones((6, 3), ml_dtypes.bfloat16)}, r"'head' equal to"),
    ],
)
def test_mismatched_files_are_rejected_by_name(change, words):
    """Missing and extra tensors, other row counts, integers, a separate tied head: before anything is read."""
    stored = {name: tensor for name, tensor in {**_stored(), **change}.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=words):
        StoredWeights(stored, TABLE, copies={"head": "model.embed"})


@pytest.mark.parametrize(
    "change",
    [
        {"model.mlp": np.ones((9, 3), np.float32)},
        {"model.more": np.ones(3)},
        {"head": np.ones((6, 3), np.float32)},
        {"model.mlp": np.ones((10, 3), np.int8)},
        {"model.mlp": None},
    ],
)
def test_errors_name_the_file(tmp_path, change):
    """The file that holds the tensor, or where it was expected."""
    stored = {name: tensor for name, tensor in {**_stored(), **change}.items() if tensor is not None}
    write_weights(tmp_path, stored.items())
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "model.safetensors"))):
        StoredWeights(open_weights(tmp_path), TABLE, copies={"head": "model.embed"})


def test_whole_shapes_are_checked(tmp_path):
    """Columns too, which are not in the table; the error names the tensor and its file."""
    write_weights(tmp_path, _stored().items())
    weights = StoredWeights(open_weights(tmp_path), TABLE)
    shapes = {name: tensor.shape for name, tensor in _parameters().items()}
    weights.require_shapes(shapes)
    for name, stored in (("k", "model.attn"), ("embed", "model.embed")):
        words = rf"'{stored}' with '{name}' in the shape \[\d, 4\].*\[\d, 3\] in .*model\.safetensors"
        with pytest.raises(CheckpointError, match=words):
            weights.require_shapes({**shapes, name: (shapes[name][0], 4)})


def test_copies_and_ignored_tensors_are_accepted(tmp_path):
    """A tied head that equals the embedding to the bit; buffers that follow from the configuration."""
    stored = {**_stored(), "head": _stored()["model.embed"], "rope.inv_freq": np.ones(2, np.float32)}
    write_weights(tmp_path, stored.items())
    options = {
        "copies": {"head": "model.embed", "absent": "model.mlp"},
        "is_ignored": re.compile(r"rope\..*"),
    }
    assert set(StoredWeights(open_weights(tmp_path), TABLE, **options)) == set(_parameters())
    stored["head"] = stored["head"].copy()
    stored["head"][5, 2] = np.nextafter(stored["head"][5, 2], np.float32(9))  # the twin: one bit
    write_weights(tmp_path, stored.items())
    with pytest.raises(CheckpointError, match="'head' equal"):
        StoredWeights(open_weights(tmp_path), TABLE, **options)
