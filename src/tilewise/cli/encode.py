"""`tilewise encode`: writes vectors to standard output as lines of JSON, or to a file as one array."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tilewise.cli.before_work import before_work
from tilewise.core import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["encode_texts"]


def encode_texts(
    model_dir: Path,
    texts: Sequence[str] | None,
    out: Path | None,
    *,
    pooling: str,
    normalize: bool | None,
    truncate: bool,
    batch: int,
    tp: int,
    dtype: str,
    console: Console,
    ignore: Sequence[str] = (),
) -> None:
    """Encode `texts`, or the lines of standard input without `texts`.

    Args:
        model_dir: a Hugging Face directory of an encoder.
        texts: texts to encode; None or empty to read the lines of standard input, without empty
            lines.
        out: a file for the array; None to write lines of JSON to standard output.
        pooling: `mean`, `cls`, or `auto` for the setting in the directory.
        normalize: whether vectors are scaled to length one; None for the setting in the directory.
        truncate: whether long texts are truncated; otherwise they are errors.
        batch: number of texts per call.
        tp: number of devices that share every layer.
        dtype: dtype of weights and activations.
        console: shows progress.
        ignore: fields of config.json to ignore.

    Raises:
        ConfigError, CheckpointError, LayoutError: the model or an argument is invalid. Raised
            before any work.
        NotFinite: the model's result for a text is not finite.
        ResourceError: the file cannot be written.
    """
    from tilewise.checkpoint import check_replaceable, check_writable
    from tilewise.encode import POOLINGS, Encoder, load_pooling
    from tilewise.files.writing import replace_file, writing
    from tilewise.train import track_work

    if pooling not in (*POOLINGS, "auto"):
        raise ConfigError(
            f"[cli.encode] --pooling must be auto, {' or '.join(POOLINGS)}; got {pooling!r}; choose one"
        )
    if out is not None:
        check_writable(out.parent)
        check_replaceable(out, is_directory=False)
    way = load_pooling(model_dir)
    way = way if pooling == "auto" else replace(way, mode=pooling)
    way = way if normalize is None else replace(way, normalize=normalize)
    with before_work():
        encoder = Encoder(
            model_dir,
            tp=tp,
            dtype=dtype,
            pooling=way,
            batch=batch,
            truncate=truncate,
            ignore_config_fields=ignore,
        )
    with encoder:
        text_list = list(texts) if texts else _lines()
        if not text_list:
            raise ConfigError(
                "[cli.encode] there must be texts; got none; pass texts, or lines on standard input"
            )
        with track_work(console, "texts") as progress:
            vectors = encoder.encode(text_list, progress.show)
    if out is None:
        for text, vector in zip(text_list, vectors):
            print(json.dumps({"text": text, "embedding": [float(x) for x in vector]}, ensure_ascii=False))
        return
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, lambda path: _save(path, vectors))


def _save(path: Path, vectors: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, vectors)


def _lines() -> list[str]:
    """Lines of standard input."""
    return [line.rstrip("\n") for line in sys.stdin if line.strip()]
