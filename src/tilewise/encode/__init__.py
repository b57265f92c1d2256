"""Encoding: computes one vector per text with an encoder model.

This package pools the vectors of a text's tokens and forms batches of texts. The model is an
encoding graph, of which this package calls `forward`.
"""

from tilewise.encode.encoder import Encoder
from tilewise.encode.pooling import POOLINGS, Pooling, load_max_length, load_pooling

__all__ = ["POOLINGS", "Encoder", "Pooling", "load_max_length", "load_pooling"]
