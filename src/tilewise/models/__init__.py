"""Model families, one folder each. `open(directory)` says what a Hugging Face directory holds, of whichever family.

A family's folder says everything about it: what its configuration file may ask for, what its tensors are called in
files. All decoders share one graph (`models/decoder/`), made from what a configuration chooses; a family that computes
something else has a graph of its own. Nothing outside the folder knows the family's names.
"""

from tilewise.models.config import ModelConfig, config_content
from tilewise.models.decoder.model import BLOCK_SIZE
from tilewise.models.layout import FileLayout
from tilewise.models.registry import (
    FAMILIES,
    build_decoding_graph,
    build_encoding_graph,
    build_training_graph,
    config_from_dict,
    default_context,
    file_layout,
    is_encoder,
    kv_elements_per_token,
    max_context,
    num_parameters,
    open,
    open_weights,
    parameter_shapes,
    stored_tensors,
)

__all__ = [
    "BLOCK_SIZE",
    "FAMILIES",
    "FileLayout",
    "ModelConfig",
    "build_decoding_graph",
    "build_encoding_graph",
    "build_training_graph",
    "config_content",
    "config_from_dict",
    "default_context",
    "file_layout",
    "is_encoder",
    "kv_elements_per_token",
    "max_context",
    "num_parameters",
    "open",
    "open_weights",
    "parameter_shapes",
    "stored_tensors",
]
