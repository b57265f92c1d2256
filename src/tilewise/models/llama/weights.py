"""Names and shapes of a Llama model's parameters, in graphs and in Hugging Face files.

Owns the two spellings and nothing else: reading and writing files is `tilewise.checkpoint`'s business. A
graph says `layers.3.mlp.up_proj.weight`, a file says `model.layers.3.mlp.up_proj.weight`; only
`lm_head.weight` is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewise.core.errors import CheckpointError
from tilewise.models.llama.config import LlamaConfig

__all__ = ["file_name", "parameter_shapes", "rename_from_files"]

_HEAD = "lm_head.weight"
_PREFIX = "model."


def parameter_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter's name in the graph and its shape `[out, in]`, in the order of the forward pass.

    A tied head has no entry of its own.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    yield "embed_tokens.weight", (config.vocab_size, hidden)
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
    """The tensors of a file under the graph's names, checked against the configuration; nothing is read yet.

    A stored copy of a tied head is ignored.

    Raises:
        CheckpointError: a parameter is missing or has another shape; names it.
    """
    sources: dict[str, str] = {}
    for name, shape in parameter_shapes(config):
        stored = next((key for key in (file_name(name), name) if key in tensors), None)
        if stored is None:
            raise CheckpointError(
                f"[models.llama] the file must hold every parameter; got none called {file_name(name)!r}; "
                "check that config.json and the weights belong together"
            )
        if tuple(tensors[stored].shape) != shape:
            raise CheckpointError(
                f"[models.llama] {stored!r} must have the shape that config.json asks for, {list(shape)}; "
                f"got {list(tensors[stored].shape)}; check that the two belong together"
            )
        sources[name] = stored
    return _Renamed(tensors, sources)


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
