"""Modules that every package may import: errors, element types, symbolic sizes, the device mesh, environment, logging.

They import nothing else of Tilewise.
"""

from tilewise.core.dims import (
    BATCH,
    Dim,
    DimLabel,
    Size,
    k_split_range,
    shard_range,
    upper_bound,
)
from tilewise.core.dtypes import (
    DTYPES,
    KV_CACHE_DTYPES,
    MODEL_DTYPES,
    QUANTIZED_MATMULS,
    DType,
    choose_dtype,
    dtype,
    is_float,
    model_dtype,
)
from tilewise.core.environment import VARIABLES, read
from tilewise.core.errors import (
    CheckpointError,
    CommError,
    CommTimeout,
    ConfigError,
    InternalError,
    LayoutError,
    NotFinite,
    PartialBlocks,
    PeerLost,
    PlanError,
    ResourceError,
    ShapeError,
    TaskFailed,
    TilewiseError,
)
from tilewise.core.log import configure_logging, get_logger
from tilewise.core.mesh import MAX_DEVICES, MICRO, Axes, DeviceMesh
from tilewise.core.validation import Validator, shown

__all__ = [
    "BATCH",
    "DTYPES",
    "KV_CACHE_DTYPES",
    "MAX_DEVICES",
    "MICRO",
    "MODEL_DTYPES",
    "QUANTIZED_MATMULS",
    "VARIABLES",
    "Axes",
    "CheckpointError",
    "CommError",
    "CommTimeout",
    "ConfigError",
    "DType",
    "DeviceMesh",
    "Dim",
    "DimLabel",
    "InternalError",
    "LayoutError",
    "NotFinite",
    "PartialBlocks",
    "PeerLost",
    "PlanError",
    "ResourceError",
    "ShapeError",
    "Size",
    "TaskFailed",
    "TilewiseError",
    "Validator",
    "choose_dtype",
    "configure_logging",
    "dtype",
    "get_logger",
    "is_float",
    "k_split_range",
    "model_dtype",
    "read",
    "shard_range",
    "shown",
    "upper_bound",
]
