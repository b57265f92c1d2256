"""Layers as functions that add ops to a graph. A parameter has the name that it is given, relative
to the layer's path.
"""

from tilewise.graph import GraphBuilder, LayerFunction, layer
from tilewise.nn.layers import layer_norm, linear, rms_norm

__all__ = ["GraphBuilder", "LayerFunction", "layer", "layer_norm", "linear", "rms_norm"]
