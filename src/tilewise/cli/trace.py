"""`tilewise trace`: runs another command, and shows the timeline of one run of its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.options import make_console
from tilewise.core import ConfigError

__all__ = ["trace"]

_ELSEWHERE = {
    "launch": "put it first: `tilewise launch -n 2 trace COMMAND...`",
    "serve": "trace `tilewise generate`, or `tilewise run` of a script that uses `tilewise.LLM`",
    "trace": "write `trace` once",
}


def trace(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="A command of this program (`train`, `generate`, `verify`, `run`, ...) with its arguments.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for trace.json and trace.html.")
    ] = Path("trace"),
    run: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**9,
            metavar="N",
            help="Show the N-th run of the process instead: a training step, a forward pass, a decoding step. "
            "Default: the last run of the program that took the most time in total.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a command, and show what its devices did in one run: transfers and kernels of all
    devices and hosts on one clock.

    Writes trace.json, which opens in Perfetto (ui.perfetto.dev), and the page trace.html: the
    share of transfer time that is hidden behind computation, the idle time of workers by cause, and
    the critical path. Prints these figures on standard error. The command's own output, files and
    results stay the same.

    A run is one execution of a program on all devices: a training step, a forward pass, a decoding
    step. Each run is recorded, and the devices keep the records of their last one.

    To trace several processes or hosts, launch the traced command: `tilewise launch -n 2 trace
    train examples/train.toml`. Times of other hosts are converted to this host's clock; the error
    is printed.

    Example: `tilewise trace train examples/train.toml --set train.steps=5` and `tilewise trace
    --run 3 run my_script.py`
    """
    from tilewise.observe.collector import collect_traces

    name = command[0]
    if name in _ELSEWHERE:
        raise typer.BadParameter(f"cannot trace `{name}`; {_ELSEWHERE[name]}", param_hint="COMMAND")
    output.mkdir(parents=True, exist_ok=True)
    with collect_traces(run) as collector:
        code = context.find_root().command.main(command, prog_name="tilewise", standalone_mode=False)
        profile = collector.profile()
    if profile is not None:
        profile.perfetto(output / "trace.json")
        profile.save(output / "trace.html")
        console = make_console(stderr=True)
        for line in (
            *profile.summary(),
            f"{output / 'trace.html'}; {output / 'trace.json'} opens in Perfetto",
        ):
            console.print(line, highlight=False, markup=False)
    if isinstance(code, int) and code:
        raise typer.Exit(code)
    if profile is None:
        raise ConfigError(_nothing(run, collector.num_runs))


def _nothing(run: int | None, num_runs: int) -> str:
    if num_runs:
        return f"[cli.trace] --run must be a run of the command; got {run} of {num_runs} runs; choose a smaller number"
    return (
        "[cli.trace] the command must run a program on devices in this process; got no run; trace a command that "
        "trains, generates or verifies"
    )
