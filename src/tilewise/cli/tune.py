"""`tilewise tune`: finds the settings that make a training run fastest on this machine without
changing a bit of its result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.before_work import before_work
from tilewise.cli.options import make_console

__all__ = ["tune"]


def tune(
    config: Annotated[
        Path, typer.Argument(help="A TOML file; examples/train.toml shows every key.", show_default=False)
    ],
    steps: Annotated[
        int, typer.Option(min=1, max=1000, help="Measured steps per candidate, after one warm-up step.")
    ] = 3,
    minutes: Annotated[
        float, typer.Option(min=0, max=1e4, help="Time after which no further candidate is started.")
    ] = 10.0,
) -> None:
    """Find the settings that make a training run fastest on this machine without changing a bit of
    its result.

    Runs some steps of the configuration under each candidate: every mesh of one axis on this
    machine's cores, with the least memory saving (microbatches, recomputation) that fits; more
    microbatches; other tile sizes. Then the fastest candidate and the given configuration are timed
    in turns; the candidate wins if it is at least 1% faster. Prints speed and planned memory of
    each candidate on standard error, and the fastest settings as lines for the file. Reads no data
    and writes nothing; the losses of all candidates are compared to the bit. The result is
    unreliable on a busy machine.

    Example: `tilewise tune examples/train.toml`
    """
    from tilewise.train import as_toml, load_config, tune_run

    console = make_console(stderr=True)

    def report(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    with before_work():
        loaded = load_config(config)
    result = tune_run(loaded, steps, minutes * 60, report)
    if result.num_untried:
        report(f"time ran out before {result.num_untried} other candidates; raise --minutes")
    if result.gain is None:
        report("the configuration does not run here; the fastest candidate that does:")
    elif result.best.config == loaded:
        report("the configuration is already as fast as any candidate:")
    else:
        report(f"{result.gain:.3f} times as fast as the configuration:")
    print(as_toml(result.best.config))
