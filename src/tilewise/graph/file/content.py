"""The JSON of a graph file: the graph as the user defined it, before gradients and plans.

    {"tilewise graph": 1,
     "digest": the graph's own,
     "records": [[name, [field, ...]], ...],
     "arrays": [[dtype, [size, ...], the elements in base64], ...],
     "rows": [[class, value, ...], ...]}

Records name the fields of each class. A row is one object: its class and its values. A row refers
to earlier rows only, and the last row is the `Definition`. Each row is on its own line, so that
text tools can compare two files. The functions are pure, and equal graphs give equal bytes.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode, b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tilewise.core.collector import collector_paused
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable, plain_json, read_whole
from tilewise.ir.digest import digest_graph
from tilewise.ir.file import RowReader, RowWriter, Unwritable, array_form, array_named, fields_of
from tilewise.ir.graph import Graph

__all__ = ["Definition", "decode_definition", "encode_definition", "read_content"]

MAX_BYTES = 1 << 30  # size of a file, mostly constants
MAX_VALUES = 8 << 20  # values in its JSON; each takes about 60 bytes of memory
_VERSION = 2
_FORMAT = "tilewise graph"
_KEYS = [_FORMAT, "digest", "records", "arrays", "rows"]


class Definition(NamedTuple):
    """The content of a graph file.

    Attributes:
        graph: tensors, ops and layers, outputs, hints and constants.
        loss: the tensor that training minimizes, or None.
    """

    graph: Graph
    loss: int | None

    def digest(self) -> str:
        """The digest of the whole definition, equal to that of the `ComputeGraph`."""
        return digest_graph(self.graph, self.loss)


def encode_definition(definition: Definition) -> bytes:
    """The bytes of a graph file.

    Raises:
        Unwritable: a value cannot be stored, or there is too much data.
    """
    graph, loss = definition
    writer = RowWriter()
    with collector_paused():
        writer.add(Definition(replace(graph, hints=dict(sorted(graph.hints.items()))), loss))
        records = [[record.__name__, list(fields_of(record))] for record in writer.classes]
        arrays = [[*array_named(a), b64encode(a.tobytes()).decode("ascii")] for a in writer.arrays]
        parts = [_lines(part) for part in (records, arrays, writer.rows)]
    head = f'{{"{_FORMAT}":{_VERSION},\n"digest":"{definition.digest()}",\n'
    content = f'{head}"records":{parts[0]},\n"arrays":{parts[1]},\n"rows":{parts[2]}}}\n'.encode("ascii")
    if len(content) > MAX_BYTES or _num_values(content) > MAX_VALUES:
        raise Unwritable(
            f"a file may have at most {MAX_BYTES} bytes and {MAX_VALUES} values; this one would have more"
        )
    return content


def _lines(items: list[Any]) -> str:
    """A list in JSON with one item per line."""
    return "[" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in items) + "]"


def _num_values(content: bytes) -> int:
    """An upper bound of the number of lists and values in JSON text, without parsing it."""
    return sum(content.count(mark) for mark in (b",", b"[", b"{"))


def decode_definition(content: bytes) -> tuple[Definition, str]:
    """The definition in a file's bytes, and the digest that the file states. The records are valid
    one by one; `require_definition` checks that they are consistent.

    Raises:
        Unreadable: the content is not a graph file, or was written by another version.
    """
    if _num_values(content) > MAX_VALUES:
        raise Unreadable(f"it has more than {MAX_VALUES} values")
    with collector_paused():
        document = plain_json(content)
        if type(document) is not dict or _FORMAT not in document:
            raise Unreadable(f"it must have the key {_FORMAT!r}")
        version = document[_FORMAT]
        if type(version) is not int or version != _VERSION:
            raise Unreadable(f"it has format {shown(version)}, and this version of Tilewise reads {_VERSION}")
        if document.keys() != set(_KEYS):
            raise Unreadable(
                f"it must have the keys {', '.join(_KEYS)}; got {', '.join(map(shown, document))}"
            )
        arrays = [_array(i, entry) for i, entry in enumerate(_list("arrays", document["arrays"]))]
        definition = RowReader(Definition, document["records"], arrays).read(document["rows"])
    if type(definition) is not Definition:
        raise Unreadable(f"its last row must be the Definition; got a {type(definition).__name__}")
    if type(document["digest"]) is not str:
        raise Unreadable(f"its digest must be text; got {shown(document['digest'])}")
    return definition, document["digest"]


def read_content(path: Path) -> bytes:
    """All bytes of a graph's file.

    Raises:
        Unreadable: the path is not a regular file, or the file is larger than a graph file may be.
    """
    return read_whole(path, MAX_BYTES)


def _list(name: str, value: object) -> list[Any]:
    if type(value) is not list:
        raise Unreadable(f"{name} must be a list; got {shown(value)}")
    return value


def _array(number: int, entry: object) -> NDArray[Any]:
    """An array, read-only."""
    name, shape, text = entry if type(entry) is list and len(entry) == 3 else (entry, None, None)
    form = array_form(name, shape)
    try:
        content = b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        content = b""
    if len(content) != form.num_bytes:
        raise Unreadable(f"array {number} must be {form.num_bytes} bytes in base64; got {shown(text)}")
    return form.of(content)
