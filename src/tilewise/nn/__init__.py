"""Layers as functions that write into a graph. Parameters get the name they are given, relative to the layer's path."""

from tilewise.graph import GraphBuilder, LayerFunction, layer
from tilewise.nn.layers import layer_norm, linear, rms_norm

__all__ = ["GraphBuilder", "LayerFunction", "layer", "layer_norm", "linear", "rms_norm"]
