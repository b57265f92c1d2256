"""State dicts of `torch.save`: every tensor equal to the bit, and no code in a file is ever run."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import torch

from pure.checkpoint.planted import planted, tricks, write_archive
from tilewise.checkpoint import open_state_dict, open_weights
from tilewise.checkpoint.pickles import Name, Record, parse_pickle
from tilewise.core import CheckpointError
from tilewise.files.reading import Unreadable

BASE = torch.arange(24.0).reshape(4, 6)
STATE = {
    "matrix": BASE,
    "transposed": BASE.T,
    "rows": BASE[1:3],
    "columns": BASE[:, 2:5],
    "columns of the transpose": BASE.T[1:3],
    "parameter": torch.nn.Parameter(BASE.clone()),
    "vector": torch.arange(5, dtype=torch.int32),
    "element": torch.tensor(3),
    "empty": torch.zeros(0, 7),
    "one": torch.ones(1, 1, 3)[..., 1:],
    "cube": torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4),
    **{
        str(kind): torch.ones(3).to(kind)
        for kind in (
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
        )
    },
}


def _bits(tensor):
    """A tensor's shape, type and bytes in NumPy."""
    plain = tensor.detach().contiguous()
    if plain.dtype == torch.bfloat16:
        return tuple(plain.shape), "bfloat16", plain.view(torch.int16).numpy().tobytes()
    return tuple(plain.shape), str(plain.numpy().dtype), plain.numpy().tobytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin"])
def test_every_tensor_equals_torch_to_the_bit(tmp_path, protocol, name):
    """All types, views, parameters, shared storages and pickle protocols; compared with PyTorch."""
    torch.save(STATE, tmp_path / name, pickle_protocol=protocol)
    tensors = open_weights(tmp_path / name)
    assert list(tensors) == list(STATE)
    for key, tensor in tensors.items():
        array = tensor.read()
        assert (array.shape, str(array.dtype), array.tobytes()) == _bits(STATE[key]), key


def test_state_dict_of_a_module_is_read(tmp_path):
    """`state_dict()` returns an ordered dictionary with attributes."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert isinstance(model.state_dict(), OrderedDict)
    tensors = open_state_dict(tmp_path / "m.pt")
    assert list(tensors) == list(model.state_dict())
    np.testing.assert_array_equal(tensors["0.weight"].read(), model[0].weight.detach().numpy())


def test_only_the_rows_asked_for_are_read(tmp_path):
    """A tensor of such a file supports reading rows and columns in place."""
    torch.save(STATE, tmp_path / "m.pt")
    tensors = open_state_dict(tmp_path / "m.pt")
    np.testing.assert_array_equal(tensors["transposed"][1:3], BASE.T[1:3].numpy())
    np.testing.assert_array_equal(tensors["columns"].rows(1, 2).read(), BASE[1:3, 2:5].numpy())


def test_state_dict_is_chosen_by_key(tmp_path):
    """In a training script's file; the log message names the key."""
    torch.save({"epoch": 3, "model": {"w": BASE}}, tmp_path / "m.pt")
    with pytest.raises(
        CheckpointError, match="not a tensor; name the part that is the state dict: --part model"
    ):
        open_state_dict(tmp_path / "m.pt")
    assert list(open_state_dict(tmp_path / "m.pt", "model")) == ["w"]
    with pytest.raises(CheckpointError, match="no part 'optimizer', only 'epoch', 'model'"):
        open_state_dict(tmp_path / "m.pt", "optimizer")
    with pytest.raises(CheckpointError, match="not a dictionary"):
        open_state_dict(tmp_path / "m.pt", "epoch")


@pytest.mark.parametrize("name", planted(""))
def test_pickled_code_is_not_run(tmp_path, name):
    """A pickle that would run code is rejected in one line."""
    proof = tmp_path / "ran"
    with pytest.raises(CheckpointError) as caught:
        open_weights(write_archive(tmp_path / "model.pt", planted(proof)[name]))
    assert "\n" not in str(caught.value) and not proof.exists()


def test_planted_code_would_run(tmp_path):
    """The twin: unpickled by Python, the same bytes do run code."""
    for name in ("reduce", "newest protocol", "oldest protocol", "global", "stack global", "inst"):
        proof = tmp_path / name.replace(" ", "-")
        pickle.loads(planted(proof)[name])
        assert proof.exists(), name


@pytest.mark.parametrize("name", tricks())
def test_hostile_pickles_are_rejected(tmp_path, name):
    """Depth, counts, lengths and loops: rejected in one line, in bounded time and memory."""
    with pytest.raises(CheckpointError) as caught:
        open_weights(write_archive(tmp_path / "model.pt", tricks()[name]))
    assert "\n" not in str(caught.value)


def test_pickle_is_read_as_data():
    """Calls are recorded with their arguments; nothing is looked up."""
    value = parse_pickle(pickle.dumps({"a": [1, -2.5, True, None, "ü", b"x", (1, 2, 3, 4), 2**70]}, 4))
    assert value == {"a": [1, -2.5, True, None, "ü", b"x", (1, 2, 3, 4), 2**70]}
    record = parse_pickle(b"\x80\x02ctorch\nSize\nK\x02K\x03\x86\x85R.")
    assert isinstance(record, Record) and record.name == Name("torch", "Size")
    assert record.arguments == ((2, 3),)
    with pytest.raises(Unreadable, match=r"names 'torch\.load', which is not part of a tensor"):
        parse_pickle(b"\x80\x02ctorch\nload\n.")


