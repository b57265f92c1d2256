"""Runs commands with devices in several processes, on this machine or (by MPI) on several machines,
and restarts them after a failure.
"""

from tilewise.cli.launch.command import launch

__all__ = ["launch"]
