"""Reads records from structured files: JSON lines, JSON arrays and Parquet.

A record is an object with named fields; its place (file and line) is part of every error about it.
Files are untrusted: a line that is not JSON, a damaged archive and more data than the machine's
memory are errors. Nothing is skipped except blank lines. Parquet needs pyarrow, which is an extra.
"""

from __future__ import annotations

import fnmatch
import gzip
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from tilewise.core import ConfigError, Validator, get_logger, shown
from tilewise.core.sizes import format_bytes
from tilewise.files.reading import Unreadable, open_regular, plain_json, refusals_of

__all__ = ["Record", "check_memory", "is_record_file", "is_structured", "read_records", "record_files"]

_LINES = {".jsonl", ".ndjson", ".jsonlines"}
_ARRAY, _PARQUET, _GZIP = ".json", ".parquet", ".gz"
_STRUCTURED = (
    {*_LINES, _ARRAY, ".geojson", ".ipynb"}
    | {".csv", ".tsv", ".xlsx"}
    | {_PARQUET, ".arrow", ".feather", ".avro", ".orc"}
)
COMPRESSED = {_GZIP, ".zst", ".bz2", ".xz", ".lz4", ".zip", ".7z"}
_MAX_LINE_BYTES = 64 << 20
_MAX_ARRAY_BYTES = 1 << 30
_ROWS = 1024  # of Parquet at a time
# types of sources by the usual names of their fields, for advice
_TYPES = {"messages": "chat", "prompt": "prompt_completion", "input_ids": "pretokenized", "text": "text"}
_validate = Validator("data")


@dataclass(frozen=True)
class Record:
    """One object of a structured file.

    Attributes:
        name: the file's name relative to the path of the data, and the record's number. A hash of
            it decides whether the record is held out.
        place: file and line, for messages.
        fields: values by name.
    """

    name: str
    place: str
    fields: Mapping[str, Any]

    def text(self, field: str) -> str:
        """The text of a field.

        Raises:
            ConfigError: there is no such field, or it is not text, or not valid Unicode.
        """
        value = self.value(field)
        if not isinstance(value, str):
            self.invalid(f"field {field!r} must be text", shown(value, 40), "choose another field")
        return self.checked(value)

    def value(self, field: str) -> Any:
        """The value of a field.

        Raises:
            ConfigError: there is no such field.
        """
        if self.fields.get(field) is None:
            names = ", ".join(shown(name, 40) for name in list(self.fields)[:8]) or "no fields"
            kind = next(
                (kind for name, kind in _TYPES.items() if name in self.fields and name != field), None
            )
            advice = "set the names of fields (field_...)" + (f", or type = '{kind}'" if kind else "")
            self.invalid(f"a record must have the field {field!r}", names, advice)
        return self.fields[field]

    def checked(self, text: str) -> str:
        """The same text.

        Raises:
            ConfigError: it has half a surrogate pair, which no tokenizer can encode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            self.invalid(
                "text must be valid Unicode", shown(text[error.start : error.end]), "repair the record"
            )
        return text

    def invalid(self, rule: str, got: str, advice: str) -> NoReturn:
        """Raise an error about this record."""
        _validate.invalid("records", f"{rule} in {self.place}", got, advice)


def is_structured(name: str) -> bool:
    """Whether a file's suffix is one of structured data, compressed or not: `chat.jsonl`,
    `chat.jsonl.gz`.
    """
    endings = [ending.lower() for ending in Path(name).suffixes]
    while endings and endings[-1] in COMPRESSED:
        endings.pop()
    return bool(endings) and endings[-1] in _STRUCTURED


def is_record_file(name: str) -> bool:
    """Whether `read_records` reads files with this suffix."""
    return _kind(name) is not None


def _kind(name: str) -> str | None:
    """`lines`, `array` (of JSON, or lines) or `parquet`; None for files that are not read."""
    lower = name.lower()
    suffix = Path(lower.removesuffix(_GZIP)).suffix
    if suffix in _LINES:
        return "lines"
    if suffix == _ARRAY:
        return "array"
    return "parquet" if suffix == _PARQUET and not lower.endswith(_GZIP) else None


def record_files(path: str | Path) -> dict[str, Path]:
    """The structured files at a path, by their names relative to it, sorted: the file itself; the
    readable files of a directory and its folders, except hidden ones; or the files that match a
    pattern such as `data/train-*.parquet`.

    Raises:
        ConfigError: there are no such files, or the path is a file of another kind.
    """
    root = _validate.path("records", "data", path)
    if os.path.isfile(root):
        files = {root.name: root}
    elif os.path.isdir(root):
        names = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
        seen = {
            n: p for n, p in names.items() if is_structured(n) and not any(s[:1] == "." for s in n.split("/"))
        }
        files = {name: file for name, file in seen.items() if is_record_file(name)}
        if odd := sorted(seen.keys() - files.keys()):
            get_logger("data").warning(
                "%d files of other kinds left out, such as %s", len(odd), shown(odd[0])
            )
    elif has_pattern(root):
        files = {p.name: p for p in matching(root)}
    else:
        files = {}
    wrong = next((file for name, file in files.items() if not is_record_file(name)), None)
    if wrong is not None or not files:
        rule = "records must be in .jsonl, .json or .parquet files (the first two also as .gz)"
        got = f"no such file at {str(path)!r}" if wrong is None else repr(str(wrong))
        _validate.invalid("records", rule, got, "check the path, or convert the file")
    return dict(sorted(files.items()))


def has_pattern(path: Path) -> bool:
    """Whether the last part of a path that does not exist is a pattern of file names."""
    return any(c in path.name for c in "*?[")


def matching(path: Path) -> list[Path]:
    """The files that match a path whose last part is a pattern, sorted by name."""
    names = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    files = (path.parent / name for name in fnmatch.filter(names, path.name) if name[:1] != ".")
    return sorted(file for file in files if file.is_file())


def check_memory(num_bytes: int, place: Path) -> None:
    """Check that data fits in memory, which holds it while it is encoded.

    Raises:
        ConfigError: it does not.
    """
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > limit:
        raise ConfigError(
            f"[data.corpus] the data must fit the machine's memory of {format_bytes(limit)}; got "
            f"{format_bytes(num_bytes)} in {str(place)!r}; give less text"
        )


def read_records(name: str, path: Path, fields: Sequence[str]) -> Iterator[Record]:
    """The records of a file, one after the other.

    Args:
        name: the file's name in records' names and places.
        path: the file.
        fields: the fields that are used. Parquet columns other than these are not read.

    Raises:
        ConfigError: the file cannot be read, or a record is not an object. The message names the
            file and the line.
    """
    kind = _kind(path.name)
    assert kind is not None  # `record_files` returns no others
    try:
        if kind == "parquet":
            yield from _rows(name, path, fields)
            return
        with _opened(path) as stream:
            if kind == "array" and _begins_array(stream):
                yield from _items(name, path, stream)
            else:
                yield from _lines(name, path, stream)
    except (Unreadable, OSError, EOFError, zlib.error) as error:
        reason = str(error) if isinstance(error, Unreadable) else f"it is damaged ({error})"
        _validate.invalid("records", "data must be readable", f"{str(path)!r}: {reason}", "repair the file")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file, decompressed if its suffix says that it is compressed."""
    with open_regular(path) as file:
        if not path.name.lower().endswith(_GZIP):
            yield file
            return
        with gzip.open(file) as stream:
            yield stream  # type: ignore[misc]  # a GzipFile is one by its methods


