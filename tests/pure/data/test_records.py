"""Records of JSON lines, JSON arrays and Parquet files; errors name file and line."""

import gzip
import json
import sys

import pytest

from tilewise.core import ConfigError
from tilewise.data import load_corpus, read_records, record_files, records

ROWS = [{"text": f"Text {i}: ä€😀", "more": [{"a": i}], "none": None} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def read(path, *fields):
    """The records at a path."""
    return [
        r for name, file in record_files(path).items() for r in read_records(name, file, fields or ["text"])
    ]


def write(folder):
    """The same records in every kind of file."""
    (folder / "a.jsonl").write_text(LINES.replace("\n", "\r\n\n", 1))
    (folder / "b.NDJSON.gz").write_bytes(gzip.compress(LINES.encode()))
    (folder / "c.json").write_text(" \n" + json.dumps(ROWS, indent=1))
    (folder / "d.json.gz").write_bytes(gzip.compress(LINES.encode()))
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "e.parquet")


def test_all_kinds_of_files_have_the_same_records(tmp_path, caplog):
    """Blank lines are no records; hidden files and files of other kinds are not read."""
    write(tmp_path)
    for name in (".hidden.jsonl", "f.csv", "g.txt"):
        (tmp_path / name).write_text("x")
    by_file = {path: read(tmp_path / path, "text", "more") for path in record_files(tmp_path)}
    assert [*by_file] == ["a.jsonl", "b.NDJSON.gz", "c.json", "d.json.gz", "e.parquet"]
    assert "1 files of other kinds left out, such as 'f.csv'" in caplog.text
    for name, own in by_file.items():
        assert [(r.text("text"), r.value("more")) for r in own] == [(r["text"], r["more"]) for r in ROWS], (
            name
        )
    assert [r.place for r in by_file["a.jsonl"]][:2] == ["a.jsonl:1", "a.jsonl:3"]
    assert (
        by_file["c.json"][1].place == "c.json, item 2" and by_file["e.parquet"][4].place == "e.parquet, row 5"
    )
    assert read(tmp_path) == [r for path in by_file for r in read(tmp_path / path)]
    assert [r.name for r in read(tmp_path / "[ab].*")][-1] == "b.NDJSON.gz#000005"


def test_texts_of_records_are_a_corpus(tmp_path):
    """Some are held out, by a hash of file and number; the field has any name."""
    write(tmp_path)
    corpus = load_corpus(tmp_path, 0)
    assert [file.text for file in corpus.train] == [row["text"] for row in ROWS] * 5
    split = load_corpus(tmp_path, 40.0)
    assert split.held_out and {*split.train, *split.held_out} == {*corpus.train}
    (tmp_path / "x.jsonl").write_text('{"content": "a"}\n{"content": " "}\n')
    assert [f.text for f in load_corpus(tmp_path / "x.jsonl", 0, "content").train] == ["a"]
    assert [f.text for f in load_corpus(tmp_path / "[x].jsonl", 0, "content").train] == ["a"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", LINES + '{"text": "x"', r"'.*a.jsonl': line 6: it is not JSON"),
        ("a.jsonl", LINES + "[1]\n", r"must be an object with named fields in a.jsonl:6; got \[1\]"),
        ("a.jsonl", '{"text": NaN}', "line 1: NaN is not a number"),
        ("a.jsonl", '{"text": 1, "text": 2}', "line 1: key 'text' appears twice"),
        ("a.jsonl", "[" * 100_000, "line 1: it is not JSON: it is nested too deeply"),
        ("a.jsonl", b"\xef\xbb\xbf{}", "line 1: it starts with a byte order mark"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "line 1: byte 13 is not UTF-8"),
        ("a.json", '{\n"text": "x"\n}', "line 1: it is not JSON"),
        ("a.json", "[1, 2", "it is not JSON"),
        ("a.json", '[{"text": "x"}, 7]', "a.json, item 2; got 7"),
        ("a.jsonl.gz", b"plain", "it is damaged .Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(LINES.encode())[:-9], "it is damaged .Compressed file ended"),
        ("a.parquet", b"PAR1", "the pyarrow library says"),
        ("a.csv", "text\nx", r"must be in .jsonl, .json or .parquet .*; got '.*a.csv'"),
    ],
)
def test_damaged_files_are_one_error(tmp_path, name, content, words):
    """With file and line, before any training."""
    if name == "a.parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_missing_fields_are_one_error(tmp_path):
    """A field that is absent, is not text, or is no Unicode."""
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": null, "c": "\\ud800"}\n')
    (record,) = read(tmp_path)
    for field, words in (
        ("text", "must have the field 'text' in a.jsonl:1; got 'a', 'b', 'c'; set the names of fields"),
        ("b", "must have the field 'b'"),
        ("a", "field 'a' must be text in a.jsonl:1; got 1"),
        ("c", "must be valid Unicode in a.jsonl:1"),
    ):
        with pytest.raises(ConfigError, match=words):
            record.text(field)
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([{"input_ids": [1]}]), tmp_path / "b.parquet")
    with pytest.raises(
        ConfigError, match=r"in b.parquet, row 1; got 'input_ids'; .*or type = 'pretokenized'"
    ):
        read(tmp_path / "b.parquet")[0].text("text")
    for path in ("nothing", "*.jsonl2", "no/*.jsonl"):
        with pytest.raises(ConfigError, match="got no such file"):
            read(tmp_path / path)


def test_data_beyond_limits_is_rejected(tmp_path, monkeypatch):
    """A long line, a long array, and an archive that holds more than memory."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode() * 1000))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    monkeypatch.setattr(records, "_MAX_ARRAY_BYTES", 100)
    with pytest.raises(ConfigError, match="an array has more than"):
        read(tmp_path / "a.json")
    monkeypatch.setattr(records.os, "sysconf", lambda name: 100)
    with pytest.raises(ConfigError, match="must fit the machine's memory"):
        read(tmp_path / "a.jsonl.gz")
    monkeypatch.setattr(records, "_MAX_LINE_BYTES", 10)
    with pytest.raises(ConfigError, match="line 1 is longer than"):
        read(tmp_path / "a.jsonl.gz")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    """The extra's name is in the message."""
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"need pyarrow; .* pip install 'tilewise\[parquet\]'"):
        read(tmp_path)
