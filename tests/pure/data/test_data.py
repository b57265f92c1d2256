"""Corpus, tokenizer and batches: deterministic, lossless, independent of where they run."""

import numpy as np
import pytest

from tilewise.core import ConfigError
from tilewise.data import (
    END_OF_TEXT,
    Batches,
    encode_files,
    end_of_text_id,
    is_held_out,
    load_corpus,
    load_standard_library,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def f(x):\n    return x\n" * 20, "class A:\n    pass\n"], vocab_size=300)


def test_held_out_share_is_near_five_percent():
    """The hash holds out about 5% of names, always the same ones."""
    names = [f"package/module_{i}.py" for i in range(10_000)]
    held_out = [name for name in names if is_held_out(name)]
    assert 0.04 < len(held_out) / len(names) < 0.06
    assert held_out == [name for name in names if is_held_out(name)]


def test_standard_library_has_no_tests():
    """The standard library's own tests and installed packages are left out; some files are held out."""
    corpus = load_standard_library()
    names = [file.name for file in corpus.train + corpus.held_out]
    assert "json/decoder.py" in names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/")[:-1])]
    assert corpus.held_out and not set(corpus.train) & set(corpus.held_out)


def test_directory_skips_hidden_and_binary(tmp_path):
    """Hidden files, binaries and empty files are no text."""
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c").write_text("hidden")
    corpus = load_corpus(tmp_path, held_out_percent=0)
    assert [file.name for file in corpus.train] == ["a.txt"]


def test_single_file_is_cut_without_loss(tmp_path):
    """One file becomes pieces that together are the file."""
    text = "\n\n".join(f"paragraph {i} " + "x" * 500 for i in range(100))
    path = tmp_path / "book.txt"
    path.write_text(text)
    corpus = load_corpus(path)
    pieces = sorted(corpus.train + corpus.held_out, key=lambda file: file.name)
    assert "".join(piece.text for piece in pieces).rstrip("\n") == text
    assert len(pieces) > 5


def test_missing_data_is_named(tmp_path):
    """A path that does not exist, or holds no text, is one clear error."""
    with pytest.raises(ConfigError, match="must be a file or a directory"):
        load_corpus(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="must hold UTF-8 text"):
        load_corpus(tmp_path)


@pytest.mark.parametrize("text", ["def f(x):\n\treturn 'ä€😀'\n", "", " leading", "\r\n\x00"])
def test_tokenizer_is_lossless(tokenizer, text):
    """Every text comes back exactly."""
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_is_deterministic(tokenizer):
    """Training twice gives the same tokenizer; the end of a document is id 0."""
    again = train_tokenizer(["def f(x):\n    return x\n" * 20, "class A:\n    pass\n"], vocab_size=300)
    assert again.to_str() == tokenizer.to_str()
    assert end_of_text_id(tokenizer) == 0 and tokenizer.get_vocab_size() <= 300


def test_small_vocabulary_is_refused():
    """Fewer entries than bytes cannot be lossless."""
    with pytest.raises(ConfigError, match="at least 257"):
        train_tokenizer(["x"], vocab_size=100)


def test_stream_ends_every_file(tokenizer):
    """Each file is followed by the end token, and progress counts files."""
    seen = []
    stream = encode_files(tokenizer, ["a", "bc"] * 50, lambda done, total: seen.append((done, total)))
    assert stream.dtype == np.int32 and (stream == 0).sum() == 100 and seen[-1] == (100, 100)
    assert tokenizer.id_to_token(int(stream[-1])) == END_OF_TEXT


def test_batches_are_windows_and_their_continuation():
    """Labels are the tokens one place on."""
    batch = Batches(np.arange(1000, dtype=np.int32), batch=4, context=16).at(3)
    assert batch["tokens"].shape == (4, 16)
    np.testing.assert_array_equal(batch["labels"], batch["tokens"] + 1)


def test_every_window_once_per_epoch():
    """An epoch visits every window exactly once, also when a batch straddles two epochs."""
    data = Batches(np.arange(101, dtype=np.int32), batch=3, context=10, seed=5)
    starts = np.concatenate([data.at(step)["tokens"][:, 0] for step in range(10)])
    for epoch in range(3):
        assert sorted(starts[epoch * 10 : (epoch + 1) * 10]) == list(range(0, 100, 10))
    assert list(starts[:10]) != list(starts[10:20])


def test_batches_depend_on_step_and_seed_only():
    """Any step can be asked for at any time."""
    stream = np.arange(5000, dtype=np.int32)
    forward = [Batches(stream, 4, 16).at(step)["tokens"] for step in range(50)]
    data = Batches(stream, 4, 16)
    for step in (49, 3, 17):
        np.testing.assert_array_equal(data.at(step)["tokens"], forward[step])
    assert not np.array_equal(Batches(stream, 4, 16, seed=1).at(0)["tokens"], forward[0])


def test_too_little_data_is_refused():
    """Less than one window of text is one clear error."""
    with pytest.raises(ConfigError, match="at least context"):
        Batches(np.arange(10, dtype=np.int32), 1, 16)
