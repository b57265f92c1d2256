"""The engine's process, and the link between it and the HTTP process: frames of JSON through a pair
of sockets.
"""

__all__: list[str] = []
