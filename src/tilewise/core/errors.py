"""Errors of Tilewise.

    TilewiseError
    ├── ShapeError, LayoutError, PlanError, ConfigError, CheckpointError   (also ValueError)
    ├── ResourceError                                                      (also MemoryError)
    ├── CommError
    │   ├── CommTimeout
    │   └── PeerLost
    ├── TaskFailed            op, tile, worker, device as fields
    ├── NotFinite             loss, gradients, weights or logits are no longer finite
    └── InternalError         a defect of Tilewise itself: says what to report

Messages have the form `[package.function] the rule; got the values; what to do`. Errors of users are raised before any
work starts. native/bind maps errors of native code to these classes.
"""

from __future__ import annotations

__all__ = [
    "LOST",
    "CheckpointError",
    "CommError",
    "CommTimeout",
    "ConfigError",
    "InternalError",
    "LayoutError",
    "NotFinite",
    "PartialBlocks",
    "PeerLost",
    "PlanError",
    "ResourceError",
    "ShapeError",
    "TaskFailed",
    "TilewiseError",
]


LOST = 75
"""The exit code of a command that lost a process: "temporary failure" of sysexits.h, which schedulers may requeue."""


class TilewiseError(Exception):
    """Base class of all errors that Tilewise raises on purpose."""


class ShapeError(TilewiseError, ValueError):
    """Shapes, dtypes or names of tensors do not fit together."""


class LayoutError(TilewiseError, ValueError):
    """A strategy is not possible for this tensor and mesh."""


class PlanError(TilewiseError, ValueError):
    """A graph cannot be planned or run as requested."""


class PartialBlocks(PlanError):
    """A device's part of a quantised weight would not consist of whole blocks.

    Attributes:
        parameter: name of the weight in its layer.
    """

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class ConfigError(TilewiseError, ValueError):
    """A configuration file or model description is wrong, or requests something unsupported."""


class CheckpointError(TilewiseError, ValueError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class ResourceError(TilewiseError, MemoryError):
    """There is not enough memory or another bounded resource."""


class CommError(TilewiseError):
    """Communication between devices failed."""


class CommTimeout(CommError):
    """A device waited longer than its deadline; the message names both sides."""


class PeerLost(CommError):
    """Another device or process has ended."""


class TaskFailed(TilewiseError):
    """A task failed; raised once, at the wait.

    Attributes:
        op: label of the instruction in the tile program.
        tile: index of the task within the instruction's loop.
        worker: worker of the device that ran it.
        device: device it ran on.
    """

    def __init__(
        self, message: str, op: str = "", tile: int = -1, worker: int = -1, device: int = -1
    ) -> None:
        super().__init__(message)
        self.op = op
        self.tile = tile
        self.worker = worker
        self.device = device


class NotFinite(TilewiseError):
    """Loss, gradients, weights or logits are not finite; earlier saved state is complete."""


class InternalError(TilewiseError):
    """A defect of Tilewise; please report it with `plan.explain()`."""
