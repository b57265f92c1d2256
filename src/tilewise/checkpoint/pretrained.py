"""A Hugging Face directory: writing it, and its tokenizer.

`transformers` opens what is written here. Written into a hidden directory and renamed, so that a directory of
that name is always whole. Knows nothing of model families: configurations arrive as dictionaries, names as
files spell them. Refuses tokenizers and token ids that do not fit the model's vocabulary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from tilewise.checkpoint.files import replace_directory
from tilewise.checkpoint.shards import MAX_SHARD_BYTES, write_weights
from tilewise.checkpoint.tensors import Tensor
from tilewise.core import Border, CheckpointError
from tilewise.core.border import shown
from tilewise.core.reading import Unreadable, parse_json, read_whole, refusals_of, validate_json
from tilewise.core.writing import writing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["load_tokenizer", "save_pretrained"]

_MAX_TOKENIZER_BYTES = 512 << 20
_MAX_VOCABULARY = 1 << 31
_border = Border("checkpoint", CheckpointError)


class _Subwords(BaseModel):
    """What the tokens of a model begin with that stand inside a word; some models have it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    continuing_subword_prefix: str | None = None


class _TokenizerFile(BaseModel):
    """tokenizer.json is the library's to read; here it is held to be a JSON object that does not nest without end."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: _Subwords | None = None


class _Merges(_Subwords):
    """Pairs of tokens that become one: lists of two, or texts with a space between, as older files have them."""

    merges: list[tuple[str, str] | str] = Field(default_factory=list)


class _MergingFile(_TokenizerFile):
    """tokenizer.json of a model with merges."""

    model: _Merges


def save_pretrained(
    directory: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model so that `transformers` and Tilewise can open it; an older directory of that name is
    replaced.

    Args:
        config: content of config.json.
        tensors: names as files spell them, and arrays; lazy ones (`store_parameters`) are fetched one after the other.
        tokenizer: written as tokenizer.json with a tokenizer_config.json.
        generation_config: defaults of generation, for example `{"eos_token_id": 0}`.
        max_shard_bytes: of a file of weights; more are spread over several with an index.

    Raises:
        ResourceError: it cannot be written; what stood there is kept.
    """

    def write(temporary: Path) -> None:
        _write_json(temporary / "config.json", config)
        if generation_config is not None:
            _write_json(temporary / "generation_config.json", generation_config)
        if tokenizer is not None:
            (temporary / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
            _write_json(temporary / "tokenizer_config.json", _tokenizer_config(config, tokenizer))
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
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_directory(path, write)


def load_tokenizer(directory: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model directory.

    What its file says of truncation and padding is left aside, as transformers does: a prompt is encoded as it is.

    Args:
        vocab_size: of the model; a tokenizer may know fewer tokens, never more.

    Raises:
        CheckpointError: there is no tokenizer.json, it cannot be read, or makes ids that the model does not have.
    """
    path = _border.path("load_tokenizer", "a model directory", directory) / "tokenizer.json"
    vocab_size = _border.integer("load_tokenizer", "vocab_size", vocab_size, 1, _MAX_VOCABULARY)
    if not os.path.lexists(path):
        raise CheckpointError(
            f"[checkpoint.load_tokenizer] a model directory must hold tokenizer.json; got {str(directory)!r}; "
            "give a directory that has one"
        )
    try:
        tokenizer = _parse_tokenizer(read_whole(path, _MAX_TOKENIZER_BYTES))
    except Unreadable as error:
        raise CheckpointError(
            f"[checkpoint.load_tokenizer] tokenizer.json must be readable; got {str(path)!r}: {error}; "
            "download it again"
        ) from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise CheckpointError(
            "[checkpoint.load_tokenizer] the tokenizer's ids must lie below config.json's vocab_size; got id "
            f"{largest} with vocab_size {vocab_size} in {str(directory)!r}; check that the two belong together"
        )
    return tokenizer


def _parse_tokenizer(content: bytes) -> Tokenizer:
    """A tokenizer that encodes whole texts as they are.

    Raises:
        Unreadable: the library refuses the content, or comes to grief over it.
    """
    from tokenizers import Tokenizer

    found = parse_json(content, _TokenizerFile).model
    if found is not None and found.continuing_subword_prefix:
        _check_merges(content)
    with refusals_of("tokenizers"):
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")  # a template of tokens that are not there shows here
    return tokenizer


def _check_merges(content: bytes) -> None:
    """The right side of every merge begins with the prefix: the library cuts off as many bytes without looking, in the
    middle of a character too, and then ends the whole process over text that is not UTF-8.

    Raises:
        Unreadable: one does not.
    """
    model = validate_json(content, _MergingFile).model
    prefix = model.continuing_subword_prefix or ""
    for merge in model.merges:
        right = merge[1] if isinstance(merge, tuple) else merge.partition(" ")[2]
        if not right.startswith(prefix):
            raise Unreadable(f"merge {shown(merge)} does not go on with the prefix {shown(prefix)}")


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
