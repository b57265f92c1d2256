"""Llama: configuration, graph, sharding, weight names."""

from tilewise.models.llama.config import LlamaConfig
from tilewise.models.llama.model import build_decoding_graph, build_training_graph

__all__ = ["LlamaConfig", "build_decoding_graph", "build_training_graph"]
