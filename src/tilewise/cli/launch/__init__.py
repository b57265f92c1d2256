"""Commands with devices in several processes: of this machine, or of several by MPI; and started again after a loss."""

from tilewise.cli.launch.command import launch
from tilewise.cli.launch.ending import LOST

__all__ = ["LOST", "launch"]
