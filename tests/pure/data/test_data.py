"""Corpus, tokenizer and batches: deterministic, lossless, independent of where they run."""

import gzip
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tilewise.core import ConfigError
from tilewise.data import (
    END_OF_TEXT,
    IGNORED,
    Batches,
    TextDocuments,
    TextWindows,
    encode_files,
    is_held_out,
    load_corpus,
    load_standard_library,
    special_id,
    text_files,
    train_tokenizer,
)
from tilewise.data import corpus as corpus_module
from tilewise.data.text_files import read_pieces


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def f(x):\n    return x\n" * 20, "class A:\n    pass\n"], vocab_size=300)


def test_held_out_share_is_near_five_percent():
    """The hash holds out about 5% of names, always the same ones."""
    names = [f"package/module_{i}.py" for i in range(10_000)]
    held_out = [name for name in names if is_held_out(name)]
    assert 0.04 < len(held_out) / len(names) < 0.06
    of_few = [2, 23, 43, 91, 98, 109, 110]  # in every process, on every machine
    assert [i for i in range(120) if is_held_out(f"package/module_{i}.py")] == of_few


def test_standard_library_corpus():
    """The standard library's tests and installed packages are left out; some files are held out."""
    corpus = load_standard_library()
    names = [file.name for file in corpus.train + corpus.held_out]
    assert "json/decoder.py" in names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/")[:-1])]
    assert corpus.held_out and not set(corpus.train) & set(corpus.held_out)


def _joined(corpus):
    """The pieces of a corpus in the order of their names."""
    return "".join(file.text for file in sorted(corpus.train + corpus.held_out, key=lambda file: file.name))


def test_single_file_is_split_without_loss(tmp_path):
    """One file becomes pieces of about 8 KiB that concatenate to the file and end at blank lines."""
    text = "\n\n".join(f"paragraph {i} " + "x" * 500 for i in range(100))
    path = tmp_path / "book.txt"
    path.write_text(text)
    corpus = load_corpus(path)
    assert _joined(corpus) == text
    pieces = corpus.train + corpus.held_out
    assert [piece.name for piece in corpus.train][:2] == ["book.txt#000000", "book.txt#000001"] and len(
        pieces
    ) == 7
    assert all(8192 <= len(piece.text) < 9000 and piece.text.endswith("\n\n") for piece in corpus.train[:-1])


WORDS = st.sampled_from(["a", "ä", "€", "😀", "word ", "x" * 300, "\n", "\n\n", "\r\n", "\r\n\r\n", " \n"])


@settings(max_examples=100)
@given(st.lists(WORDS, max_size=60), st.integers(1, 50))
def test_pieces_do_not_depend_on_block_size(tmp_path_factory, words, block_bytes):
    """Pieces are not blank, have a limited length, and concatenate to the text."""
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    text = "".join(words)
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "_PIECE_CHARS", 16)
        patch.setattr(text_files, "_LONGEST_PIECE_CHARS", 100)
        expected = read_pieces(path)
        patch.setattr(text_files, "_BLOCK_BYTES", block_bytes)
        pieces = read_pieces(path)
    assert pieces == expected and "".join(pieces) == (text if text.strip() else "")
    assert all(piece.strip() for piece in pieces)
    assert all(piece.rstrip(" ").endswith("\n") or len(piece) >= 100 for piece in pieces[:-1])


def test_long_file_is_split(tmp_path, monkeypatch):
    """A file too long for one document is split as a single file would be."""
    text = "".join(f"line {i} of a long file\n" for i in range(3000))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("short")
    unsplit = load_corpus(tmp_path, held_out_percent=0)
    assert [file.name for file in unsplit.train] == ["long.txt", "short.txt"]
    monkeypatch.setattr(corpus_module, "_LONG_FILE_BYTES", 1000)
    corpus = load_corpus(tmp_path, held_out_percent=0)
    assert corpus.train[-1] == unsplit.train[-1] and [file.name for file in corpus.train[:2]] == [
        "long.txt#000000",
        "long.txt#000001",
    ]
    assert "".join(file.text for file in corpus.train[:-1]) == text
    assert all(file.text.endswith("\n") for file in corpus.train[:-1])


