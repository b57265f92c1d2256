"""Files: weights in safetensors, Hugging Face directories, training checkpoints.

Owns formats and atomic replacement. Knows tensors by name only: no models, no strategies. Weights are read
lazily through memory maps, so a device that needs some rows reads those rows.
"""

from tilewise.checkpoint.files import (
    check_replaceable,
    check_writable,
    remove_leftovers,
    replace_file,
    replace_text,
    writing,
)
from tilewise.checkpoint.pretrained import load_generation_config, load_tokenizer, save_pretrained
from tilewise.checkpoint.training import (
    TrainingState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tilewise.checkpoint.weights import open_weights, write_weights

__all__ = [
    "TrainingState",
    "check_replaceable",
    "check_writable",
    "latest_checkpoint",
    "load_checkpoint",
    "load_generation_config",
    "load_tokenizer",
    "open_weights",
    "remove_leftovers",
    "replace_file",
    "replace_text",
    "save_checkpoint",
    "save_pretrained",
    "write_weights",
    "writing",
]
