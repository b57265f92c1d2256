"""Environment variables: the one place that reads them from Python.

A variable exists only if it stands in `VARIABLES` (or in native code) and on docs/environment.md; a policy
test compares the two. Configuration of a run never comes from here: that is what arguments and configuration
files are for.
"""

from __future__ import annotations

import os

from tilewise.core.errors import ConfigError

__all__ = ["VARIABLES", "read"]

VARIABLES = {
    "TILEWISE_LOG": "level of the log on standard error: debug, info, warning (default) or error",
}


def read(name: str, default: str) -> str:
    """The value of a variable of `VARIABLES`, or `default` when it is unset or empty.

    Raises:
        ConfigError: `name` is not in the table.
    """
    if name not in VARIABLES:
        raise ConfigError(
            f"[core.environment] a variable must stand in the table; got {name!r}; add it to "
            "core/environment.py and docs/environment.md"
        )
    return os.environ.get(name) or default
