"""`tilewise run`: runs a Python script, alone or under `launch`, `trace` and mpiexec."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["run"]


def run(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]...",
            help="A Python script, and its arguments.",
            show_default=False,
        ),
    ],
) -> None:
    """Run a Python script as `python` does.

    Under `tilewise launch -n 2 run script.py` or `mpiexec -n 2 tilewise run script.py`, models and
    device groups of the script have their devices in all processes. The script itself runs once, in
    the first process, and needs no change. `tilewise trace run script.py` shows what its devices
    did.

    Example: `tilewise run examples/07_producer_consumer.py` and `tilewise launch -n 2 run
    examples/08_all_gather_matmul.py`
    """
    code = _run_script(script)
    if code:
        raise typer.Exit(code)


def _run_script(words: list[str]) -> int | None:
    """Run a Python script as `python` would. Returns the code with which it exits."""
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = list(words), str(Path(words[0]).resolve().parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
        return 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code
        print(error.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