def _tensor(
    shape="K\x02K\x03\x86", strides="K\x03K\x01\x86", offset="K\x00", storage="FloatStorage", count="K\x06"
):
    """A pickle of one tensor called `w`, in the storage `0`."""
    text = (
        f"\x80\x02}}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n{storage}\n"
        f"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu{count}tQ{offset}{shape}{strides}\x89NtRs."
    )
    return text.encode("latin-1")


WRONG = {
    "too large": ({"shape": "K\x03K\x03\x86"}, "beyond its storage"),
    "an offset": ({"offset": "K\x01"}, "beyond its storage"),
    "a negative offset": ({"offset": "J\xff\xff\xff\xff"}, "not a plain tensor"),
    "a negative size": ({"shape": "J\xff\xff\xff\xffK\x03\x86"}, "sizes of a tensor in it are invalid"),
    "a huge size": (
        {"shape": "\x8a\x08" + "\xff" * 7 + "\x3fK\x03\x86"},
        "sizes of a tensor in it are invalid",
    ),
    "overlapping rows": ({"strides": "K\x01K\x01\x86"}, "view of a larger tensor"),
    "no strides": ({"strides": ")"}, "not a plain tensor"),
    "another count": ({"count": "K\x07"}, "another size"),
    "another type": ({"storage": "DoubleStorage"}, "another size"),
    "no storage": ({"storage": "Size"}, "unknown kind"),
    "a truth as size": ({"shape": "\x88K\x06\x86"}, "sizes of a tensor in it are invalid"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_stay_in_their_storage(tmp_path, name):
    """Invented sizes, offsets and strides are rejected; the error names the tensor or the record."""
    changes, words = WRONG[name]
    parts = {"data/0": np.arange(6, dtype=np.float32).tobytes()}
    tensors = open_state_dict(write_archive(tmp_path / "whole.pt", _tensor(), parts))
    np.testing.assert_array_equal(tensors["w"].read(), np.arange(6, dtype=np.float32).reshape(2, 3))
    with pytest.raises(CheckpointError, match=words):
        open_state_dict(write_archive(tmp_path / "wrong.pt", _tensor(**changes), parts))


def test_hostile_archives_are_rejected(tmp_path):
    """Truncated, compressed, duplicate names, wrong counts and offsets, big-endian numbers, two pickles."""
    content_of_file = write_archive(tmp_path / "a.pt", pickle.dumps({}, 2)).read_bytes()
    end = content_of_file.rindex(b"PK\x05\x06")

    def edited(place, content):
        return content_of_file[:place] + content + content_of_file[place + len(content) :]

    def zipped(*names, **options):
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", **options) as file:
            for name in names:
                file.writestr(name, pickle.dumps({}, 2) if name.endswith("pkl") else b"big")
        return archive.getvalue()

    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = zipped("a/data.pkl", "a/data.pkl")
    cases = {
        "not a complete torch.save archive": content_of_file[:-1],
        "is truncated": edited(end + 10, struct.pack("<H", 9)),
        "lies outside": edited(end + 12, struct.pack("<II", 1 << 30, 0)),
        "compressed": zipped("a/data.pkl", compression=zipfile.ZIP_DEFLATED),
        "appears twice": twice,
        "little-endian": zipped("a/data.pkl", "a/byteorder"),
        "one data.pkl": zipped("a/data.pkl", "b/data.pkl"),
        "must have one data.pkl": zipped("a/other"),
    }
    assert dict(open_state_dict(tmp_path / "a.pt")) == {}
    for words, content in cases.items():
        (tmp_path / "b.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            open_state_dict(tmp_path / "b.pt")


@pytest.mark.parametrize("has_checksums", [True, False])
def test_flipped_bit_is_detected(tmp_path, has_checksums):
    """Each part's CRC-32 is checked when it is read; torch can omit checksums, and then none is checked."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(has_checksums)
    try:
        torch.save({"model": {"first": torch.ones(3), "w": BASE, "rows": BASE[2:]}}, tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    content = bytearray((tmp_path / "m.pt").read_bytes())
    content[content.index(BASE.numpy().tobytes()) + 7] ^= 1
    (tmp_path / "m.pt").write_bytes(content)
    tensors = open_state_dict(tmp_path / "m.pt", "model")
    np.testing.assert_array_equal(tensors["first"].read(), 1)
    for name in ("w", "rows"):
        if not has_checksums:
            assert tensors[name].read().shape == (4 if name == "w" else 2, 6)
            continue
        for read in (tensors[name].read, lambda name=name: tensors[name][:1]):
            with pytest.raises(CheckpointError, match=f"CRC-32 .* for '{name}' in .*m\\.pt"):
                read()
    content[content.index(b"first")] ^= 1  # in the pickle
    (tmp_path / "m.pt").write_bytes(content)
    if has_checksums:
        with pytest.raises(CheckpointError, match=r"m\.pt.*has a wrong checksum"):
            open_state_dict(tmp_path / "m.pt", "model")
    else:
        assert "first" not in open_state_dict(tmp_path / "m.pt", "model")


def test_large_archives_are_read(tmp_path, monkeypatch):
    """ZIP64 archives, which files above 4 GiB use."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    parts = {"data/0": np.arange(6, dtype=np.float32).tobytes()}
    tensors = open_state_dict(write_archive(tmp_path / "m.pt", _tensor(), parts))
    assert b"PK\x06\x06" in (tmp_path / "m.pt").read_bytes()
    assert tensors["w"].read().sum() == 15 and tensors["w"].dtype != ml_dtypes.bfloat16
