"""Writing a Hugging Face directory: config.json, generation_config.json, tokenizer files, weights.

`transformers` opens what is written here. Written into a hidden directory and renamed, so that a directory of
that name is always whole. Knows nothing of model families: configurations arrive as dictionaries, names as
files spell them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.checkpoint.companions import GENERATION, MODULES, TEMPLATES, TOKENIZER, read_companions
from tilewise.checkpoint.files import replace_directory
from tilewise.checkpoint.shards import MAX_SHARD_BYTES, write_weights
from tilewise.checkpoint.tensors import Tensor
from tilewise.core import Border, CheckpointError
from tilewise.core.writing import writing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["save_pretrained"]

_border = Border("checkpoint", CheckpointError)


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
    """Write a model so that `transformers` and Tilewise can open it; an older directory of that name is
    replaced.

    Args:
        config: content of config.json.
        tensors: names as files spell them, and arrays; lazy ones (`store_parameters`) are fetched one after the other.
        tokenizer: written as tokenizer.json with a tokenizer_config.json.
        generation_config: defaults of generation, for example `{"eos_token_id": 0}`.
        copy_from: a model directory whose other files are copied as they are: chat templates, how an encoder pools, and
            tokenizer and generation_config.json where none are given here.
        max_shard_bytes: of a file of weights; more are spread over several with an index.

    Raises:
        CheckpointError: a file of `copy_from` cannot be read.
        ResourceError: it cannot be written; what stood there is kept.
    """

    def write(temporary: Path) -> None:
        _write_json(temporary / "config.json", config)
        if generation_config is not None:
            _write_json(temporary / "generation_config.json", generation_config)
        if tokenizer is not None:
            (temporary / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
            _write_json(temporary / "tokenizer_config.json", _tokenizer_config(config, tokenizer))
        for name, content in copied.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(content)
        write_weights(temporary, tensors, max_shard_bytes)

    path = _border.path("save_pretrained", "a directory", directory)
    _border.json("save_pretrained", "config", config)
    if generation_config is not None:
        _border.json("save_pretrained", "generation_config", generation_config)
    if tokenizer is not None:
        from tokenizers import Tokenizer

        _border.instance(
            "save_pretrained", "a tokenizer", tokenizer, Tokenizer, "pass what load_tokenizer returned"
        )
    copied: dict[str, bytes] = {}
    if copy_from is not None:
        own: tuple[str, ...] = () if tokenizer is not None else TOKENIZER
        own += () if generation_config is not None else (GENERATION,)
        source = _border.path("save_pretrained", "a model directory", copy_from)
        copied = read_companions(source, (*own, *TEMPLATES, *MODULES))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_directory(path, write)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
