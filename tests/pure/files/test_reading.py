"""Reading files and JSON of users: accepted as every reader would accept them, or one short error."""

import contextlib
import io
import json
import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from tilewise.files import reading
from tilewise.files.reading import (
    Forbidden,
    Unreadable,
    decode_text,
    parse_json,
    read_json,
    read_whole,
    shown,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class _Anything(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Sizes(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    size: int
    rate: float = 0.0
    is_tied: bool = False
    names: list[str] = []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "object"),
        (b'{"size": 1} x', "not JSON"),
        (b'\xef\xbb\xbf{"size": 1}', "byte order mark"),
        ('{"size": 1}'.encode("utf-16"), "not JSON"),
        (b'{"size": 1, "names": ["\xff"]}', "not JSON"),
        (b'{"size": 1, "names": ["\\ud800"]}', "not JSON"),
        (b'{"size": 1, "size": 2}', "'size' appears twice"),
        (b'{"size": 1, "rate": NaN}', "NaN"),
        (b'{"size": 1, "rate": 1e400}', "beyond the range of a double"),
        (b'{"size": 1e40}', "size"),
        (b'{"size": 4096.9}', "size"),
        (b'{"size": "4096"}', "size"),
        (b'{"size": true}', "size"),
        (b'{"size": 1, "is_tied": "false"}', "is_tied"),
        (b'{"size": 1, "names": "abc"}', "names"),
        (b'{"size": 1, "colour": 2}', "colour must be a known key"),
        (b'{"rate": 1}', "size is required"),
        (b'{"size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"size": ' + b"[" * 100_000, "not JSON"),
        (b'{"size": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}", "not JSON"),
    ],
)
def test_invalid_content_is_rejected(content, words):
    """Syntax, encoding, duplicate keys and types are checked strictly; the reason is one short line."""
    with pytest.raises(Unreadable) as caught:
        parse_json(content, _Sizes)
    assert words.lower() in str(caught.value).lower() and len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_duplicate_key_is_detected_at_any_depth():
    """Also where the model accepts any value."""
    with pytest.raises(Unreadable, match="'b' appears twice"):
        parse_json(b'{"a": [{"b": 1, "b": 1}]}', _Anything)


def test_numbers_are_not_rounded():
    """An integer is accepted as a float, and nothing is rounded."""
    assert parse_json(b'{"size": 12345678901234567890, "rate": 3}', _Sizes) == _Sizes(
        size=12345678901234567890, rate=3.0
    )


@settings(max_examples=50)
@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_json_round_trips(value):
    """Every object with finite numbers is equal after reading."""
    assert parse_json(json.dumps(value, allow_nan=False).encode(), _Anything).model_dump() == value


@settings(max_examples=100)
@given(st.data(), st.dictionaries(st.text(max_size=4), VALUES, max_size=3))
def test_damaged_json_is_read_or_rejected(data, value):
    """Bytes changed anywhere give what the standard library reads, or `Unreadable`; never another error."""
    content = bytearray(json.dumps(value).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        content = content or bytearray(b"{")
    try:
        parsed = parse_json(bytes(content), _Anything).model_dump()
    except Unreadable:
        return
    assert parsed == json.loads(content)


@settings(max_examples=100)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_rejected(content):
    """Random bytes are read as Python reads them, or are `Unreadable`; never another error."""
    try:
        text = decode_text(content)
    except Unreadable:
        assert content.startswith(b"\xef\xbb\xbf") or "\ufffd" in content.decode(errors="replace")
    else:
        assert text.encode() == content
    with contextlib.suppress(Unreadable):
        assert parse_json(content, _Anything).model_dump() == json.loads(content)


def test_only_regular_files_are_read(tmp_path):
    """A pipe, a directory, a device, a socket and a dangling link are named in the error, without waiting."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (
        ("pipe", "named pipe"),
        (".", "a directory"),
        ("link", "the link is dangling"),
        ("loop", "symbolic links"),
        ("absent", "no such file"),
        ("file/deeper", "Not a directory"),
        ("nul\0", "null"),
        ("/dev/null", "a device"),
    ):
        (tmp_path / "file").touch()
        with pytest.raises(Unreadable, match=words):
            read_whole(tmp_path / name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(Unreadable, match="No such device"):
            read_whole(tmp_path / "s")


def test_file_without_permission_is_rejected(tmp_path):
    """An unreadable file is one error."""
    (tmp_path / "f").touch(mode=0)
    if os.access(tmp_path / "f", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(Forbidden, match="Permission"):
        read_whole(tmp_path / "f")


def test_too_large_files_are_rejected(tmp_path):
    """At most the limit is read; a file of exactly that size is accepted, also through a link."""
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("f")
    assert read_whole(tmp_path / "link", 5) == b"12345"
    with pytest.raises(Unreadable, match="larger than 4 bytes"):
        read_whole(tmp_path / "f", 4)


def test_name_that_is_not_utf8_is_accepted(tmp_path):
    """File names are bytes to the system."""
    path = os.path.join(os.fsencode(tmp_path), b"\xff.json")
    with open(path, "wb") as file:
        file.write(b'{"size": 1}')
    assert read_json(os.fsdecode(path), _Sizes).size == 1


def test_values_in_messages_are_short_and_printable():
    """Neither a long value nor one with control characters breaks the line."""
    assert shown("a\x1b[2J\ud800\n") == "'a\\x1b[2J\\ud800\\n'"
    assert len(shown("x" * 10**6)) < 110


def test_file_without_data_is_rejected(tmp_path, monkeypatch):
    """Some files of the system return no data to a non-blocking read."""

    class Silent(io.BytesIO):
        def read(self, size=-1):
            return None

    monkeypatch.setattr(reading, "open_regular", lambda path: Silent())
    with pytest.raises(Unreadable, match="without blocking"):
        read_whole(tmp_path / "kmsg")
