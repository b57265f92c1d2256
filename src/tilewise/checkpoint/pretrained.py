"""A Hugging Face directory: config.json, generation_config.json, tokenizer files, weights.

`transformers` opens what is written here. Written into a hidden directory and renamed, so that a directory of
that name is always whole. Knows nothing of model families: configurations arrive as dictionaries, names as
files spell them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from tilewise.checkpoint.files import replace_directory
from tilewise.checkpoint.weights import write_weights
from tilewise.core import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["load_generation_config", "load_tokenizer", "save_pretrained"]


def save_pretrained(
    directory: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, NDArray[Any]]],
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a model so that `transformers` and Tilewise can open it; an older directory of that name is
    replaced.

    Args:
        config: content of config.json.
        tensors: names as files spell them, and arrays; consumed one after the other.
        tokenizer: written as tokenizer.json with a tokenizer_config.json.
        generation_config: defaults of generation, for example `{"eos_token_id": 0}`.
    """

    def write(temporary: Path) -> None:
        _write_json(temporary / "config.json", config)
        if generation_config is not None:
            _write_json(temporary / "generation_config.json", generation_config)
        if tokenizer is not None:
            tokenizer.save(str(temporary / "tokenizer.json"))
            _write_json(temporary / "tokenizer_config.json", _tokenizer_config(config, tokenizer))
        write_weights(temporary, tensors)

    path = Path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_directory(path, write)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a model directory.

    Raises:
        CheckpointError: there is no tokenizer.json, or it cannot be read.
    """
    from tokenizers import Tokenizer

    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            "[checkpoint.load_tokenizer] a model directory must hold tokenizer.json; got "
            f"{str(directory)!r}; "
            "give a directory that has one"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"[checkpoint.load_tokenizer] tokenizer.json must be readable; got {path}: {error}; "
            "download it again"
        ) from None


def load_generation_config(directory: str | Path) -> dict[str, Any]:
    """The content of generation_config.json; empty when there is none.

    Raises:
        CheckpointError: the file is not JSON.
    """
    path = Path(directory) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"[checkpoint.load_generation_config] the file must be JSON; got {path}: {error}; "
            "repair or remove it"
        ) from None


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
