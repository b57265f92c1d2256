"""Directories of low-rank adapters (LoRA) as PEFT writes them: adapter_config.json and
adapter_model.safetensors. This package knows names of modules only; `models.lora` knows the models.
"""

from tilewise.checkpoint.adapters.directory import (
    ADAPTER_CONFIG,
    PREFIX,
    OpenAdapter,
    adapter_files,
    is_adapter,
    open_adapter,
    save_adapter,
)
from tilewise.checkpoint.adapters.lora_config import LoraConfig

__all__ = [
    "ADAPTER_CONFIG",
    "PREFIX",
    "LoraConfig",
    "OpenAdapter",
    "adapter_files",
    "is_adapter",
    "open_adapter",
    "save_adapter",
]
