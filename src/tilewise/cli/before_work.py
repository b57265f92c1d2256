"""A plan that does not fit memory, found before any work, is a usage error (exit code 2), not a failure (exit code 1).

Library callers get `ResourceError` either way; only the command line distinguishes the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tilewise.core import PlanError, ResourceError

__all__ = ["before_work"]


@contextmanager
def before_work() -> Iterator[None]:
    """Context of checks and planning: a `ResourceError` becomes a `PlanError`."""
    try:
        yield
    except ResourceError as error:
        raise PlanError(str(error)) from error
