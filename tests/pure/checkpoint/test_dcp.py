"""PyTorch's distributed checkpoints: tensors to the bit from any number of chunks, and nothing is executed."""

import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from pure.checkpoint.chunks import BOXES, WHOLE, write_chunks
from pure.checkpoint.planted import planted, tricks, write_archive
from tilewise.checkpoint import open_distributed
from tilewise.core import CheckpointError


def test_checkpoints_of_pytorch_are_read(tmp_path):
    """Dtypes, empty tensors and single elements, as `dcp.save` writes them."""
    state = {
        "w": WHOLE,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "element": torch.tensor(5),
        "empty": torch.zeros(0, 2),
        "turned": WHOLE.T.contiguous(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state, "step": 3}, checkpoint_id=tmp_path / "d")
    tensors = open_distributed(tmp_path / "d", "model")
    assert tensors.keys() == state.keys()
    for name, tensor in tensors.items():
        array = np.asarray(tensor)
        assert array.shape == tuple(state[name].shape)
        assert array.astype(np.float32).tobytes() == state[name].to(torch.float32).numpy().tobytes()
    assert str(np.asarray(tensors["half"]).dtype) == "bfloat16"
    with pytest.raises(CheckpointError, match="holds 'step', which is not a tensor; name the part"):
        open_distributed(tmp_path / "d")
    with pytest.raises(CheckpointError, match=r"no tensor whose name begins with 'optimizer\.'"):
        open_distributed(tmp_path / "d", "optimizer")
    with pytest.raises(CheckpointError, match="no such file"):
        open_distributed(tmp_path / "absent")


def test_chunks_are_assembled(tmp_path):
    """Boxes of rows and columns in several files give the original tensor."""
    write_chunks(tmp_path / "d")
    tensors = open_distributed(tmp_path / "d", "model")
    np.testing.assert_array_equal(np.asarray(tensors["w"]), WHOLE.numpy())
    write_chunks(tmp_path / "d", [((i, 0), (1, 10)) for i in range(7)])
    np.testing.assert_array_equal(np.asarray(open_distributed(tmp_path / "d")["model.w"]), WHOLE.numpy())


def _changed_place(**changes):
    def change(root, metadata):
        key, place = next(iter(metadata.storage_data.items()))
        metadata.storage_data[key] = replace(place, **changes)

    return change


def _without_place(root, metadata):
    metadata.storage_data.pop(next(iter(metadata.storage_data)))


def _of_type(dtype):
    def change(root, metadata):
        metadata.state_dict_metadata["model.w"].properties.dtype = dtype

    return change


def _laughs():
    """A small value whose text grows exponentially."""
    value: object = ("w",)
    for _ in range(60):
        value = (value, value)
    return value


WRONG = {
    "a path of laughs": (_changed_place(relative_path=_laughs()), "a tuple is not the name of a file"),
    "a path": (_changed_place(relative_path="../__0_0.distcp"), "not the name of a file"),
    "an absolute path": (_changed_place(relative_path="/etc/passwd"), "not the name of a file"),
    "no file": (_changed_place(relative_path="other"), "no such file"),
    "beyond the file": (_changed_place(length=1 << 40), "lies outside"),
    "another place": (_changed_place(offset=7), "not a complete torch.save archive|lies outside"),
    "another chunk": (
        _changed_place(relative_path="__1_0.distcp"),
        "not a complete torch.save archive|in its file",
    ),
    "encrypted": (_changed_place(transform_descriptors=["aes"]), "compressed or encrypted"),
    "no place": (_without_place, "have no place for the chunk"),
    "another type": (_of_type(torch.float64), "is float32"),
    "a type that is invalid": (_of_type(torch.complex64), "names 'torch.complex64'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_metadata_must_match_the_files(tmp_path, name):
    """Place and dtype of a chunk match its file, and no other file is opened."""
    change, words = WRONG[name]
    metadata = write_chunks(tmp_path / "d")
    change(tmp_path / "d", metadata)
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=words) as caught:
        open_distributed(tmp_path / "d")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "boxes",
    [BOXES[:2], [*BOXES, ((0, 0), (1, 1))], [BOXES[0], BOXES[1], ((3, 0), (3, 10))], []],
    ids=["hole", "twice", "shifted", "none"],
)
def test_chunks_that_do_not_cover_are_rejected(tmp_path, boxes):
    """A gap would have undefined values."""
    write_chunks(tmp_path / "d", boxes)
    with pytest.raises(CheckpointError, match=r"do not cover it once|must have 1 to"):
        open_distributed(tmp_path / "d")


def test_entries_that_are_not_tensors_are_named(tmp_path):
    """Bytes that only an unpickler could interpret."""
    write_chunks(tmp_path / "d", step=BytesStorageMetadata())
    with pytest.raises(CheckpointError, match="holds 'step'"):
        open_distributed(tmp_path / "d")
    assert list(open_distributed(tmp_path / "d", "model")) == ["w"]


@pytest.mark.parametrize("name", planted(""))
@pytest.mark.parametrize("where", ["metadata", "chunk"])
def test_nothing_is_executed(tmp_path, name, where):
    """Neither from the metadata, nor from a chunk's own description."""
    proof, content = tmp_path / "ran", planted(tmp_path / "ran")[name]
    metadata = write_chunks(tmp_path / "d", [((0, 0), (7, 10))])
    if where == "metadata":
        (tmp_path / "d" / ".metadata").write_bytes(content)
    else:
        blob = write_archive(tmp_path / "blob", content).read_bytes()
        (tmp_path / "d" / "__0_0.distcp").write_bytes(blob)
        key, place = next(iter(metadata.storage_data.items()))
        metadata.storage_data[key] = replace(place, offset=0, length=len(blob))
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError) as caught:
        open_distributed(tmp_path / "d")
    assert "\n" not in str(caught.value) and not proof.exists()


@pytest.mark.parametrize(
    "name", ["deep tuples", "laughs as a key", "a dictionary in itself", "huge memo", "nothing"]
)
def test_hostile_metadata_is_rejected(tmp_path, name):
    """The metadata is read like the pickles of `torch.save`, whose tests try all tricks."""
    (tmp_path / ".metadata").write_bytes(tricks()[name])
    with pytest.raises(CheckpointError) as caught:
        open_distributed(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_large_chunk_description_is_rejected(tmp_path):
    """Descriptions are limited, because a file may have very many chunks."""
    metadata = write_chunks(tmp_path / "d", [((0, 0), (7, 10))])
    blob = write_archive(tmp_path / "blob", b"\x80\x02" + b"N0" * 40_000 + b"N.").read_bytes()
    (tmp_path / "d" / "__0_0.distcp").write_bytes(blob)
    _changed_place(offset=0, length=len(blob))(tmp_path / "d", metadata)
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="one of its entries has 80004 bytes, more than 65536"):
        open_distributed(tmp_path / "d")
