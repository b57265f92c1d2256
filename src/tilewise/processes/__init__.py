"""Threads and child processes: background threads, child processes of this Python, worker pools."""

__all__: list[str] = []
