"""Formats byte counts for messages and the command line."""

from __future__ import annotations

__all__ = ["format_bytes"]

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def format_bytes(num_bytes: float) -> str:
    """A byte count in the largest binary unit that it reaches, with two decimals: `208.58 GiB`, or `512 bytes`."""
    for unit, factor in _UNITS:
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{int(num_bytes)} byte{'' if num_bytes == 1 else 's'}"
