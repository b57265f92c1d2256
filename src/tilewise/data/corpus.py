"""The files of a corpus and their split into training and held-out ones.

Owns the choice of files: the sources of the running Python's standard library without their tests, or what a
path names. A file is held out by a hash of its relative path, so the split does not depend on the machine,
the order of directories or other files. Refuses paths without readable text. Texts go to the tokenizer and to
evaluation.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tilewise.core import ConfigError

__all__ = ["Corpus", "TextFile", "is_held_out", "load_corpus", "load_standard_library"]

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_MAX_FILE_BYTES = 16 << 20


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
    """Files to train on and files to judge by; both sorted by name."""

    train: tuple[TextFile, ...]
    held_out: tuple[TextFile, ...]

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the training files."""
        return sum(file.num_bytes for file in self.train)


def is_held_out(name: str, percent: float = 5.0) -> bool:
    """Whether the file of that relative path is held out: `percent` of all names, by SHA-256."""
    value = int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "big")
    return value < percent / 100.0 * 2.0**64


def load_standard_library(held_out_percent: float = 5.0) -> Corpus:
    """The standard library's sources on this machine, without tests and installed packages.

    Raises:
        ConfigError: this Python has no readable sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in root.rglob("*.py") if not _SKIPPED.intersection(p.relative_to(root).parts[:-1]))
    return _split(root, files, held_out_percent)


def load_corpus(path: str | Path, held_out_percent: float = 5.0) -> Corpus:
    """The text files at `path`: one file, or every readable UTF-8 file of a directory without hidden ones.

    A single file is cut at blank lines into pieces of about 8 KiB that stand for files, so that some can be
    held out.

    Raises:
        ConfigError: there is no such path, or no text in it.
    """
    root = Path(path)
    if root.is_file():
        return _split_pieces(root, held_out_percent)
    if not root.is_dir():
        raise ConfigError(
            f"[data.corpus] data must be a file or a directory; got {str(path)!r}; check the path"
        )
    files = (p for p in root.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(root)))
    return _split(root, files, held_out_percent)


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.parts)


def _read(path: Path) -> str | None:
    """The text of a file; None when it is not UTF-8 text, empty, or too large to be a source."""
    try:
        if not 0 < path.stat().st_size <= _MAX_FILE_BYTES:
            return None
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text


def _split(root: Path, files: Iterable[Path], percent: float) -> Corpus:
    named = {path.relative_to(root).as_posix(): path for path in files}
    texts = [TextFile(name, text) for name in sorted(named) if (text := _read(named[name])) is not None]
    return _checked(texts, str(root), percent)


def _split_pieces(path: Path, percent: float) -> Corpus:
    text = _read(path) or ""
    pieces, part = [], ""
    for paragraph in text.split("\n\n"):
        part += paragraph + "\n\n"
        if len(part) >= 8192:
            pieces.append(part)
            part = ""
    pieces += [part] if part.strip() else []
    return _checked(
        [TextFile(f"{path.name}#{i:06d}", piece) for i, piece in enumerate(pieces)], str(path), percent
    )


def _checked(texts: list[TextFile], where: str, percent: float) -> Corpus:
    held_out = tuple(file for file in texts if is_held_out(file.name, percent))
    train = tuple(file for file in texts if not is_held_out(file.name, percent))
    if not train:
        raise ConfigError(
            f"[data.corpus] data must hold UTF-8 text to train on; got {len(texts)} text files in {where!r}; "
            "give another path"
        )
    return Corpus(train, held_out)
