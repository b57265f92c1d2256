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
from tilewise.core.dtypes import DTYPES, DType, dtype
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
from tilewise.core.mesh import DeviceMesh

__all__ = [
    "DTYPES",
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
    "chunk_range",
    "configure_logging",
    "dtype",
    "get_logger",
    "is_power_of_two",
    "read",
    "shard_range",
    "shown",
    "upper_bound",
]
