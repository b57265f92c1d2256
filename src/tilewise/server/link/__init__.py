"""The engine's process and the link to it: frames of JSON through a pair of sockets."""

__all__: list[str] = []
