"""The header of safetensors: correct arrays or one error, for any bytes."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save

from tilewise.checkpoint import open_weights
from tilewise.checkpoint.header import parse_header
from tilewise.core import CheckpointError
from tilewise.files.reading import Unreadable

F32, I32 = {"dtype": "F32"}, {"dtype": "I32"}
TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5).astype(ml_dtypes.bfloat16),
    "c": np.array([[True], [False]]),
    "d": np.zeros((0, 4), np.int64),
}
WHOLE = save(TENSORS, metadata={"format": "pt"})


def _file(header, num_data_bytes=8):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + bytes(num_data_bytes)


def _two(first, second):
    return {
        "a": F32 | {"shape": [1], "data_offsets": first},
        "b": F32 | {"shape": [1], "data_offsets": second},
    }


def _one(**changes):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"\2\0\0\0\0\0\0\0{", "header should have 2 bytes"),
        (b"\xff" * 8 + b"{}", "header should have"),
        ((10**8 + 1).to_bytes(8, "little") + b"{}", "header should have"),
        (_file(b" {}", 0), "begin with"),
        (_file(b"[]"), "begin with"),
        (_file(b"{]"), "not JSON"),
        (_file(b'{"a": ' + b"[" * 10**5), "not JSON"),
        (_file({"a": {}}), "a.dtype"),
        (_file(_one(dtype=7)), "a.dtype"),
        (_file(_one(dtype="F8_E5M2")), "dtype 'F8_E5M2', which is not supported"),
        (_file(_one(shape=2)), "a.shape"),
        (_file(_one(shape=[True])), "a.shape.0"),
        (_file(b'{"a":{"dtype":"F32","shape":[1e40],"data_offsets":[0,8]}}'), "a.shape.0"),
        (_file(_one(shape=[-2])), "a.shape.0"),
        (_file(_one(shape=[1 << 61, 1 << 61])), "invalid shape"),
        (_file(_one(shape=[1 << 60])), "invalid shape"),
        (_file(_one(shape=[(1 << 60) - 1])), "does not fit its 8 bytes"),
        (_file(_one(shape=[0, 1 << 61, 1 << 61], data_offsets=[0, 0]), 0), "invalid shape"),
        (_file(_one(shape=[1] * 33)), "a.shape"),
        (_file(_one(shape=[3])), "does not fit its 8 bytes"),
        (_file(_one(data_offsets=[0, 4, 8])), "a.data_offsets"),
        (_file(_one(data_offsets=[8, 0])), "does not fit"),
        (_file(_one(data_offsets=[-8, 0])), "a.data_offsets.0"),
        (_file(_one(colour=1)), "a.colour must be a known key"),
        (_file(_one(), 7), "end at byte"),
        (_file(_one(), 9), "end at byte"),
        (_file({}, 1), "end at byte"),
        (_file(_two([0, 4], [0, 4])), "overlaps"),
        (_file(_two([0, 4], [5, 9]), 9), "1 bytes before 'b' belong to no tensor"),
        (_file(_two([4, 8], [8, 12]), 12), "4 bytes before 'a' belong to no tensor"),
        (
            _file(
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"I32","shape":[1],"data_offsets":[4,8]}}'
            ),
            "'a' appears twice",
        ),
        (_file({"__metadata__": {"x": 1}} | _one()), "__metadata__.x"),
    ],
)
def test_a_header_that_violates_a_rule_is_rejected(data, words, tmp_path):
    """Every rule of the format has its reason in one short line; the file is named if there is one."""
    with pytest.raises(Unreadable) as caught:
        parse_header(data)
    assert words in str(caught.value) and len(str(caught.value)) < 300
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"got '.*model\.safetensors'") as error:
        open_weights(tmp_path)
    assert "\n" not in str(error.value)


def _arrays(data, path):
    path.write_bytes(data)
    return {name: tensor.read() for name, tensor in open_weights(path).items()}


def _same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        (ours[n].dtype, ours[n].shape, ours[n].tobytes())
        == (theirs[n].dtype, theirs[n].shape, theirs[n].tobytes())
        for n in ours
    )


def test_files_of_the_library_are_read(tmp_path):
    """All dtypes and shapes, also empty ones, and no tensor at all."""
    assert _same(_arrays(WHOLE, tmp_path / "f"), TENSORS)
    assert _arrays(save({}), tmp_path / "g") == {}


@settings(max_examples=100)
@given(data=st.data())
def test_a_changed_file_gives_correct_arrays_or_one_error(data, tmp_path_factory):
    """Bytes of a valid file changed, removed and inserted: the result of the safetensors library,
    or an error.

    Files that only we reject (with duplicate keys, for example) are rejected; files that the
    library rejects are never read.
    """
    content = bytearray(WHOLE)
    header_end = 8 + int.from_bytes(WHOLE[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, header_end))
        content[place : place + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"0", b"9", b"-", b"1e40", b",", b"]", b'"a"', b'"F32"'])
        )
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    try:
        ours = _arrays(bytes(content), path)
    except CheckpointError:
        return
    theirs = {
        name: (list(entry["shape"]), bytes(entry["data"])) for name, entry in deserialize(bytes(content))
    }
    assert {name: (list(array.shape), array.tobytes()) for name, array in ours.items()} == theirs


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"a"', b'"e"'), (b"[2,3]", b"[3,2]"), (b"[2,3]", b"[6,1]"), (b'"F32"', b'"I32"'), (b'"pt"', b'"tp"')],
    ids=str,
)
def test_other_valid_files_are_read(old, new, tmp_path):
    """The twin: other names, shapes, dtypes and metadata are read like the library reads them."""
    content = WHOLE.replace(old, new, 1)
    assert content != WHOLE
    theirs = {name: (list(entry["shape"]), bytes(entry["data"])) for name, entry in deserialize(content)}
    ours = _arrays(content, tmp_path / "f.safetensors")
    assert {name: (list(array.shape), array.tobytes()) for name, array in ours.items()} == theirs


WIDTHS = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8}


@st.composite
def _headers(draw):
    """Tensors one after another with names in any order; sometimes with one wrong number."""
    header, end = {}, 0
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        begin, end = end, end + WIDTHS[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    numbers = [row for entry in header.values() for row in (entry["shape"], entry["data_offsets"]) if row]
    is_whole = not numbers or draw(st.booleans())
    if not is_whole:
        row = draw(st.sampled_from(numbers))
        place = draw(st.integers(0, len(row) - 1))
        row[place] += draw(st.sampled_from([-8, -1, 1, 1 << 62]))
    return header, end, is_whole


@settings(max_examples=100)
@given(_headers())
def test_random_headers_cover_their_data_or_are_rejected(drawn):
    """Every accepted header covers each byte of the file once; a covering one is accepted."""
    header, num_data_bytes, is_whole = drawn
    data = _file(header, num_data_bytes)
    try:
        entries = parse_header(data)
    except Unreadable:
        assert not is_whole
        return
    assert entries.keys() == header.keys()
    covered = sorted(b for entry in entries.values() for b in range(entry.begin, entry.end))
    assert covered == list(range(len(data) - num_data_bytes, len(data)))
    assert all(
        entry.end - entry.begin == WIDTHS[header[name]["dtype"]] * math.prod(header[name]["shape"])
        for name, entry in entries.items()
    )
