"""The first lines of a child process: where to find Tilewise, and on to the module that it is for.

Run as a file by `processes.children`, so that it knows nothing of its parent's main module.
"""

from __future__ import annotations

import json
import signal
import sys
from importlib import import_module

__all__ = ["main"]


def main() -> None:
    """The number of a socket, the parent's search path and a module's name are the arguments."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the parent handles them; this process ends with the parent
        signal.signal(number, signal.SIG_IGN)
    # in the parent's order: another Tilewise may be installed next to it
    sys.path[:] = json.loads(sys.argv[2])
    import_module(sys.argv[3]).main(int(sys.argv[1]))


if __name__ == "__main__":
    main()
