"""The files next to the weights in a model directory: configuration, tokenizer, chat templates,
pooling of encoders.

This module knows the names of these files, and reads them as bytes, which are copied unchanged to
other directories. Other modules interpret the files. Files that are not regular, or larger than
files of their kind can be, are rejected.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tilewise.core import CheckpointError
from tilewise.files.reading import Unreadable, read_whole

__all__ = ["CODE", "CONFIG", "GENERATION", "MODULES", "TEMPLATES", "TOKENIZER", "read_companions"]

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


def read_companions(directory: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    """The content of the files of a directory with matching names, by name.

    Args:
        directory: directory of a model.
        patterns: patterns of file names. A pattern may match no file.

    Raises:
        CheckpointError: a file cannot be read.
    """
    contents: dict[str, bytes] = {}
    for pattern in patterns:
        if "*" in pattern:
            paths = sorted(directory.glob(pattern))[:_MAX_FILES]
            names = [path.relative_to(directory).as_posix() for path in paths]
        else:
            names = [pattern] if os.path.lexists(directory / pattern) else []
        for name in names:
            try:
                contents[name] = read_whole(directory / name, _MAX_BYTES)
            except Unreadable as error:
                raise CheckpointError(
                    f"[checkpoint.read_companions] files of a model must be readable; got {str(directory / name)!r}: "
                    f"{error}; repair it, or move it away"
                ) from None
    return contents
