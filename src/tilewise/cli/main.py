"""The command line: `tilewise demo | train | generate | serve | chat | run-batch | encode |
evaluate | inspect | doctor | verify | tune | launch | trace | run | build-mpi | bench | checkpoint |
data`.

This module defines arguments, help texts and exit codes. Heavy packages are imported inside
commands, so that help is quick. A user's mistake is one line on standard error and exit code 2
before any work. A failure during work is one line and exit code 1. If one of several processes is
lost, the exit code is 75. After Ctrl-C it is 130. Standard output has results only.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper, UnsupportedOperation
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.before_work import before_work
from tilewise.cli.bench import bench
from tilewise.cli.build_mpi import build_mpi
from tilewise.cli.chat import chat
from tilewise.cli.checkpoint import checkpoints
from tilewise.cli.data import datasets
from tilewise.cli.doctor import doctor
from tilewise.cli.generate import generate
from tilewise.cli.help import App
from tilewise.cli.launch import launch
from tilewise.cli.options import MODEL, REVISION, Options, Values, make_console, size
from tilewise.cli.run_batch import run_batch
from tilewise.cli.run_script import run
from tilewise.cli.serve import serve
from tilewise.cli.trace import trace
from tilewise.cli.tune import tune
from tilewise.core import PeerLost, TilewiseError, configure_logging
from tilewise.core.environment import is_launched
from tilewise.core.errors import LOST
from tilewise.core.validation import cut
from tilewise.settings import EngineSettings

__all__ = ["app", "main"]

app = App(
    name="tilewise",
    help="Train transformers and generate text with them, on one device or several, with bit-identical results."
    "\n\n"
    "Start with `tilewise demo`: it trains a small model on this machine's own Python sources in about three "
    "minutes, then generates Python with it.",
)

app.add_typer(bench)
app.add_typer(checkpoints)
app.add_typer(datasets)

_CONFIG = typer.Argument(help="A TOML file; examples/train.toml shows every key.", show_default=False)

_SMALL_ENGINE = ("tensor_parallel_size", "dtype", "ignore_config_fields")
_MAX_LINE = 2000
_LEAST_DEVICE_MEMORY = 1_000_000  # bytes; less is probably a size without its unit
_INTERRUPTED = 130  # the exit code after Ctrl-C


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"tilewise {version('tilewise')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.05,
            max=1e5,
            help="Approximate training time.",
            show_default="3, or the time of 750 steps if longer",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="Number of steps, instead of measuring first.")
    ] = None,
    dp: Annotated[int, typer.Option(min=1, max=8, help="Devices that share the batch: 1, 2, 4 or 8.")] = 2,
    out: Annotated[Path, typer.Option(help="Directory for model, loss curve, timeline and metrics.")] = Path(
        "demo"
    ),
    data: Annotated[
        str, typer.Option(help="A text file or directory; `stdlib`: the sources of this Python.")
    ] = "stdlib",
) -> None:
    """Train a small Llama on this machine's Python sources, then generate Python code with it.

    Trains a tokenizer (4,096 entries) and a model of 5.8 million parameters in bf16 on two devices,
    saves it as a Hugging Face directory, loads it over two devices with tensor parallelism,
    generates a few snippets, checks that one device generates the same tokens, and compares its
    predictions on unseen files with gzip and xz.

    Example: `tilewise demo --minutes 1 --data ~/my-texts --out /tmp/demo`
    """
    from tilewise.cli.demo import run_demo

    run_demo(minutes=minutes, steps=steps, dp=dp, out=out, data=data, console=make_console(stderr=False))


@app.command()
def train(
    config: Annotated[Path, _CONFIG],
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint, with bit-identical results.")
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="Resume if there is a checkpoint, otherwise start: one command line for every start of a job.",
        ),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Override a setting of the file; may be repeated. With --resume, this is how to change the number of "
            "steps or the optimizer's settings for the rest of a run.",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the whole plan: memory, tiles, tasks, communication.")
    ] = False,
) -> None:
    """Train a model from a configuration file.

    The file has sections for model, data, optimizer, strategy and mesh. It is checked, and the
    strategy is planned, before anything runs. Ctrl-C writes a checkpoint and stops; `--resume`
    continues with the same result, also on other devices. Writes checkpoints, metrics.jsonl,
    loss.png and a Hugging Face directory to `output.directory`. Relative paths in the file are
    relative to its folder.

    Example: `tilewise train examples/train.toml`, and to make a run longer `tilewise train
    examples/train.toml --resume --set train.steps=4000`
    """
    from tilewise.graph.parallel import ProgressTracker
    from tilewise.train import load_config, plan_run, run_training, setting_names

    console = make_console(stderr=True)
    overrides = settings or []
    with before_work():
        run = plan_run(
            load_config(config, overrides),
            resume or (None if auto_resume else False),
            ProgressTracker(console),
            setting_names(overrides),
        )
    result = run_training(run, console, explain)
    if result.interrupted:
        raise typer.Exit(_INTERRUPTED)
    _print_path(result.model_dir)


app.command()(generate)
app.command()(serve)
app.command()(chat)
app.command("run-batch")(run_batch)
app.command()(doctor)
app.command()(tune)
app.command(context_settings={"allow_interspersed_args": False})(launch)
app.command(context_settings={"allow_interspersed_args": False})(trace)
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(run)
app.command("build-mpi")(build_mpi)


@app.command()
def verify(
    config: Annotated[Path, _CONFIG],
    mesh: Annotated[str, typer.Option(help="The mesh, for example dp=2,tp=2.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, max=10**9, help="Optimizer steps to compare.")] = 3,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Schedule of the stages on axis pp: 1f1b, gpipe, interleaved or zero_bubble, or a file in PyTorch's "
            "CSV format. Default: the configuration's.",
            show_default=False,
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Runs of layers per stage, with interleaved. Default: the configuration's.",
            show_default=False,
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**6,
            help="Microbatches per step. Default: the configuration's accumulation; with axis pp at least as many as "
            "stages.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare some steps over a mesh with the same steps on one device, to the bit.

    Runs the configuration's model on one device and over the mesh, and compares the loss, every
    gradient and, after the last step, every parameter, bit by bit. Prints that all are equal (exit
    code 0), or the first difference (exit code 1).

    Example: `tilewise verify examples/train.toml --mesh dp=2,tp=2` and `tilewise verify
    examples/train.toml --mesh pp=2,dp=2 --schedule zero_bubble`
    """
    from tilewise.core import DeviceMesh
    from tilewise.train import compare_strategy, load_config

    console = make_console(stderr=True)
    with before_work():  # if memory runs out, it does when the two runs are planned and allocated
        report = compare_strategy(
            load_config(config),
            DeviceMesh.parse(mesh),
            steps,
            lambda text: console.print(text, highlight=False, markup=False),
            schedule=schedule,
            chunks=chunks,
            microbatches=microbatches,
        )
    print(report.text)
    if not report.equal:
        raise typer.Exit(1)


