"""Tilewise: train transformers on one device or several, with the same result to the bit.

A model is a graph that does not know devices (`ComputeGraph`). A declared strategy lays it out
(`DistributionStrategy`), a plan says in advance what fits and what moves, and a native task runtime
runs it. The bits are the same on one device or many. Start with README.md and examples/.

Names are imported when they are first used, so `import tilewise` is quick, and defining graphs
needs no native module.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise import comm, models, optim
    from tilewise.core.dims import BATCH, Dim, DimLabel
    from tilewise.core.errors import TilewiseError
    from tilewise.core.mesh import DeviceMesh
    from tilewise.distributed import ProcessGroup, ProcessRole, init, shutdown
    from tilewise.graph import GraphBuilder, layer
    from tilewise.graph.parallel import LayerSpec, ParallelDebugger, ParallelGraphBuilder, ProgressTracker
    from tilewise.ir.graph import TensorSpec
    from tilewise.ir.hints import Replicate, Shard
    from tilewise.ir.policy import ExecutionPolicy, TaskExecutionHints
    from tilewise.kernels.dlpack import to_dlpack
    from tilewise.kernels.user import tile_kernel
    from tilewise.processes.workers import WorkerPool
    from tilewise.serve import LLM, Engine, SamplingParams, StructuredOutputsParams
    from tilewise.session import ComputeGraph, ExecutionContext, GraphInstance, Plan, StepResult
    from tilewise.strategy import DistributionStrategy, ParallelismMode, PipelineStages, StateSharding
    from tilewise.tiles import DeviceGroup, tile_program

_MODULES = {
    "BATCH": "tilewise.core.dims",
    "ComputeGraph": "tilewise.session",
    "DeviceGroup": "tilewise.tiles",
    "DeviceMesh": "tilewise.core.mesh",
    "Dim": "tilewise.core.dims",
    "DimLabel": "tilewise.core.dims",
    "DistributionStrategy": "tilewise.strategy",
    "Engine": "tilewise.serve",
    "ExecutionContext": "tilewise.session",
    "ExecutionPolicy": "tilewise.ir.policy",
    "GraphBuilder": "tilewise.graph",
    "GraphInstance": "tilewise.session",
    "LLM": "tilewise.serve",
    "LayerSpec": "tilewise.graph.parallel",
    "ParallelDebugger": "tilewise.graph.parallel",
    "ParallelGraphBuilder": "tilewise.graph.parallel",
    "ParallelismMode": "tilewise.strategy",
    "PipelineStages": "tilewise.strategy",
    "Plan": "tilewise.session",  # imports all ops and optimizers that a saved plan may name
    "ProcessGroup": "tilewise.distributed",
    "ProcessRole": "tilewise.distributed",
    "ProgressTracker": "tilewise.graph.parallel",
    "Replicate": "tilewise.ir.hints",
    "SamplingParams": "tilewise.serve",
    "StructuredOutputsParams": "tilewise.serve",
    "Shard": "tilewise.ir.hints",
    "StateSharding": "tilewise.strategy",
    "StepResult": "tilewise.session",
    "TensorSpec": "tilewise.ir.graph",
    "TaskExecutionHints": "tilewise.ir.policy",
    "TilewiseError": "tilewise.core.errors",
    "WorkerPool": "tilewise.processes.workers",
    "init": "tilewise.distributed",
    "layer": "tilewise.graph",
    "shutdown": "tilewise.distributed",
    "tile_kernel": "tilewise.kernels.user",
    "tile_program": "tilewise.tiles",
    "to_dlpack": "tilewise.kernels.dlpack",
}

__all__ = [
    "BATCH",
    "LLM",
    "ComputeGraph",
    "DeviceGroup",
    "DeviceMesh",
    "Dim",
    "DimLabel",
    "DistributionStrategy",
    "Engine",
    "ExecutionContext",
    "ExecutionPolicy",
    "GraphBuilder",
    "GraphInstance",
    "LayerSpec",
    "ParallelDebugger",
    "ParallelGraphBuilder",
    "ParallelismMode",
    "PipelineStages",
    "Plan",
    "ProcessGroup",
    "ProcessRole",
    "ProgressTracker",
    "Replicate",
    "SamplingParams",
    "Shard",
    "StateSharding",
    "StepResult",
    "StructuredOutputsParams",
    "TaskExecutionHints",
    "TensorSpec",
    "TilewiseError",
    "WorkerPool",
    "comm",
    "get_cmake_dir",
    "get_include",
    "get_library",
    "init",
    "layer",
    "models",
    "optim",
    "shutdown",
    "tile_kernel",
    "tile_program",
    "to_dlpack",
]


def get_include() -> str:
    """The folder for `-I`: `#include <tilewise/pto_api.h>` is the task runtime for C and C++, and
    `<tilewise/tile_kernel.h>` declares kernels for tile programs.
    """
    return _native_folder("include")


def get_library() -> str:
    """The folder for `-L` and `-Wl,-rpath`: it holds `libtilewise_pto.so`."""
    return _native_folder("lib")


def get_cmake_dir() -> str:
    """The folder for `-Dtilewise_DIR=`: `find_package(tilewise CONFIG)` gives the target `tilewise::pto`."""
    return _native_folder("cmake")


def _native_folder(name: str) -> str:
    # The folders are next to the installed native module, even if the Python sources come from a checkout.
    return str(Path(import_module("tilewise._native").__file__ or "").parent / name)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in ("comm", "models", "optim"):
        return import_module(f"tilewise.{name}")
    if name == "__version__":
        return import_module("importlib.metadata").version("tilewise")
    raise AttributeError(f"module 'tilewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
