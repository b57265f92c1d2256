"""The files next to the weights in a model directory: configuration, tokenizer, chat templates,
pooling of encoders. A GGUF file has the same content in its metadata (`checkpoint.gguf`).

This module knows the names of these files, and reads them as bytes, which are copied unchanged to
other directories. It is the only place where directories and GGUF files differ for their readers.
Other modules interpret the files. Files that are not regular, or larger than files of their kind can
be, are rejected.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tilewise.checkpoint.gguf import GgufModel, gguf_model
from tilewise.core import CheckpointError
from tilewise.files.reading import MAX_JSON_BYTES, Unreadable, read_whole

__all__ = [
    "CODE",
    "CONFIG",
    "GENERATION",
    "MODULES",
    "TEMPLATES",
    "TOKENIZER",
    "Companions",
    "open_companions",
    "read_companions",
]

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "tokenizer.model.v*",  # Mistral's
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "preprocessor_config.json",
    "processor_config.json",
)
TEMPLATES = ("chat_template.json", "*.jinja", "additional_chat_templates/*.jinja")
MODULES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
CODE = "*.py"
"""What `auto_map` in config.json names: never run and never downloaded, but copied with the files that name it."""
_MAX_BYTES = 512 << 20
_MAX_FILES = 100  # of one pattern


@dataclass(frozen=True)
class Companions:
    """The files next to a model's weights.

    Attributes:
        place: the model's directory, or its GGUF file.
        gguf: the opened GGUF file, whose metadata has the content of the files; None for a directory.
    """

    place: Path
    gguf: GgufModel | None

    def has(self, name: str) -> bool:
        """Whether there is a file of this name, of any kind."""
        return name in self.gguf.names if self.gguf is not None else os.path.lexists(self.place / name)

    def matching(self, pattern: str) -> list[str]:
        """Names of the files that match a pattern, at most 100."""
        if self.gguf is not None:
            return [name for name in self.gguf.names if fnmatchcase(name, pattern)]
        if "*" not in pattern:
            return [pattern] if self.has(pattern) else []
        paths = sorted(self.place.glob(pattern))[:_MAX_FILES]
        return [path.relative_to(self.place).as_posix() for path in paths]

    def read(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """The content of a file.

        Raises:
            Unreadable: it is not a regular file, or has more than `max_bytes`; or the metadata of the
                GGUF file is invalid.
        """
        return read_whole(self.place / name, max_bytes) if self.gguf is None else self.gguf.content(name)

    def called(self, name: str) -> str:
        """A file for messages: its path, or the GGUF file."""
        return repr(str(self.place / name if self.gguf is None else self.gguf.path))


def open_companions(place: Path) -> Companions:
    """The files next to the weights of a model directory or of a GGUF file.

    Args:
        place: the directory, the file, or a directory with one model in GGUF files. It need not exist.

    Raises:
        ConfigError, CheckpointError: as for `gguf_model`.
    """
    return Companions(place, gguf_model(place))


def read_companions(directory: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    """The content of the files of a model with matching names, by name.

    Args:
        directory: directory of a model, or a GGUF file.
        patterns: patterns of file names. A pattern may match no file.

    Raises:
        CheckpointError: a file cannot be read.
    """
    contents: dict[str, bytes] = {}
    files = open_companions(directory)
    for pattern in patterns:
        for name in files.matching(pattern):
            try:
                contents[name] = files.read(name, _MAX_BYTES)
            except Unreadable as error:
                raise CheckpointError(
                    f"[checkpoint.read_companions] files of a model must be readable; got {files.called(name)}: {error}"
                    "; repair it, or move it away"
                ) from None
    return contents