def test_file_of_17_mib_is_used_whole(tmp_path):
    """Nothing is dropped for its length, and no character is split."""
    with (tmp_path / "big.txt").open("w", encoding="utf-8") as file:
        file.write("x" + "ä€😀" * (17 << 20 >> 4))  # no line ends at all
        file.writelines(["\nthe last line"] * 700_000)
    corpus = load_corpus(tmp_path, held_out_percent=0)
    assert sum(file.num_bytes for file in corpus.train) == (tmp_path / "big.txt").stat().st_size > 16 << 20
    assert (
        corpus.train[-1].text.endswith("the last line") and max(len(f.text) for f in corpus.train) <= 1 << 16
    )


def test_skipped_files_are_one_line(tmp_path, caplog):
    """Binary files, other encodings and unreadable files are listed in one line; empty and hidden ones are not."""
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c").write_text("hidden")
    (tmp_path / "empty").touch()
    (tmp_path / "b.bin").write_bytes(b"ELF\0")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "cut").write_bytes("ä".encode()[:1])
    for i in range(5):
        (tmp_path / f"c{i}").write_bytes(b"\0")
    corpus = load_corpus(tmp_path, held_out_percent=0)
    assert [file.name for file in corpus.train] == ["a.txt"] and corpus.num_bytes == 5
    (record,) = caplog.records
    assert record.getMessage() == (
        "8 files left out: 6 binary ('b.bin', 'c0', 'c1', …); 2 not UTF-8 ('cut', 'latin')"
    )
    caplog.clear()
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ConfigError, match=r"got 0 text files in '.*' \(8 files left out: 6 binary"):
        load_corpus(tmp_path)
    assert not caplog.records


@pytest.mark.parametrize("name", ["a.JSON", "a.b.csv", "x.avro.zst", "x.jsonl.gz"])
def test_structured_files_are_skipped(tmp_path, name, caplog):
    """Among text files, a structured file is skipped. A single one is rejected if its kind is not read."""
    text = b'{"text": "hello"}\n' * 100
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    if name in ("a.JSON", "x.jsonl.gz"):
        assert len(load_corpus(tmp_path / name, 0).train) == len(load_corpus(tmp_path, 0).train) == 100
    else:
        with pytest.raises(ConfigError, match=r"structured file '.*'; convert it to JSON lines"):
            load_corpus(tmp_path / name)
        with pytest.raises(ConfigError, match=r"1 structured data .*; convert structured data to JSON lines"):
            load_corpus(tmp_path)
    for text in ("a.txt", "a.md", "json.py", "json"):
        (tmp_path / text).write_text('{"text": "hello"}')
    assert [file.name for file in load_corpus(tmp_path, 0).train] == ["a.md", "a.txt", "json", "json.py"]
    advice = "; to read records, make their path or pattern a source of its own"
    expected = f"1 files left out: 1 structured data ({name!r}){advice * (name in ('a.JSON', 'x.jsonl.gz'))}"
    assert [r.getMessage() for r in caplog.records] == [expected]
    (tmp_path / "text.txt.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(ConfigError, match=r"compressed file .*; decompress it"):
        load_corpus(tmp_path / "text.txt.gz")


def test_files_without_permission_are_listed(tmp_path, caplog):
    """Files and folders without permission are skipped by name."""
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "locked").touch(mode=0)
    (tmp_path / "folder").mkdir(mode=0)
    if os.access(tmp_path / "locked", os.R_OK):
        pytest.skip("this user may read everything")
    load_corpus(tmp_path, held_out_percent=0)
    assert "2 Permission denied ('folder', 'locked')" in caplog.text


def test_names_that_are_not_utf8_are_accepted(tmp_path):
    """A file's name is bytes: any of them is read, sorted and split by its hash."""
    for i in range(40):
        with open(os.path.join(os.fsencode(tmp_path), b"\xff%d" % i), "w") as file:
            file.write("hello")
    corpus = load_corpus(tmp_path, held_out_percent=50)
    assert len(corpus.train) + len(corpus.held_out) == 40 and corpus.train and corpus.held_out
    assert load_corpus(tmp_path / os.fsdecode(b"\xff1"), held_out_percent=0).train[0].text == "hello"


def test_text_larger_than_memory_is_rejected_unread(tmp_path):
    """A file larger than the machine's memory is one error at once."""
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(ConfigError, match="must fit the machine's memory"):
        load_corpus(tmp_path)


