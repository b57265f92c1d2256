"""Reads and writes files of weights and checkpoints: safetensors, Hugging Face directories,
training checkpoints, and files of PyTorch (only reading).

Every file is checked, and files are replaced atomically. The package knows tensors by name only; it
knows no models or strategies. Weights are read lazily, so a device reads only the rows that it
needs.
"""

from tilewise.checkpoint.background import CheckpointWriter
from tilewise.checkpoint.boxes import Box
from tilewise.checkpoint.companions import Companions, open_companions
from tilewise.checkpoint.dcp import is_distributed, open_distributed
from tilewise.checkpoint.files import (
    check_replaceable,
    check_writable,
    remove_directory,
    remove_leftovers,
    replace_directory,
)
from tilewise.checkpoint.generation import load_generation_config
from tilewise.checkpoint.gguf import GgufModel, gguf_model
from tilewise.checkpoint.hub import find_model
from tilewise.checkpoint.lock import lock_directory
from tilewise.checkpoint.manifest import ConfigChange, EvaluationRecord
from tilewise.checkpoint.pretrained import model_files, save_model_directory, save_pretrained
from tilewise.checkpoint.quantise import quantise_weights
from tilewise.checkpoint.quantised import QuantisedTensor, formats_of
from tilewise.checkpoint.quantised_files import QUANTISATION_KEYS, parse_quantisation, without_zero_biases
from tilewise.checkpoint.shards import write_weights
from tilewise.checkpoint.stored import Stored, StoredTensor, StoredWeights, store_parameters
from tilewise.checkpoint.tensors import (
    FileTensor,
    LazyTensor,
    PartedTensor,
    Tensor,
    TensorPart,
    cast_tensors,
)
from tilewise.checkpoint.tokenizer import check_token_ids, load_tokenizer
from tilewise.checkpoint.tokenizer_config import TokenizerConfig, load_tokenizer_config
from tilewise.checkpoint.torch_files import open_state_dict
from tilewise.checkpoint.training import (
    DamagedCheckpoint,
    FinishedModel,
    OpenCheckpoint,
    OtherConfiguration,
    TrainingState,
    checkpoint_paths,
    config_changes,
    describe_changes,
    has_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    load_latest,
    open_checkpoint,
    save_checkpoint,
)
from tilewise.checkpoint.weights import open_weights

__all__ = [
    "QUANTISATION_KEYS",
    "Box",
    "CheckpointWriter",
    "Companions",
    "ConfigChange",
    "DamagedCheckpoint",
    "EvaluationRecord",
    "FileTensor",
    "FinishedModel",
    "GgufModel",
    "LazyTensor",
    "OpenCheckpoint",
    "OtherConfiguration",
    "PartedTensor",
    "QuantisedTensor",
    "Stored",
    "StoredTensor",
    "StoredWeights",
    "Tensor",
    "TensorPart",
    "TokenizerConfig",
    "TrainingState",
    "cast_tensors",
    "check_replaceable",
    "check_token_ids",
    "check_writable",
    "checkpoint_paths",
    "config_changes",
    "describe_changes",
    "find_model",
    "formats_of",
    "gguf_model",
    "has_checkpoints",
    "is_distributed",
    "latest_checkpoint",
    "load_checkpoint",
    "load_generation_config",
    "load_latest",
    "load_tokenizer",
    "load_tokenizer_config",
    "lock_directory",
    "model_files",
    "open_checkpoint",
    "open_companions",
    "open_distributed",
    "open_state_dict",
    "open_weights",
    "parse_quantisation",
    "quantise_weights",
    "remove_directory",
    "remove_leftovers",
    "replace_directory",
    "save_checkpoint",
    "save_model_directory",
    "save_pretrained",
    "store_parameters",
    "without_zero_biases",
    "write_weights",
]
