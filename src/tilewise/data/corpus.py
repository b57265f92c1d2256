"""The files of a corpus, and their split into training and held-out files.

A corpus is the source of the running Python's standard library without its tests, or the files of a
path. A hash of a file's relative path decides whether it is held out. So the split does not depend
on the machine, the order of directories or other files. `text_files` reads and cuts the files. Of
structured files, `records` reads the objects; a field of each is a text. In a directory with plain
text, structured files are skipped, like binary files, because they are more often about the texts
than texts of their own. One line reports how many files were skipped. A path without readable text
is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewise.core import ConfigError, Validator, get_logger
from tilewise.core.validation import shown
from tilewise.data.records import (
    COMPRESSED,
    check_memory,
    has_pattern,
    is_record_file,
    is_structured,
    matching,
    read_records,
)
from tilewise.data.text_files import read_pieces, read_text
from tilewise.files.reading import Unreadable

__all__ = ["Corpus", "TextFile", "is_held_out", "load_corpus", "load_standard_library"]

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_LONG_FILE_BYTES = 16 << 20
_NAMES_SHOWN = 3
_validate = Validator("data")


@dataclass(frozen=True)
class TextFile:
    """One file: its path relative to the corpus root (with `/`), and its text."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class Corpus:
    """Training files and held-out files, both sorted by name."""

    train: tuple[TextFile, ...]
    held_out: tuple[TextFile, ...]

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the training files."""
        return sum(file.num_bytes for file in self.train)


def is_held_out(name: str, percent: float = 5.0) -> bool:
    """Whether the file with this relative path is held out: `percent` of all names, by SHA-256."""
    percent = _validate.number("corpus", "the held-out share in percent", percent, 0.0, 100.0)
    # a name that is not UTF-8 counts as its bytes
    value = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")
    return value < percent / 100.0 * 2.0**64


def load_standard_library(held_out_percent: float = 5.0) -> Corpus:
    """The standard library's sources on this machine, without tests and installed packages.

    Raises:
        ConfigError: this Python has no readable sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in root.rglob("*.py") if not _SKIPPED.intersection(p.relative_to(root).parts[:-1]))
    return _load(root, files, held_out_percent)


def load_corpus(path: str | Path, held_out_percent: float = 5.0, field_text: str = "text") -> Corpus:
    """The texts at `path`: one file, every readable UTF-8 file of a directory except hidden ones, or
    the files that match a pattern such as `texts/train-*.parquet`.

    A single text file, and a text file of more than 16 MiB in a directory, is divided at blank
    lines into pieces of about 8 KiB, which are treated as files so that some can be held out. Of a
    structured file (JSON lines, a JSON array, Parquet), a field of each record is a text. In a
    directory, structured files are read if there are no others. If the hash would hold out all of a
    few texts, the first one is used for training. A warning names plain files that look like JSON
    lines. One warning names what was skipped in a directory (structured data by its suffix, binary,
    not UTF-8, unreadable).

    Args:
        path: of the data.
        held_out_percent: share of the texts that are held out.
        field_text: name of the field with the text, in structured files.

    Raises:
        ConfigError: there is no such path, it is a compressed file or one that is not read, a
            record has no such field, there is no text, or more than fits in memory.
    """
    root = _validate.path("load_corpus", "data", path)
    if os.path.isfile(root):
        _require_readable(root)
        return _load(root, [root], held_out_percent, field_text)
    if os.path.isdir(root):
        return _load(root, _visible_files(root), held_out_percent, field_text)
    if has_pattern(root) and (files := matching(root)):
        return _load(root.parent, files, held_out_percent, field_text)
    raise ConfigError(f"[data.corpus] data must be a file or a directory; got {str(path)!r}; check the path")


def _require_readable(path: Path) -> None:
    """Reject a file that is neither plain text nor has records, by its suffix.

    Raises:
        ConfigError: the file is of another structured kind, or compressed.
    """
    if is_structured(path.name) and not is_record_file(path.name):
        raise ConfigError(
            f"[data.corpus] data must be plain text, JSON lines or Parquet; got the structured file {str(path)!r}; "
            "convert it to JSON lines"
        )
    if path.suffix.lower() in COMPRESSED and not is_record_file(path.name):
        raise ConfigError(
            f"[data.corpus] data must be plain text; got the compressed file {str(path)!r}; decompress it first"
        )