def test_missing_data_is_an_error(tmp_path):
    """A path that does not exist, is not a file, or holds no text is one clear error."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("nowhere", "pipe", "nul\0", "a" * 5000):
        with pytest.raises(ConfigError, match=r"must be a (file|path)"):
            load_corpus(tmp_path / name)
    (tmp_path / "blank").write_text("\n \n")
    (tmp_path / "none").mkdir()
    for path in (tmp_path / "blank", tmp_path / "none"):
        with pytest.raises(ConfigError, match="must hold UTF-8 text"):
            load_corpus(path)


@pytest.mark.parametrize("text", ["def f(x):\n\treturn 'ä€😀'\n", "", " leading", "\r\n\x00"])
def test_tokenizer_is_lossless(tokenizer, text):
    """Every text round-trips exactly."""
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_is_deterministic(tokenizer):
    """Training twice gives the same tokenizer; the end of a document is id 0."""
    again = train_tokenizer(["def f(x):\n    return x\n" * 20, "class A:\n    pass\n"], vocab_size=300)
    assert again.to_str() == tokenizer.to_str()
    assert special_id(tokenizer, END_OF_TEXT) == 0 and tokenizer.get_vocab_size() <= 300
    with pytest.raises(ConfigError, match=re.escape("must know <|endoftext|>")):
        special_id(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), END_OF_TEXT)


def test_sizes_of_a_vocabulary_are_checked():
    """Fewer entries than bytes cannot be lossless; for too many the library would abort the process."""
    with pytest.raises(ConfigError, match="at least 257"):
        train_tokenizer(["x"], vocab_size=100)
    with pytest.raises(ConfigError, match=re.escape("vocab_size must lie in [0, 1048576]")):
        train_tokenizer(["x"], vocab_size=1 << 31)


def test_invalid_utf8_is_rejected(tokenizer):
    """Half a character is invalid UTF-8, both when a tokenizer is trained and when it encodes."""
    with pytest.raises(ConfigError, match="a text must be"):
        train_tokenizer(["x", "a\ud800"])
    with pytest.raises(ConfigError, match="a text must be"):
        encode_files(tokenizer, ["x", "a\ud800"], 0)


def test_stream_has_an_end_token_after_every_file(tokenizer):
    """Progress counts files."""
    seen = []
    stream = encode_files(tokenizer, ["a", "bc"] * 50, 0, lambda done, total: seen.append((done, total)))
    assert stream.dtype == np.int32 and (stream == 0).sum() == 100 and seen[-1] == (100, 100)
    assert tokenizer.id_to_token(int(stream[-1])) == END_OF_TEXT


def packed(stream, batch, context, seed=0):
    """Batches of windows."""
    return Batches([TextWindows(stream, context)], batch, seed, width=context)


def padded(stream, batch, context, seed=0, end=0):
    """Batches of documents."""
    return Batches([TextDocuments(stream, context, end)], batch, seed, padding=end)


def test_batches_are_windows_and_their_continuation():
    """Labels are the tokens shifted by one."""
    batch = packed(np.arange(1000, dtype=np.int32), 4, 16).at(3)
    assert batch["tokens"].shape == (4, 16)
    np.testing.assert_array_equal(batch["labels"], batch["tokens"] + 1)


def test_every_window_once_per_epoch():
    """An epoch visits every window exactly once, also when a batch spans two epochs."""
    data = packed(np.arange(101, dtype=np.int32), 3, 10, seed=5)
    starts = np.concatenate([data.at(step)["tokens"][:, 0] for step in range(10)])
    for epoch in range(3):
        assert sorted(starts[epoch * 10 : (epoch + 1) * 10]) == list(range(0, 100, 10))
    assert list(starts[:10]) != list(starts[10:20])


def test_batches_depend_only_on_step_and_seed():
    """Any step can be requested at any time."""
    stream = np.arange(5000, dtype=np.int32)
    forward = [packed(stream, 4, 16).at(step)["tokens"] for step in range(50)]
    data = packed(stream, 4, 16)
    for step in (49, 3, 17):
        np.testing.assert_array_equal(data.at(step)["tokens"], forward[step])
    assert not np.array_equal(packed(stream, 4, 16, seed=1).at(0)["tokens"], forward[0])


def documents(lengths, end=0):
    """Ids that count upwards from 1, an end token after each document."""
    ids = iter(range(1, 10_000))
    return np.array([i for n in lengths for i in (*(next(ids) for _ in range(n)), end)], np.int32)


def scored(data, steps):
    """Every counted pair of token and label, step after step."""
    pairs = []
    for step in steps:
        batch = data.at(step)
        counted = batch["labels"] != IGNORED
        pairs += zip(batch["tokens"][counted].tolist(), batch["labels"][counted].tolist())
    return pairs


@settings(max_examples=60)
@given(st.lists(st.integers(0, 23), min_size=1, max_size=12), st.integers(1, 9), st.booleans())
def test_padded_documents_are_predicted_once_an_epoch(lengths, context, is_whole):
    """Each token is predicted from the one before it, the first of a document from the end token."""
    stream = documents(lengths)[: None if is_whole or sum(lengths) == 0 else -1]
    data = padded(stream, 1, context)
    before = np.concatenate([[0], stream[:-1]])
    pairs = scored(data, range(data.num_windows))
    assert sorted(pairs) == sorted(zip(before.tolist(), stream.tolist()))
    assert max(data.at(step)["tokens"].shape[1] for step in range(data.num_windows)) <= context


def test_padded_batch_is_as_wide_as_its_longest_document():
    """Padding has labels that are not counted; a sequence holds one document."""
    stream = documents([3, 1, 7, 2])
    data = padded(stream, 4, 6, seed=1)
    assert data.num_windows == 5  # the longest is cut
    batch = data.at(0)
    lengths = (batch["labels"] != IGNORED).sum(1)
    assert (
        batch["tokens"].shape == batch["labels"].shape == (4, lengths.max()) and lengths.min() < lengths.max()
    )
    for row, length in enumerate(lengths):
        assert not batch["tokens"][row, length:].any() and (batch["labels"][row, length:] == IGNORED).all()
        np.testing.assert_array_equal(batch["tokens"][row, 1:length], batch["labels"][row, : length - 1])
    widths = {data.at(step)["tokens"].shape[1] for step in range(10)}
    assert len(widths) > 1
    np.testing.assert_array_equal(data.at(7)["tokens"], padded(stream, 4, 6, seed=1).at(7)["tokens"])
    with pytest.raises(ConfigError, match="at least 1 token"):
        padded(np.zeros(0, np.int32), 1, 4)


def test_stream_is_a_vector_of_enough_ids():
    """Matrices, floats, and less than one window are rejected."""
    for stream in (np.zeros((40, 2), np.int32), np.zeros(40), np.array(3)):
        with pytest.raises(ConfigError, match="one row of integers"):
            packed(stream, 2, 8)
    with pytest.raises(ConfigError, match="at least context"):
        packed(np.arange(10, dtype=np.int32), 1, 16)


@pytest.mark.parametrize("kind", [packed, padded])
def test_ids_may_have_any_integer_type(kind):
    """Tokens and labels are int32 whatever the stream's type; invalid ids are rejected before any step."""
    for dtype in (np.uint16, np.int64, np.uint64):
        batch = kind(np.arange(40, dtype=dtype), 2, 8).at(0)
        assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
    for wrong in (-1, 1 << 31, 1 << 40):
        with pytest.raises(ConfigError, match="an id of a stream must lie in"):
            kind(np.array([*range(40), wrong]), 2, 8)
    with pytest.raises(ConfigError, match="end must lie in"):
        padded(np.arange(40), 2, 8, end=1 << 31)


