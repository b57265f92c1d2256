"""Tile kernels as tasks: `gelu(x, out)` and `gelu_async(x, out)`, and the same for every kernel.

A tile is a buffer or region of a `tilewise.runtime.Runtime` with one dimension (one row) or two, or
a weight in panels (`PackedTile`, made by `pack`). Arguments are the kernel's inputs, then its
outputs; attributes and operands that may be absent are keywords. A blocking call waits for its own
task only. An asynchronous call returns the task's `TaskHandle`. The functions are made from the
declarations of the kernels when the package is built; a call that does not match its kernel's
declaration raises `ConfigError`. docs/tiles.md teaches them.
"""

from __future__ import annotations

from tilewise.runtime.tile_calls import PackedTile, TaskOptions, Tile, pack
from tilewise.tile.functions import *  # noqa: F403
from tilewise.tile.functions import __all__ as _made

__all__ = ["PackedTile", "TaskOptions", "Tile", "pack"]
__all__ += _made
