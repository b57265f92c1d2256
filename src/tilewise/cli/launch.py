"""`tilewise launch`: another command of this program, with its devices in several processes."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewise.comm.launcher import refuse_several
from tilewise.core.mesh import MAX_DEVICES

__all__ = ["launch"]


def launch(
    context: typer.Context,
    processes: Annotated[
        int,
        typer.Option(
            "-n",
            "--processes",
            min=1,
            max=MAX_DEVICES,
            help="Processes, this one among them.",
            show_default=False,
        ),
    ],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="What to run: `train`, `verify`, `generate`, `serve`, ... with its arguments.",
            show_default=False,
        ),
    ],
    restart: Annotated[
        int,
        typer.Option(
            min=0,
            max=10**6,
            help="Start the command again, so many times at most, when a process is lost.",
        ),
    ] = 0,
) -> None:
    """Run a command with its devices in several processes of this machine.

    The command runs here, as without this one: it reads and writes all files, and says what it says. The other
    processes hold devices: device d of D is in process d * n // D. Results are the same to the bit. The processes share
    memory and talk to no one else: no port, no file. They start when the command first needs several devices, and end
    with it, however it ends.

    A mesh needs as many devices as there are processes, or more; what has one device stays in this process.

    Exit codes are the command's own; 75 when a process was lost: what and when is said in one line, the others have
    been ended, and a training run goes on from its last checkpoint with `--resume`. `--restart 3` starts the command
    again by itself, also when it was killed itself, and `train` with `--auto-resume`.

    Example: `tilewise launch -n 2 train examples/train.toml` and
    `tilewise launch -n 4 verify examples/train.toml --mesh dp=2,tp=2`
    """
    from tilewise.distributed import ProcessGroup

    program = context.find_root().command
    if command[0] == "launch":
        raise typer.BadParameter("a launch starts one command that is not `launch`", param_hint="COMMAND")
    refuse_several(
        "cli.launch",
        "a launch starts processes where no launcher has",
        "leave out `launch` and its options, or the launcher",
    )
    if restart:
        from tilewise.cli.restart import run_again

        raise typer.Exit(run_again(processes, command, restart))
    with ProcessGroup(processes):
        code = program.main(command, prog_name="tilewise", standalone_mode=False)
    if isinstance(code, int) and code:
        raise typer.Exit(code)