def test_only_piece_of_a_small_file_is_not_held_out(tmp_path):
    """It is trained on, whatever its name's hash."""
    name = next(f"{n}.txt" for n in range(1000) if is_held_out(f"{n}.txt#000000"))
    (tmp_path / name).write_text("a few words")
    corpus = load_corpus(tmp_path / name)
    assert [file.text for file in corpus.train] == ["a few words"] and not corpus.held_out
    (tmp_path / name).rename(tmp_path / "a")
    (tmp_path / "b").write_text("more")
    corpus = load_corpus(tmp_path, held_out_percent=99.999)
    assert [len(corpus.train), len(corpus.held_out)] == [1, 1]


@pytest.mark.parametrize("name", ["chat.txt", "chat"])
def test_files_that_look_like_json_lines_are_a_warning(tmp_path, name, caplog):
    """One warning for all of them; text with braces is not JSON Lines."""
    (tmp_path / name).write_text('{"text": "a"}\n\n{"text": "b"}\n')
    (tmp_path / "more").write_text('{"text": "c"}\n' * 2)
    (tmp_path / "code.txt").write_text("{ a }\n{1: 2}\n")
    load_corpus(tmp_path, held_out_percent=0)
    (line,) = caplog.messages
    assert "2 files look like JSON lines" in line and repr(name) in line and "code" not in line
    caplog.clear()
    load_corpus(tmp_path / name)
    assert "1 files look like JSON lines" in caplog.text
