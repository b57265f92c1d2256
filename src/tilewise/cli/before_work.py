"""If a plan does not fit in memory, the command line reports a usage error (exit code 2) before any
work, and a failure (exit code 1) during work. This module makes the difference.

Library callers get `ResourceError` in both cases; only the command line distinguishes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tilewise.core import PlanError, ResourceError

__all__ = ["before_work"]


@contextmanager
def before_work() -> Iterator[None]:
    """A context for checks and planning, in which a `ResourceError` becomes a `PlanError`."""
    try:
        yield
    except ResourceError as error:
        raise PlanError(str(error)) from error
