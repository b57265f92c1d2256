"""Tilewise: train and serve transformers on one machine or many.

A model is a graph that knows no devices (`ComputeGraph`), a declared strategy lays it out (`DistributionStrategy`), a
plan says beforehand what fits and what moves, a native task runtime runs it, and the bits are the same on one device
or many. Start with README.md and examples/.

Names are loaded when they are first used, so that `import tilewise` is quick and describing needs no native module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise import models, optim
    from tilewise.core.dims import Dim, DimLabel
    from tilewise.core.errors import TilewiseError
    from tilewise.core.mesh import DeviceMesh
    from tilewise.graph import GraphBuilder, layer
    from tilewise.ir.graph import TensorSpec
    from tilewise.ir.layout import Partial, Replicate, Shard
    from tilewise.session import ComputeGraph, GraphInstance, StepResult
    from tilewise.strategy import DistributionStrategy, ParallelismMode

_HOMES = {
    "ComputeGraph": "tilewise.session",
    "DeviceMesh": "tilewise.core.mesh",
    "Dim": "tilewise.core.dims",
    "DimLabel": "tilewise.core.dims",
    "DistributionStrategy": "tilewise.strategy",
    "GraphBuilder": "tilewise.graph",
    "GraphInstance": "tilewise.session",
    "ParallelismMode": "tilewise.strategy",
    "Partial": "tilewise.ir.layout",
    "Replicate": "tilewise.ir.layout",
    "Shard": "tilewise.ir.layout",
    "StepResult": "tilewise.session",
    "TensorSpec": "tilewise.ir.graph",
    "TilewiseError": "tilewise.core.errors",
    "layer": "tilewise.graph",
}

__all__ = [
    "ComputeGraph",
    "DeviceMesh",
    "Dim",
    "DimLabel",
    "DistributionStrategy",
    "GraphBuilder",
    "GraphInstance",
    "ParallelismMode",
    "Partial",
    "Replicate",
    "Shard",
    "StepResult",
    "TensorSpec",
    "TilewiseError",
    "layer",
    "models",
    "optim",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in ("models", "optim"):
        return import_module(f"tilewise.{name}")
    raise AttributeError(f"module 'tilewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
