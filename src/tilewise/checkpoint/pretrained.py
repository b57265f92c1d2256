"""Writes a Hugging Face directory: config.json, generation_config.json, tokenizer files, weights.

`transformers` opens such directories. Everything is written to a hidden directory that is renamed
at the end, so a directory of the final name is always complete. The module knows no model families:
configurations are dictionaries, and tensors have the names of the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.checkpoint.companions import (
    CODE,
    CONFIG,
    GENERATION,
    MODULES,
    TEMPLATES,
    TOKENIZER,
    read_companions,
)
from tilewise.checkpoint.files import replace_directory
from tilewise.checkpoint.quantised_files import QUANTISATION_KEYS
from tilewise.checkpoint.shards import MAX_SHARD_BYTES, write_weights
from tilewise.checkpoint.tensors import Tensor
from tilewise.core import CheckpointError, Validator
from tilewise.files.reading import Unreadable, plain_json
from tilewise.files.writing import writing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["model_files", "save_model_directory", "save_pretrained"]

_validate = Validator("checkpoint", CheckpointError)


def save_pretrained(
    directory: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    *,
    copy_from: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model so that `transformers` and Tilewise can open it. An existing directory is
    replaced.

    Args:
        config: content of config.json.
        tensors: arrays by their names in files. Lazy tensors (`store_parameters`) are fetched one
            by one.
        tokenizer: the tokenizer, written as tokenizer.json with a tokenizer_config.json.
        generation_config: defaults of generation, for example `{"eos_token_id": 0}`.
        copy_from: a model directory whose other files are copied unchanged (see `model_files`).
        max_shard_bytes: maximum size of a file of weights. Larger weights are written to several
            files with an index.

    Raises:
        CheckpointError: a file of `copy_from` cannot be read.
        ResourceError: the directory cannot be written. An existing directory is kept.
    """
    path = _validate.path("save_pretrained", "a directory", directory)
    config = _validate.json("save_pretrained", "config", config)
    files = model_files(config, tokenizer, generation_config, copy_from=copy_from)
    save_model_directory(path, files, tensors, max_shard_bytes=max_shard_bytes)


def save_model_directory(
    directory: Path,
    files: Mapping[str, bytes],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model from the content of its files and its weights, as `save_pretrained` does.

    Args:
        directory: the directory to create or replace.
        files: content of the files by name, from `model_files`.
        tensors: as for `save_pretrained`.
        max_shard_bytes: as for `save_pretrained`.

    Raises:
        ResourceError: the directory cannot be written. An existing directory is kept.
    """

    def write(temporary: Path) -> None:
        for name, content in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(content)
        write_weights(temporary, tensors, max_shard_bytes)

    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
    replace_directory(directory, write)


def model_files(
    config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    *,
    copy_from: str | Path | None = None,
) -> dict[str, bytes]:
    """The content of all files of a Hugging Face directory except weights, by name.

    Args:
        config: content of config.json; None to copy the file of `copy_from`.
        tokenizer: becomes tokenizer.json with a tokenizer_config.json; None to copy the files of
            `copy_from`.
        generation_config: content of generation_config.json; None to copy the file of `copy_from`.
        copy_from: a model directory whose other files are copied byte by byte: tokenizer, chat
            templates, pooling of an encoder, code that config.json names.

    Raises:
        CheckpointError: a file of `copy_from` cannot be read, or an argument has the wrong type.
    """
    call, made = "save_pretrained", dict[str, bytes]()
    if config is not None:
        made[CONFIG] = _json(_unquantised(config))
    if generation_config is not None:
        made[GENERATION] = _json(_validate.json(call, "generation_config", generation_config))
    if tokenizer is not None:
        from tokenizers import Tokenizer

        _validate.instance(call, "a tokenizer", tokenizer, Tokenizer, "pass what load_tokenizer returned")
        made["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
        made["tokenizer_config.json"] = _json(_tokenizer_config(config or {}, tokenizer))
    if copy_from is None:
        return made
    own = () if tokenizer is not None else TOKENIZER
    source = _validate.path(call, "a model directory", copy_from)
    patterns = [name for name in (CONFIG, GENERATION) if name not in made]
    copied = read_companions(source, (*patterns, *own, *TEMPLATES, *MODULES, CODE))
    with suppress(Unreadable):  # invalid files are copied as they are
        content = plain_json(copied.get(CONFIG, b""))
        if isinstance(content, dict) and content != _unquantised(content):
            copied = {**copied, CONFIG: _json(_unquantised(content))}
    return {**copied, **made}


def _unquantised(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json without the quantisation of the weights that it was copied with."""
    return {key: value for key, value in config.items() if key not in QUANTISATION_KEYS}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _tokenizer_config(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    eos = config.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) else eos
    name = None if eos is None else tokenizer.id_to_token(eos)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.get("max_position_embeddings", 2048),
        "clean_up_tokenization_spaces": False,
        "eos_token": name,
    }
