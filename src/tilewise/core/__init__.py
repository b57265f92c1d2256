"""Leaves that everything may import: errors, element types, symbolic sizes, the device mesh, environment,
logging.

Owns no state. Imports nothing of Tilewise.
"""

from tilewise.core.border import Border, shown
from tilewise.core.dims import (
    Dim,
    DimLabel,
    Size,
    chunk_range,
    is_power_of_two,
    shard_range,
    upper_bound,
)
from tilewise.core.dtypes import DTYPES, MODEL_DTYPES, DType, choose_dtype, dtype, is_float, model_dtype
from tilewise.core.environment import VARIABLES, read
from tilewise.core.errors import (
    CheckpointError,
    CommError,
    CommTimeout,
    ConfigError,
    InternalError,
    LayoutError,
    NotFinite,
    PeerLost,
    PlanError,
    ResourceError,
    ShapeError,
    TaskFailed,
    TilewiseError,
)
from tilewise.core.log import configure_logging, get_logger
from tilewise.core.mesh import MAX_DEVICES, DeviceMesh

__all__ = [
    "DTYPES",
    "MAX_DEVICES",
    "MODEL_DTYPES",
    "VARIABLES",
    "Border",
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
    "PeerLost",
    "PlanError",
    "ResourceError",
    "ShapeError",
    "Size",
    "TaskFailed",
    "TilewiseError",
    "choose_dtype",
    "chunk_range",
    "configure_logging",
    "dtype",
    "get_logger",
    "is_float",
    "is_power_of_two",
    "model_dtype",
    "read",
    "shard_range",
    "shown",
    "upper_bound",
]
