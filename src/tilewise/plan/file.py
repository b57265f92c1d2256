"""Plans and programs as bytes, for digests, files and other processes: records as rows, see
`ir.file`. The bytes are one line with format and digest, JSON with all rows, then the arrays.

    tilewise plan 6 SHA-256-of-all-that-follows
    length of the JSON, 8 bytes, little-endian
    {"records": [[name, [field, ...]], ...], "arrays": [[dtype, [size, ...]], ...], "rows": [[class, value, ...], ...]}
    the arrays, row-major, one after the other

Nothing is compressed, so a small file cannot expand into a large one. The functions are pure; equal
plans give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from tilewise.core.collector import collector_paused
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable, open_regular, plain_json, read_whole
from tilewise.ir.file import RowReader, RowWriter, Unwritable, array_form, array_named, fields_of

__all__ = ["MAX_BYTES", "decode_plan", "digest_of", "encode_plan", "read_content"]

MAX_BYTES = 1 << 30  # size of a file, mostly constants
_MAX_ROWS_BYTES = 256 << 20
_VERSION = 6
_LINE = re.compile(rb"tilewise plan ([0-9]{1,9}) ([0-9a-f]{64})\n")
_LONGEST_LINE = 100
_LENGTH_BYTES = 8
_KEYS = ["records", "arrays", "rows"]

T = TypeVar("T")


def encode_plan(plan: object) -> bytes:
    """The bytes of a plan file.

    Raises:
        Unwritable: a value cannot be stored, or there is too much data.
    """
    body = _body(plan)
    content = f"tilewise plan {_VERSION} {hashlib.sha256(body).hexdigest()}\n".encode() + body
    if len(content) > MAX_BYTES:
        raise Unwritable(f"a file may have at most {MAX_BYTES} bytes; got {len(content)}")
    return content


def digest_of(plan: object) -> str:
    """SHA-256 of the content of a plan's file.

    Raises:
        Unwritable: as `encode_plan`.
    """
    return hashlib.sha256(_body(plan)).hexdigest()


def _body(plan: object) -> bytes:
    writer = RowWriter()
    writer.add(plan)
    records = [[record.__name__, list(fields_of(record))] for record in writer.classes]
    arrays = [array_named(array) for array in writer.arrays]
    text = json.dumps(dict(zip(_KEYS, (records, arrays, writer.rows))), separators=(",", ":"))
    rows = text.encode("ascii")
    return len(rows).to_bytes(_LENGTH_BYTES, "little") + rows + b"".join(a.tobytes() for a in writer.arrays)


def decode_plan(content: bytes, root: type[T]) -> T:
    """The plan in a file's bytes, of class `root`. Its records are valid one by one; `require_fit`
    checks that they are consistent.

    Raises:
        Unreadable: the bytes are not a plan file, are damaged, or were written by another version.
    """
    line = _LINE.match(content[:_LONGEST_LINE])
    if line is None:
        raise Unreadable("it does not begin with the line of a plan file")
    if int(line[1]) != _VERSION:
        raise Unreadable(f"it has format {int(line[1])}, and this version of Tilewise reads {_VERSION}")
    body = content[line.end() :]
    if hashlib.sha256(body).hexdigest().encode() != line[2]:
        raise Unreadable("it is damaged or was changed: its digest differs")
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    if len(body) < _LENGTH_BYTES or end > len(body) or end > _MAX_ROWS_BYTES:
        raise Unreadable(f"its rows should take {end - _LENGTH_BYTES} bytes, the file has {len(body)}")
    with collector_paused():
        document = plain_json(body[_LENGTH_BYTES:end])
        if type(document) is not dict or list(document) != _KEYS:
            raise Unreadable(f"it must have the keys {', '.join(_KEYS)}; got {shown(document)}")
        plan = RowReader(root, document["records"], _arrays(document["arrays"], body[end:])).read(
            document["rows"]
        )
    if type(plan) is not root:
        raise Unreadable(f"its last row must be the {root.__name__}; got a {type(plan).__name__}")
    return plan


def read_content(path: Path) -> bytes:
    """All bytes of a plan's file.

    Raises:
        Unreadable: it is not a regular file, or is larger than a plan may be.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    return read_whole(path, min(size, MAX_BYTES))


def _arrays(described: object, content: bytes) -> list[NDArray[Any]]:
    """The arrays, read-only."""
    arrays: list[NDArray[Any]] = []
    position = 0
    for entry in described if type(described) is list else [described]:
        form = array_form(*entry) if type(entry) is list and len(entry) == 2 else array_form(entry, None)
        end = position + form.num_bytes
        if end > len(content):
            raise Unreadable(f"array {len(arrays)} should end at byte {end} of {len(content)}")
        arrays.append(form.of(content[position:end]))
        position = end
    if position != len(content):
        raise Unreadable(f"its arrays end at byte {position} of {len(content)}")
    return arrays
