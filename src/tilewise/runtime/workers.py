"""Runs the worker threads of a runtime that is divided over two processes:
`python -m tilewise.runtime.workers PATH --library LIB`.

The program opens the file that `Runtime(shared_path=PATH)` created in another process, the
orchestrator. It runs the orchestrator's tasks until the orchestrator closes the runtime (exit code
0) or dies (exit code 1). Kernels are looked up by name in the given libraries. If the file is of
another kind or a library cannot be loaded, one line is printed to standard error and the exit code
is 2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tilewise._native.tasks import run_workers
from tilewise.core import TilewiseError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tasks of one orchestrator until it ends. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tilewise.runtime.workers", description=__doc__)
    parser.add_argument("path", type=Path, help="the shared file, as given to Runtime(shared_path=...)")
    parser.add_argument(
        "--library", action="append", default=[], help="a shared library with kernels; repeatable"
    )
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for the file")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.timeout
    while not options.path.exists():
        if time.monotonic() > deadline:
            print(
                f"[runtime.workers] the orchestrator must make the shared file; got none at '{options.path}' after "
                f"{options.timeout} s; start it first",
                file=sys.stderr,
            )
            return 2
        time.sleep(0.005)
    try:
        return 1 if run_workers(str(options.path), options.library) < 0 else 0
    except TilewiseError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
