"""`tilewise checkpoint inspect | verify | convert`: arguments, help texts and output.

The package `checkpoint` and `cli.convert` read and write files. Heavy packages are imported inside
commands, as in `cli.main`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.help import App
from tilewise.cli.options import Options, Values
from tilewise.core import ResourceError
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import Validator, bare
from tilewise.settings import EngineSettings

if TYPE_CHECKING:
    from rich.console import Console

    from tilewise.checkpoint import DamagedCheckpoint, OpenCheckpoint

__all__ = ["checkpoints"]

checkpoints = App(name="checkpoint", help="Inspect and verify training checkpoints, and convert weights.")

_MAX_VALUE = 2000  # characters of a setting
_PATH = typer.Argument(
    metavar="PATH", help="A checkpoint (step-N), or a run's output directory.", show_default=False
)


@checkpoints.command()
def inspect(path: Annotated[Path, _PATH]) -> None:
    """Show the content of checkpoints: step, configuration, tensors, bytes, and the files of
    devices.

    Reads metadata and headers; `tilewise checkpoint verify` reads every byte. Exits with code 1 if
    one is damaged or cannot be read.

    Example: `tilewise checkpoint inspect runs/train`
    """
    from tilewise.checkpoint import DamagedCheckpoint, open_checkpoint
    from tilewise.cli.convert import find_checkpoints

    newest, num_damaged = None, 0
    for place in find_checkpoints(path):
        try:
            newest = open_checkpoint(place)
        except (DamagedCheckpoint, ResourceError) as error:
            num_damaged += _count_damaged(place, error)
        else:
            print(f"{place}: valid metadata, names and sizes (verify reads every byte)")
    for line in () if newest is None else _describe(newest):
        print(line)
    if num_damaged:
        raise typer.Exit(1)


def _count_damaged(place: Path, error: DamagedCheckpoint | ResourceError) -> int:
    """Report what is wrong. Returns 1 if the checkpoint is damaged or cannot be read, and 0 if a
    running training removed it meanwhile.
    """
    is_there = os.path.lexists(place)
    problem = f"cannot be read: {error}" if isinstance(error, ResourceError) else f"damaged: {error.reason}"
    print(f"{place}: {problem if is_there else 'was removed meanwhile'}")
    return int(is_there)


def _describe(opened: OpenCheckpoint) -> Iterator[str]:
    from tilewise.checkpoint import describe_changes
    from tilewise.checkpoint.training import flat_settings

    kinds: Counter[str] = Counter()
    for tensor in opened.tensors.values():
        kinds[str(tensor.dtype)] += tensor.nbytes
    sizes = ", ".join(f"{name} {format_bytes(count)}" for name, count in sorted(kinds.items()))
    states = sum(name.startswith("optimizer.") for name in opened.tensors)
    yield f"newest: {opened.path.name}"
    yield f"step: {opened.step}"
    yield (
        f"tensors: {len(opened.tensors) - states} of the model, {states} of the optimizer; {sizes}; "
        f"{format_bytes(opened.nbytes)} together"
    )
    mesh = ", ".join(f"{bare(axis, 40)}={size}" for axis, size in opened.mesh.items())
    yield f"devices: {len(opened.files)}{f' ({mesh})' if mesh else ''}"
    for file in opened.files:
        yield f"  {file.name}: {len(file.parts)} tensors or parts of them, {format_bytes(file.nbytes)}"
    for change in opened.changes:
        yield f"changed after step {change.step}: {describe_changes([change])}"
    yield "configuration:"
    for key, value in flat_settings(opened.config):
        yield f"  {bare(key)} = {bare(value, _MAX_VALUE)}"


@checkpoints.command()
def verify(path: Annotated[Path, _PATH]) -> None:
    """Read every byte of checkpoints and compare it with what was saved.

    Exits with code 0 if all are complete, and with 1 if one is damaged or cannot be read. Prints
    which device's file and which tensor is wrong.

    Example: `tilewise checkpoint verify runs/train`
    """
    from tilewise.checkpoint import DamagedCheckpoint, open_checkpoint
    from tilewise.cli.convert import find_checkpoints
    from tilewise.train.progress import track_work

    num_damaged = 0
    for place in find_checkpoints(path):
        try:
            opened = open_checkpoint(place)
            with track_work(_console(), place.name) as progress:
                opened.verify(progress.show)
        except (DamagedCheckpoint, ResourceError) as error:
            num_damaged += _count_damaged(place, error)
        else:
            print(f"{place}: complete, {len(opened.tensors)} tensors, {format_bytes(opened.nbytes)}")
    if num_damaged:
        raise typer.Exit(1)


@checkpoints.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A training checkpoint or a run's output directory; a state dict of torch.save (.pt, .bin); a "
            "distributed checkpoint of PyTorch (a directory with .metadata); a directory with pytorch_model.bin; a "
            "safetensors file; for a GGUF file, a model directory.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            help="The target: a Hugging Face directory, or one file if its name ends in .safetensors or .gguf.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            help="A model directory whose config.json, tokenizer, chat templates and generation_config.json the target "
            "gets; a training checkpoint keeps its own files and gets those that it lacks.",
            show_default=False,
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="The key of the state dict, in a file with other things besides weights.", show_default=False
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="Type of the matrices in a GGUF file: bf16, q8_0 or q4_0 (with embedding and head in q8_0).",
            show_default="bf16",
        ),
    ] = None,
    *,
    engine: Annotated[Values, Options(EngineSettings, only=("ignore_config_fields",))],
) -> None:
    """Convert weights to a Hugging Face directory, or to one safetensors or GGUF file.

    Files of PyTorch are read as data: PyTorch is not needed, and nothing in a file is executed.
    Prefixes that PyTorch adds to names of compiled and wrapped models (`_orig_mod.`, `module.`) are
    removed. Of a training run, the newest checkpoint is converted after every byte was checked. The
    result equals the model that the run writes when it ends. A GGUF file has weights, tokenizer and
    chat template of a model directory, for llama.cpp. The target must not exist.

    Example: `tilewise checkpoint convert runs/train my-model`
    """
    from tilewise.checkpoint.gguf_writer import GGUF_TYPES
    from tilewise.cli.convert import convert_checkpoint

    if kind is not None:
        Validator("cli").choice("convert", "--type", kind, GGUF_TYPES)
    ignored = EngineSettings(**engine).ignore_config_fields
    convert_checkpoint(source, target, model, part, _console(), ignored, kind)


@checkpoints.command()
def merge(
    base: Annotated[
        Path,
        typer.Argument(help="The model: a Hugging Face directory, or a GGUF file.", show_default=False),
    ],
    adapter: Annotated[
        Path, typer.Argument(help="An adapter of the model: a directory of PEFT.", show_default=False)
    ],
    target: Annotated[Path, typer.Argument(help="The Hugging Face directory to write.", show_default=False)],
    *,
    engine: Annotated[Values, Options(EngineSettings, only=("ignore_config_fields",))],
) -> None:
    """Write a model with an adapter added to its weights.

    Weights are added in fp32 and have the dtypes of the model; quantised weights become bf16. Tokenizer, chat
    templates and generation settings are the model's. The target must not exist.

    Example: `tilewise checkpoint merge base-model runs/tuned/adapter tuned-model`
    """
    from tilewise.cli.convert import merge_adapter

    merge_adapter(base, adapter, target, _console(), EngineSettings(**engine).ignore_config_fields)


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)
