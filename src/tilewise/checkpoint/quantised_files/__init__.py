"""Quantised safetensors files: from the tensors that a method writes to one tensor per weight.

config.json names the method in `quantization_config`. A method's module turns each quantised layer
of a directory (packed codes, scales, zero points) into a `QuantisedTensor` with the name of the
weight. Other tensors stay as they are. Blocks are made when rows are read. Rejected are methods and
settings that are not supported, by name, and tensors whose shapes or dtypes contradict each other.
"""

from tilewise.checkpoint.quantised_files.methods import (
    OLDER_SETTINGS,
    QUANTISATION_KEYS,
    Quantisation,
    parse_quantisation,
    quantisation_of_directory,
    without_zero_biases,
)

__all__ = [
    "OLDER_SETTINGS",
    "QUANTISATION_KEYS",
    "Quantisation",
    "parse_quantisation",
    "quantisation_of_directory",
    "without_zero_biases",
]
