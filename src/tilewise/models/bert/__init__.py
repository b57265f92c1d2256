"""BERT encoders: configuration, graphs, sharding of dims, names of tensors in files."""

from tilewise.models.bert.bert_config import BertConfig
from tilewise.models.bert.model import encoding_parts, training_parts
from tilewise.models.bert.weights import file_layout, parameter_shapes
from tilewise.models.family import Family

__all__ = [
    "FAMILY",
    "BertConfig",
    "encoding_parts",
    "file_layout",
    "parameter_shapes",
    "training_parts",
]

FAMILY = Family(
    BertConfig,
    file_layout,
    parameter_shapes,
    lambda config: config.max_position_embeddings,
    lambda config: config.max_position_embeddings,
    lambda config, itemsize, kv_cache_dtype: 0,
    training_parts,
    encoding=encoding_parts,
)
