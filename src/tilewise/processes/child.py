"""The first code that a child process runs: it finds Tilewise, and calls the module that the child
is for.

`processes.children` runs it as a file, so that the child does not import its parent's main module.
"""

from __future__ import annotations

import json
import signal
import sys
from importlib import import_module

__all__ = ["main"]


def main() -> None:
    """Call the module's `main`. The arguments are the number of a socket, the parent's search path
    and the module's name.
    """
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
