"""`tilewise launch`: runs another command of this program with its devices in several processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.launch.hosts import place_processes, read_hosts
from tilewise.cli.launch.over_mpi import find_mpiexec, run_over_hosts
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
            help="Number of processes, including this one.",
            show_default=False,
        ),
    ],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="The command to run: `train`, `verify`, `generate`, `serve`, `run script.py`, ... with its arguments.",
            show_default=False,
        ),
    ],
    restart: Annotated[
        int,
        typer.Option(
            min=0,
            max=10**6,
            help="Maximum number of times to start the command again when a process is lost.",
        ),
    ] = 0,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOSTS",
            help="Run on these hosts, over MPI: names separated by commas, or a file in mpiexec's format, with a "
            "host on each line. `name:2`, `name slots=2` and a name on two lines run two processes.",
            show_default=False,
        ),
    ] = None,
    launcher_exec: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="With --hosts: a program to use instead of ssh.", show_default=False
        ),
    ] = None,
    mpiexec: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="With --hosts: the mpiexec (MPICH's) to use. Default: the one next to this Python, or on the path.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a command with its devices in several processes, on this machine or on several.

    The command runs in this process as it would without `launch`: it reads and writes all files and
    prints all output. The other processes only have devices: device d of D is in process d * n //
    D. Results are the same to the bit. The processes share memory and use no ports or files. They
    start when the command first needs several devices, and end with it, however it ends.

    With `--hosts`, mpiexec starts the processes through ssh, and the command runs in the first
    process of the first host. This Python, this installation and the current folder must exist on
    every host under the same paths. MPI listens on ports without authentication: use it only in
    trusted networks.

    A mesh needs at least as many devices as there are processes; work on one device stays in the
    first process.

    The exit code is the command's own. It is 75 if a process was lost: one line says which and
    when, the other processes have been ended, and a training run resumes from its last checkpoint
    with `--resume`. `--restart 3` starts the command again automatically, even if it was killed;
    `train` is then started with `--auto-resume`.

    Example: `tilewise launch -n 2 train examples/train.toml` and `tilewise launch -n 4 --hosts
    node1,node2 verify examples/train.toml --mesh dp=2,tp=2`
    """
    program = context.find_root().command
    if command[0] == "launch":
        raise typer.BadParameter("the command must not be `launch`", param_hint="COMMAND")
    refuse_several(
        "cli.launch",
        "`launch` must not run under another launcher",
        "remove `launch` and its options, or the other launcher",
    )
    placed = None
    if hosts is not None:
        placed = place_processes(read_hosts(hosts), processes)
        find_mpiexec(mpiexec)
    elif launcher_exec is not None or mpiexec is not None:
        raise typer.BadParameter("needs --hosts", param_hint="--launcher-exec, --mpiexec")
    if restart:
        from tilewise.cli.launch.restart import run_again

        options = ["-n", str(processes)]
        more_options = {"--hosts": hosts, "--launcher-exec": launcher_exec, "--mpiexec": mpiexec}
        options += [
            word for name, value in more_options.items() if value is not None for word in (name, str(value))
        ]
        raise SystemExit(run_again(options, command, restart))  # it has reported errors
    if placed is not None:
        words = [sys.executable, "-m", "tilewise", *command]
        raise SystemExit(run_over_hosts(placed, words, mpiexec, launcher_exec))
    from tilewise.distributed import ProcessGroup

    with ProcessGroup(processes):
        code = program.main(command, prog_name="tilewise", standalone_mode=False)
    if isinstance(code, int) and code:
        raise typer.Exit(code)
