"""Names and shapes of a Llama model's parameters, in graphs and in Hugging Face files.

Owns the two spellings and nothing else: reading and writing files is `tilewise.checkpoint`'s business. A
graph says `layers.3.mlp.up_proj.weight`, a file says `model.layers.3.mlp.up_proj.weight`; only
`lm_head.weight` is the same. Refuses files that hold less than the configuration asks for, or more: layers left out
without a word would be another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tilewise.core.border import shown
from tilewise.core.dtypes import is_float
from tilewise.core.errors import CheckpointError
from tilewise.models.llama.config import LlamaConfig

__all__ = ["file_name", "parameter_shapes", "rename_from_files"]

_HEAD = "lm_head.weight"
_PREFIX = "model."
_EMBEDDING = "embed_tokens.weight"
# Buffers that older versions of transformers stored: RoPE's frequencies, which follow from config.json.
_DERIVED = re.compile(r"(model\.)?(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")
_ROWS_COMPARED = 4096


def parameter_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter's name in the graph and its shape `[out, in]`, in the order of the forward pass.

    A tied head has no entry of its own.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    yield _EMBEDDING, (config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield _HEAD, (config.vocab_size, hidden)


def file_name(name: str) -> str:
    """The name in files of a parameter of the graph."""
    return name if name == _HEAD else _PREFIX + name


def rename_from_files(tensors: Mapping[str, Any], config: LlamaConfig) -> Mapping[str, Any]:
    """The tensors of a file under the graph's names, checked against the configuration.

    Nothing is read yet but a stored copy of a tied head, which must be a copy.

    Raises:
        CheckpointError: a parameter is missing, has another shape or is stored as integers, or a tensor is none of the
            configuration's; names it.
    """
    sources: dict[str, str] = {}
    for name, shape in parameter_shapes(config):
        stored = next((key for key in (file_name(name), name) if key in tensors), None)
        if stored is None:
            raise CheckpointError(
                f"[models.llama] the file must hold every parameter; got none called {file_name(name)!r}; "
                "check that config.json and the weights belong together"
            )
        _check_tensor(stored, tensors[stored], shape)
        sources[name] = stored
    rest = set(tensors) - set(sources.values())
    if config.tie_word_embeddings and _HEAD in rest:
        _check_tied(tensors[_HEAD], tensors[sources[_EMBEDDING]])
        rest.remove(_HEAD)
    unknown = sorted(name for name in rest if not _DERIVED.fullmatch(name))
    if unknown:
        raise CheckpointError(
            f"[models.llama] the file must hold no more than config.json describes; got {shown(unknown[0])} and "
            f"{len(unknown) - 1} more tensors that are not the model's; check num_hidden_layers and the other sizes, "
            "and that config.json and the weights belong together"
        )
    return _Renamed(tensors, sources)


def _check_tensor(name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"[models.llama] {name!r} must have the shape that config.json asks for, {list(shape)}; "
            f"got {list(tensor.shape)}; check that the two belong together"
        )
    if not is_float(tensor.dtype):
        raise CheckpointError(
            f"[models.llama] {name!r} must be stored as floating-point numbers; got {tensor.dtype}; quantized weights "
            "are not supported, give the original ones"
        )


def _check_tied(head: Any, embedding: Any) -> None:
    """A stored head of a tied model must be the embedding: transformers 4 uses the embedding for both, transformers 5
    the head as it is stored, so another head has no one meaning."""
    same = head.shape == embedding.shape and head.dtype == embedding.dtype
    for first in range(0, len(head) if same else 0, _ROWS_COMPARED):
        rows = slice(first, first + _ROWS_COMPARED)
        same = same and np.array_equal(head[rows].view(np.uint8), embedding[rows].view(np.uint8))
    if not same:
        raise CheckpointError(
            f"[models.llama] {_HEAD!r} must equal the embedding when tie_word_embeddings is true; got another; set "
            "tie_word_embeddings to false to use it, or remove it from the file"
        )


class _Renamed(Mapping[str, Any]):
    """A view of `tensors` under other names; stays lazy."""

    def __init__(self, tensors: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._sources = sources

    def __getitem__(self, name: str) -> Any:
        return self._tensors[self._sources[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
