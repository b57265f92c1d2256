"""Logging: one logger per package, all below `tilewise`, to standard error.

Standard output is for results (generated text, plans); explanations and warnings are logged. Only
the command line adds a handler, so a program's own `logging` configuration is not changed.
"""

from __future__ import annotations

import logging

from tilewise.core.environment import read
from tilewise.core.errors import ConfigError

__all__ = ["configure_logging", "get_logger", "warn_once"]

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def get_logger(package: str) -> logging.Logger:
    """The logger of a package, for example `get_logger("train")` is `tilewise.train`."""
    return logging.getLogger(f"tilewise.{package}")


_WARNED: set[tuple[str, str]] = set()


def warn_once(package: str, text: str) -> None:
    """Log a warning once per process, because a model's files are read several times."""
    if (package, text) not in _WARNED:
        _WARNED.add((package, text))
        get_logger(package).warning("%s", text)


def configure_logging() -> None:
    """Send Tilewise's log to standard error at the level that `TILEWISE_LOG` names.

    Raises:
        ConfigError: there is no such level.
    """
    level = read("TILEWISE_LOG", "warning").lower()
    if level not in _LEVELS:
        raise ConfigError(
            f"[core.log] TILEWISE_LOG must be one of {', '.join(_LEVELS)}; got {level!r}; set one "
            "of them or unset it"
        )
    root = logging.getLogger("tilewise")
    root.setLevel(_LEVELS[level])
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
