"""Layers as functions that add ops to a graph, and as small classes. A parameter has the name that it is
given, relative to the layer's path.
"""

from tilewise.graph import GraphBuilder, LayerFunction, layer
from tilewise.nn.layers import (
    conv1d,
    conv2d,
    embedding,
    layer_norm,
    linear,
    mlp,
    multi_head_attention,
    rms_norm,
)
from tilewise.nn.modules import (
    Conv1d,
    Conv2d,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    RMSNorm,
    Sequential,
    gelu,
    relu,
    sigmoid,
    silu,
    tanh,
)
from tilewise.nn.preference import PreferenceLoss, preference_loss

__all__ = [
    "Conv1d",
    "Conv2d",
    "Dropout",
    "Embedding",
    "GraphBuilder",
    "LayerFunction",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "PreferenceLoss",
    "RMSNorm",
    "Sequential",
    "conv1d",
    "conv2d",
    "embedding",
    "gelu",
    "layer",
    "layer_norm",
    "linear",
    "mlp",
    "multi_head_attention",
    "preference_loss",
    "relu",
    "rms_norm",
    "sigmoid",
    "silu",
    "tanh",
]
