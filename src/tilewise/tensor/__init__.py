"""Kernels over the tiles of matrices: `gelu(x, out)`, `matmul(a, b, c)`, ...

Each function submits one task per tile and returns a `TaskGroup`. A matrix is a buffer of a
`tilewise.runtime.Runtime`, or a `Tensor`, which adds the shape of its tiles. The tasks of different
calls order themselves by the data that they share. The functions except `matmul` are made from the
declarations of the kernels when the package is built: the `each` line of a declaration says along
which sizes a call may be divided. docs/tiles.md teaches them.
"""

from __future__ import annotations

from tilewise.tensor.functions import *  # noqa: F403
from tilewise.tensor.functions import __all__ as _made
from tilewise.tensor.loops import Matrix, Tensor
from tilewise.tensor.products import matmul

__all__ = ["Matrix", "Tensor", "matmul"]
__all__ += _made
