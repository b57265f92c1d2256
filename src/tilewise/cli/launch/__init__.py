"""Commands with devices in several processes: of this machine, or of several by MPI; and started again after a loss."""

from tilewise.cli.launch.command import launch

__all__ = ["launch"]
