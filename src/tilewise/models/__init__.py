"""Model families, one folder each. `open(directory)` returns the configuration of a Hugging Face
directory of any family.

A family's folder has everything that is specific to it: what its config.json may contain, and the
names of tensors in files. All decoders share one graph (`models/decoder/`), which a configuration
parametrizes. A family that computes something else has its own graph. No code outside of the folder
knows the family's names.

Names are imported when they are first used, so importing the package imports no family.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.models.decoder.model import BLOCK_SIZE
    from tilewise.models.layout import FileLayout
    from tilewise.models.lora import (
        LoadedAdapter,
        LoraLayout,
        StackedAdapters,
        load_adapter,
        lora_layout,
        merged_weights,
        stack_adapters,
    )
    from tilewise.models.model_config import ModelConfig, config_content
    from tilewise.models.parallel import ParallelModelBuilder
    from tilewise.models.parts import LayerUse, ModelParts
    from tilewise.models.registry import (
        FAMILIES,
        PURPOSES,
        build_decoding_graph,
        build_encoding_graph,
        build_training_graph,
        config_from_dict,
        default_context,
        file_layout,
        is_encoder,
        kv_bytes_per_token,
        max_context,
        model_parts,
        num_parameters,
        open,
        open_weights,
        parameter_shapes,
        stored_tensors,
        with_quantization,
    )
    from tilewise.models.resident_formats import formats_in_training, plan_in_formats

_MODULES = {
    "ModelConfig": "tilewise.models.model_config",
    "config_content": "tilewise.models.model_config",
    "BLOCK_SIZE": "tilewise.models.decoder.model",
    "FileLayout": "tilewise.models.layout",
    "LoadedAdapter": "tilewise.models.lora",
    "LoraLayout": "tilewise.models.lora",
    "load_adapter": "tilewise.models.lora",
    "lora_layout": "tilewise.models.lora",
    "merged_weights": "tilewise.models.lora",
    "StackedAdapters": "tilewise.models.lora",
    "stack_adapters": "tilewise.models.lora",
    "formats_in_training": "tilewise.models.resident_formats",
    "plan_in_formats": "tilewise.models.resident_formats",
    "ParallelModelBuilder": "tilewise.models.parallel",
    "LayerUse": "tilewise.models.parts",
    "ModelParts": "tilewise.models.parts",
    "FAMILIES": "tilewise.models.registry",
    "PURPOSES": "tilewise.models.registry",
    "build_decoding_graph": "tilewise.models.registry",
    "build_encoding_graph": "tilewise.models.registry",
    "build_training_graph": "tilewise.models.registry",
    "config_from_dict": "tilewise.models.registry",
    "default_context": "tilewise.models.registry",
    "file_layout": "tilewise.models.registry",
    "is_encoder": "tilewise.models.registry",
    "kv_bytes_per_token": "tilewise.models.registry",
    "max_context": "tilewise.models.registry",
    "model_parts": "tilewise.models.registry",
    "num_parameters": "tilewise.models.registry",
    "open": "tilewise.models.registry",
    "open_weights": "tilewise.models.registry",
    "parameter_shapes": "tilewise.models.registry",
    "stored_tensors": "tilewise.models.registry",
    "with_quantization": "tilewise.models.registry",
}

__all__ = [
    "BLOCK_SIZE",
    "FAMILIES",
    "PURPOSES",
    "FileLayout",
    "LayerUse",
    "LoadedAdapter",
    "LoraLayout",
    "ModelConfig",
    "ModelParts",
    "ParallelModelBuilder",
    "StackedAdapters",
    "build_decoding_graph",
    "build_encoding_graph",
    "build_training_graph",
    "config_content",
    "config_from_dict",
    "default_context",
    "file_layout",
    "formats_in_training",
    "is_encoder",
    "kv_bytes_per_token",
    "load_adapter",
    "lora_layout",
    "max_context",
    "merged_weights",
    "model_parts",
    "num_parameters",
    "open",
    "open_weights",
    "parameter_shapes",
    "plan_in_formats",
    "stack_adapters",
    "stored_tensors",
    "with_quantization",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
