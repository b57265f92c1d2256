"""Recognizes files of llama.cpp's format GGUF, which Tilewise does not load, and says how to convert them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tilewise.core import ConfigError
from tilewise.core.reading import Unreadable, open_regular

__all__ = ["refuse_gguf"]

_MAGIC = b"GGUF"


def refuse_gguf(path: Path) -> None:
    """Refuse a GGUF file, and a directory whose weights are GGUF files alone.

    Args:
        path: what was given as a model, or as a file of weights.

    Raises:
        ConfigError: it is one; says how to convert it.
    """
    file = _gguf_file(path)
    if file is None:
        return
    # transformers refuses to save what it has read from GGUF until its quantizer is removed
    program = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"d, f = {str(file.parent)!r}, {file.name!r}; "
        "m = M.from_pretrained(d, gguf_file=f, dtype='bfloat16'); "
        "m.hf_quantizer = None; vars(m.config).pop('quantization_config', None); "
        "[x.save_pretrained('converted') for x in (m, T.from_pretrained(d, gguf_file=f))]"
    )
    raise ConfigError(
        f"[checkpoint.gguf] GGUF files are not loaded, only Hugging Face directories with safetensors; got "
        f"{str(file)!r}; give the safetensors that it was made from, or dequantize it with transformers (pip install "
        f'torch transformers gguf): python -c "{program}"'
    )


def _gguf_file(path: Path) -> Path | None:
    if not os.path.isdir(path):
        return path if _is_gguf(path) else None
    with suppress(OSError):
        names = sorted(os.listdir(path))
        if not any(name.endswith((".safetensors", ".bin", ".pt", ".pth")) for name in names):
            return next((path / name for name in names if name.lower().endswith(".gguf")), None)
    return None


def _is_gguf(path: Path) -> bool:
    """Whether a file has GGUF's first bytes; one that cannot be read, by its name."""
    with suppress(Unreadable, OSError), open_regular(path) as stream:
        return stream.read(len(_MAGIC)) == _MAGIC
    return path.suffix.lower() == ".gguf" and os.path.lexists(path)
