"""Encoding: from an encoder's directory and texts to a vector per text.

Owns how the vectors of a text's tokens become one, and the batches that texts go in. The model is an encoding graph;
this package calls its `forward`.
"""

from tilewise.encode.encoder import Encoder
from tilewise.encode.pooling import POOLINGS, Pooling, load_max_length, load_pooling

__all__ = ["POOLINGS", "Encoder", "Pooling", "load_max_length", "load_pooling"]
