"""The small files of a model directory beside config.json and weights: tokenizer, chat templates, how an encoder pools.

Owns their names, and the reading of them as they are, to be written elsewhere; what they mean is other modules' to
know. Refuses what is no regular file, and what is larger than its kind ever is.
"""

from __future__ import annotations

import os
from pathlib import Path

from tilewise.core import CheckpointError
from tilewise.core.reading import Unreadable, read_whole

__all__ = ["GENERATION", "MODULES", "TEMPLATES", "TEMPLATE_FOLDER", "TOKENIZER", "read_companions"]

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
)
TEMPLATE_FOLDER = "additional_chat_templates"
TEMPLATES = ("chat_template.jinja", f"{TEMPLATE_FOLDER}/*.jinja")
MODULES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
_MAX_BYTES = 512 << 20
_MAX_TEMPLATES = 100


def read_companions(directory: Path, patterns: tuple[str, ...]) -> dict[str, bytes]:
    """The files of a directory that have one of these names; no file is no mistake.

    Args:
        directory: of a model.
        patterns: of the names above.

    Raises:
        CheckpointError: one cannot be read.
    """
    found: dict[str, bytes] = {}
    for pattern in patterns:
        if "*" in pattern:
            names = [
                f"{TEMPLATE_FOLDER}/{path.name}" for path in sorted(directory.glob(pattern))[:_MAX_TEMPLATES]
            ]
        else:
            names = [pattern] if os.path.lexists(directory / pattern) else []
        for name in names:
            try:
                found[name] = read_whole(directory / name, _MAX_BYTES)
            except Unreadable as error:
                raise CheckpointError(
                    f"[checkpoint.read_companions] files of a model must be readable; got {str(directory / name)!r}: "
                    f"{error}; repair it, or move it away"
                ) from None
    return found
