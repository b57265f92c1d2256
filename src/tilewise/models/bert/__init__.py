"""BERT encoders: what their configurations ask for, their graphs, what cuts them, their files' names."""

from tilewise.models.bert.config import BertConfig
from tilewise.models.bert.model import build_encoding_graph, build_training_graph
from tilewise.models.bert.weights import file_layout, parameter_shapes
from tilewise.models.family import Family

__all__ = [
    "FAMILY",
    "BertConfig",
    "build_encoding_graph",
    "build_training_graph",
    "file_layout",
    "parameter_shapes",
]

FAMILY = Family(
    BertConfig,
    file_layout,
    parameter_shapes,
    lambda config: config.max_position_embeddings,
    lambda config: config.max_position_embeddings,
    lambda config: 0,
    build_training_graph,
    encoding=build_encoding_graph,
)
