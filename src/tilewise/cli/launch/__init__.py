"""Commands with devices in several processes, on this machine or by MPI on several, and restarts
after a failure.
"""

from tilewise.cli.launch.command import launch

__all__ = ["launch"]