@app.command()
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face directory (config.json is enough), a GGUF file, owner/name on the hub, or a training "
            "configuration (.toml); with --graph also a graph that ComputeGraph.save wrote (.json).",
            show_default=False,
        ),
    ],
    graph: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the graph into this file instead, a page (.html) or Mermaid text (.mmd): for a model "
            "its decoding graph, for an encoder its encoding graph, for a training configuration the graph of a step.",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the plan of a training configuration (.toml) into this page (.html) instead: memory over a "
            "step, the calls, and the data that each reads from other devices.",
            show_default=False,
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of each device, such as 64G. Default: this machine's, for all devices together.",
            show_default=False,
        ),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=1e-6,
            max=1e9,
            help="Speed of each device, in 10^12 operations per second. Default: measured here.",
            show_default=False,
        ),
    ] = None,
    bandwidth_gbps: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=1e-6,
            max=1e9,
            help="Memory bandwidth of each device, in 10^9 bytes per second. Default: measured here.",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[str | None, REVISION] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Override a setting of a training configuration; may be repeated.",
        ),
    ] = None,
    *,
    engine: Annotated[Values, Options(EngineSettings, only=("ignore_config_fields",))],
) -> None:
    """Show what a model or a training run needs, what fits in memory, and the highest possible
    speed.

    For a model: architecture, parameters, bytes per dtype, bytes of KV cache per token, the context
    that fits in memory, and an upper bound of the generation speed. Of files of weights,
    only the headers are read (and the output head, to see whether it is a copy of a tied embedding).
    Without weights, parameters are counted from the configuration.

    For a training configuration: memory per device by category, and settings that make it fit if it
    does not; FLOPs and bytes of a step; an estimate of its time, and whether computation, memory or
    communication takes most of it.

    With `--graph`, draws the model's graph: equal layers are one box, each kind of layer can be
    expanded, and ops have their shapes and attributes.

    Example: `tilewise inspect demo/model` and `tilewise inspect examples/train.toml --device-memory
    64G`
    """
    from tilewise.checkpoint import find_model
    from tilewise.cli.estimate import DeviceProperties, describe_training
    from tilewise.cli.inspect import describe_model
    from tilewise.cli.picture import draw_graph, plan_of_training
    from tilewise.files.writing import replace_text

    ignored = EngineSettings(**engine).ignore_config_fields
    is_file = Path(model).suffix.lower() in (".toml", ".json")
    source = Path(model) if is_file and revision is None else find_model(model, revision)
    if graph is not None:
        with before_work():
            # render everything before anything is written
            text = draw_graph(source, graph, ignored, settings or ())
        replace_text(graph, text)
        _print_path(graph)
    if plan is not None:
        with before_work():
            planned = plan_of_training(source, plan, settings or ())
        planned.save_picture(plan)
        _print_path(plan)
    if graph is not None or plan is not None:
        return
    memory = size(device_memory, "--device-memory")
    if memory is not None and memory < _LEAST_DEVICE_MEMORY:
        text = f"{device_memory!r} is less than 1M: add a unit, such as {device_memory}G"
        raise typer.BadParameter(text, param_hint="--device-memory")
    device = DeviceProperties(memory, peak_tflops, bandwidth_gbps)
    with before_work():
        if source.suffix.lower() == ".toml":
            lines = list(describe_training(source, device, make_console(stderr=True), settings or ()))
        else:  # print all lines, or only an error
            lines = list(describe_model(source, device, ignored))
    print("\n".join(lines))


