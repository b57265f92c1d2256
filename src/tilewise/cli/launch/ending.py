"""How a command over several processes ends."""

__all__ = ["LOST"]

LOST = 75
"""The exit code of a command that has lost a process: sysexits' "temporary failure", which schedulers may requeue."""