def _record(name: str, number: int, place: str, value: object) -> Record:
    record = Record(f"{name}#{number:06d}", place, value if isinstance(value, dict) else {})
    if not isinstance(value, dict):
        record.invalid("a record must be an object with named fields", shown(value, 40), "repair the file")
    return record


def _lines(name: str, path: Path, stream: IO[bytes]) -> Iterator[Record]:
    num_bytes = number = 0
    while line := stream.readline(_MAX_LINE_BYTES + 1):
        number += 1
        num_bytes += len(line)
        if len(line) > _MAX_LINE_BYTES:
            raise Unreadable(f"line {number} is longer than {format_bytes(_MAX_LINE_BYTES)}")
        check_memory(num_bytes, path)  # also a small archive may hold more than memory
        if line.strip():
            try:
                value = plain_json(line)
            except Unreadable as error:
                raise Unreadable(f"line {number}: {error}") from None
            yield _record(name, number, f"{name}:{number}", value)


def _begins_array(stream: IO[bytes]) -> bool:
    """Whether the first character of a file is a bracket."""
    is_array = False
    while byte := stream.read(1):
        if not byte.isspace():
            is_array = byte == b"["
            break
    stream.seek(0)
    return is_array


def _items(name: str, path: Path, stream: IO[bytes]) -> Iterator[Record]:
    content = stream.read(_MAX_ARRAY_BYTES + 1)
    if len(content) > _MAX_ARRAY_BYTES:
        raise Unreadable(f"an array has more than {format_bytes(_MAX_ARRAY_BYTES)}; write JSON lines instead")
    for number, value in enumerate(plain_json(content), 1):
        yield _record(name, number, f"{name}, item {number}", value)


def _rows(name: str, path: Path, fields: Sequence[str]) -> Iterator[Record]:
    try:
        from pyarrow import parquet
    except ImportError:
        _validate.invalid(
            "records",
            "Parquet files need pyarrow",
            f"{str(path)!r} and no pyarrow",
            "install it: pip install 'tilewise[parquet]'",
        )
    number = 0
    with open_regular(path) as file:
        with refusals_of("pyarrow"):
            table = parquet.ParquetFile(file)
            columns = [column for column in table.schema_arrow.names if column in fields]
            check_memory(
                sum(table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups)), path
            )
            batches = table.iter_batches(_ROWS, columns=columns or None)  # all, for the error about them
        while True:
            with refusals_of("pyarrow"):
                batch = next(batches, None)
                values = [] if batch is None else batch.to_pylist()
            if batch is None:
                return
            for value in values:
                number += 1
                yield _record(name, number, f"{name}, row {number}", value)