def _visible_files(root: Path) -> Iterator[Path]:
    """All regular files below `root` except hidden ones. Unreadable folders are included, so that
    they can be reported.
    """
    unreadable: list[str] = []
    for folder, folders, files in os.walk(root, onerror=lambda error: unreadable.append(error.filename)):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in files:
            if not name.startswith(".") and os.path.isfile(os.path.join(folder, name)):
                yield Path(folder, name)
    yield from map(Path, unreadable)


def _load(root: Path, files: Iterable[Path], percent: float, field_text: str = "text") -> Corpus:
    texts: list[TextFile] = []
    skipped: list[tuple[str, str]] = []
    named = {path.name if path == root else path.relative_to(root).as_posix(): path for path in files}
    of_records = all(map(is_structured, named))
    for name in sorted(filter(is_structured, named)):
        if not (of_records and is_record_file(name)):
            del named[name]
            skipped.append((name, "structured data"))
    sizes = {name: _size(path) for name, path in named.items()}
    check_memory(sum(sizes.values()), root)
    for name in sorted(named):
        try:
            if of_records:
                texts += _texts_of_records(name, named[name], field_text)
            else:
                in_pieces = root == named[name] or sizes[name] > _LONG_FILE_BYTES
                texts += _texts_of(name, named[name], in_pieces)
        except Unreadable as error:
            skipped.append((name, str(error)))
    held_out = tuple(file for file in texts if is_held_out(file.name, percent))
    train = tuple(file for file in texts if not is_held_out(file.name, percent))
    if not train and percent < 100:
        train, held_out = held_out[:1], held_out[1:]  # the hash held out all of a few texts
    if not of_records:
        _warn_of_json_lines(texts)
    left_out = f"{len(skipped)} files left out: {_summary(skipped)}" if skipped else ""
    if any(is_record_file(name) for name, _ in skipped):
        left_out += "; to read records, make their path or pattern a source of its own"
    if not train:
        raise ConfigError(
            f"[data.corpus] data must hold UTF-8 text to train on; got {len(texts)} text files in {str(root)!r}"
            f"{f' ({left_out})' if skipped else ''}; "
            + (
                "convert structured data to JSON lines or Parquet"
                if any(reason == "structured data" for _, reason in skipped)
                else "give another path"
            )
        )
    if skipped:
        get_logger("data").warning("%s", left_out)
    return Corpus(train, held_out)


def _warn_of_json_lines(texts: Sequence[TextFile]) -> None:
    """One warning about plain files with a JSON object on every line, because training text seldom
    looks like this.
    """
    names = list(dict.fromkeys(file.name.partition("#")[0] for file in texts if _is_json_lines(file.text)))
    if names:
        more = ", …" if len(names) > _NAMES_SHOWN else ""
        get_logger("data").warning(
            "%d files look like JSON lines and are learned character by character (%s%s): call them .jsonl, and "
            "a field of each line is read",
            len(names),
            ", ".join(shown(name) for name in names[:_NAMES_SHOWN]),
            more,
        )


def _is_json_lines(text: str) -> bool:
    """Two lines or more, each with a JSON object."""
    if not text.lstrip().startswith("{"):
        return False
    filled = [line for line in text.splitlines() if line.strip()]
    try:
        return len(filled) > 1 and all(isinstance(json.loads(line), dict) for line in filled)
    except (ValueError, RecursionError):
        return False


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0  # reading reports the reason


def _texts_of(name: str, path: Path, in_pieces: bool) -> list[TextFile]:
    """A file as a whole or in pieces; none if it is empty."""
    if in_pieces:
        return [TextFile(f"{name}#{i:06d}", piece) for i, piece in enumerate(read_pieces(path))]
    text = read_text(path)
    return [TextFile(name, text)] if text else []


def _texts_of_records(name: str, path: Path, field: str) -> list[TextFile]:
    """A field of each record; blank ones are left out, as empty files are."""
    texts = (TextFile(record.name, record.text(field)) for record in read_records(name, path, [field]))
    return [text for text in texts if text.text.strip()]


def _summary(skipped: list[tuple[str, str]]) -> str:
    """Reasons with their counts, and some names each."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in skipped:
        by_reason.setdefault(reason, []).append(name)
    parts = []
    for reason, names in by_reason.items():
        more = ", …" if len(names) > _NAMES_SHOWN else ""
        parts.append(
            f"{len(names)} {reason} ({', '.join(shown(name) for name in names[:_NAMES_SHOWN])}{more})"
        )
    return "; ".join(parts)