@app.command()
def evaluate(
    model: Annotated[str, MODEL],
    data: Annotated[
        str,
        typer.Argument(
            help="A text file or directory, or JSON lines or Parquet with a field `text`; `stdlib`: the sources of "
            "this Python.",
            show_default=False,
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(help="Maximum tokens of a window. Default: the model's context, at most 1024."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Windows at a time.")] = 8,
    revision: Annotated[str | None, REVISION] = None,
    *,
    engine: Annotated[
        Values,
        Options(
            EngineSettings, only=(*_SMALL_ENGINE, "quantization", "lora_modules"), defaults={"dtype": "bf16"}
        ),
    ],
) -> None:
    """Measure how well a model predicts files: perplexity per token, bits per byte.

    Every token of every file is predicted once, with at least half a window of tokens before it as
    context (at the start of a file, all there are). The result does not depend on `--tp`.

    Example: `tilewise evaluate demo/model ~/my-texts`
    """
    from tilewise.checkpoint import find_model
    from tilewise.cli.evaluate import evaluate_files

    console = make_console(stderr=True)
    path = find_model(model, revision)
    settings = EngineSettings(**engine)
    score = evaluate_files(
        path,
        data,
        context=context,
        batch=batch,
        tp=settings.tensor_parallel_size,
        dtype=settings.dtype,
        quantization=settings.quantization,
        adapters=settings.adapters(),
        console=console,
        ignore=settings.ignore_config_fields,
    )
    print(f"perplexity {score.perplexity:.4f}, {score.bits_per_byte:.4f} bits per byte")


@app.command()
def encode(
    model: Annotated[str, MODEL],
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts; without any, lines of standard input.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write an array [texts, width] here (NumPy's .npy) instead of lines.")
    ] = None,
    pooling: Annotated[
        str,
        typer.Option(
            help="Pooling of a text's tokens: mean, cls (the first), or auto: that of the model's files, else mean."
        ),
    ] = "auto",
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Scale vectors to length one. Default: as in the model's files.",
        ),
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate", help="Truncate texts that are longer than the context, instead of rejecting them."
        ),
    ] = False,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Texts at a time.")] = 16,
    revision: Annotated[str | None, REVISION] = None,
    *,
    engine: Annotated[Values, Options(EngineSettings, only=_SMALL_ENGINE, defaults={"dtype": "f32"})],
) -> None:
    """Compute vectors of texts with an encoder: a line of JSON per text on standard output.

    A text's vector does not depend on the other texts, on `--tp` or on `--batch`.

    Example: `tilewise encode ~/bert "a sentence" "another" --normalize`
    """
    from tilewise.checkpoint import find_model
    from tilewise.cli.encode import encode_texts

    settings = EngineSettings(**engine)
    encode_texts(
        find_model(model, revision),
        texts,
        out,
        pooling=pooling,
        normalize=normalize,
        truncate=truncate,
        batch=batch,
        tp=settings.tensor_parallel_size,
        dtype=settings.dtype,
        console=make_console(stderr=True),
        ignore=settings.ignore_config_fields,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    """Run a command line, and return its exit code. A mistake is printed as one line."""
    try:
        _make_streams_safe()
        configure_logging()
        code = _run_command(arguments)
        if code == _INTERRUPTED:  # typer converts Ctrl-C to an exit code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output is gone, so nothing more can be printed
        return 1
    except PeerLost as error:
        return _say(str(error), LOST)
    except TilewiseError as error:
        return _say(str(error), 2 if isinstance(error, ValueError) else 1)
    except OSError as error:
        return _say(f"[cli] files must be readable and writable; got {error}; check path and permissions", 1)
    except MemoryError as error:
        return _say(f"[cli] memory must be enough; got {str(error) or 'none left'}; choose smaller sizes", 1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _usage_error(error)


def _run_command(arguments: list[str]) -> object:
    """Run the command, and return its exit code. If a launcher started several processes, the first
    one runs the command, and the others serve it.
    """
    if not is_launched():
        return _call_app(arguments)
    from tilewise.distributed import launched_group

    with launched_group():
        return _call_app(arguments)


def _call_app(arguments: list[str]) -> object:
    """Call the command, and return its exit code. A group without a command shows its help."""
    try:
        return app(arguments, prog_name="tilewise", standalone_mode=False)
    except Exception as error:
        if type(error).__name__ != "NoArgsIsHelpError":
            raise
        print(error.ctx.get_help())  # type: ignore[attr-defined]
        return 0


def _usage_error(error: Exception) -> int:
    """Print typer's error about a wrong argument, with the command that it belongs to, and return
    the exit code.
    """
    text = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "tilewise"
    return _say(f"{text.rstrip('.')}; see `{command} --help`", 2)


def _say(text: str, code: int) -> int:
    """Print one line on standard error, whatever names and values it quotes."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    print(f"tilewise: {cut(line, _MAX_LINE)}", file=sys.stderr)
    return code


def _make_streams_safe() -> None:
    """Replace closed standard streams by empty ones. Escape characters that the console's encoding
    does not have. (Arguments with bytes outside of the encoding are rejected where they are used as
    text.)
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            os.set_inheritable(nowhere, True)  # child programs inherit it
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper) and stream.errors in {"strict", "surrogateescape"} - {errors}:
            with suppress(UnsupportedOperation):  # a caller in Python has already read from it
                stream.reconfigure(errors=errors)


def _print_path(path: Path | None) -> None:
    """Print a path in the system's encoding, so that a shell can use it even if it is not UTF-8."""
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(str(path)) + b"\n")
