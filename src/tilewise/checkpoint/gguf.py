"""Recognizes files of llama.cpp's format GGUF, which Tilewise does not load, and says how to convert them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tilewise.core import ConfigError
from tilewise.files.reading import Unreadable, open_regular

__all__ = ["refuse_gguf"]

_MAGIC = b"GGUF"
_LFS_POINTER = b"vers"  # of b"version https://git-lfs.github.com/spec/v1"


def refuse_gguf(path: Path) -> None:
    """Reject a GGUF file, and a directory with GGUF files as its only weights.

    Args:
        path: a path given as a model, or as a file of weights.

    Raises:
        ConfigError: there is a GGUF file; the message says how to convert it. Or a file is named
            .gguf but has another format.
    """
    file = _gguf_file(path)
    if file is None:
        return
    begin = _first_bytes(file)
    if begin is not None and begin != _MAGIC:
        is_pointer = begin == _LFS_POINTER
        advice = (
            "it is a Git LFS pointer: run git lfs pull"
            if is_pointer
            else "the download is damaged or truncated: repeat it"
        )
        raise ConfigError(
            f"[checkpoint.gguf] a .gguf file must begin with {_MAGIC!r}; got {begin!r} in {str(file)!r}; {advice}"
        )
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
        f"{str(file)!r}; give the safetensors files it was made from, or dequantize it with transformers (pip install "
        f'torch transformers gguf): python -c "{program}"'
    )


def _gguf_file(path: Path) -> Path | None:
    """The path, if it is a file with GGUF's magic number or suffix. For a directory without other
    weights, the first such file in it. Otherwise None.
    """
    if not os.path.isdir(path):
        is_named = path.suffix.lower() == ".gguf" and os.path.lexists(path)
        return path if is_named or _first_bytes(path) == _MAGIC else None
    with suppress(OSError):
        names = sorted(os.listdir(path))
        if not any(name.endswith((".safetensors", ".bin", ".pt", ".pth")) for name in names):
            return next((path / name for name in names if name.lower().endswith(".gguf")), None)
    return None


def _first_bytes(path: Path) -> bytes | None:
    """The bytes at the place of the magic number; None if the file cannot be read."""
    with suppress(Unreadable, OSError), open_regular(path) as stream:
        return stream.read(len(_MAGIC))
    return None
