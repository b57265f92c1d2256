"""The first lines of a server's engine process: where to find Tilewise, and on to it.

Run as a file by `engine_client`, as workers are, so that it knows nothing of its parent's main module.
"""

from __future__ import annotations

import json
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """The number of a socket and the parent's search path are the arguments."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the parent, whose end ends this process
        signal.signal(number, signal.SIG_IGN)
    own = set(sys.path)
    sys.path += [place for place in json.loads(sys.argv[2]) if place not in own]
    from tilewise.server.link.engine_process import run_engine

    run_engine(int(sys.argv[1]))


if __name__ == "__main__":
    main()
