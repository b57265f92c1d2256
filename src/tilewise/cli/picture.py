"""`tilewise inspect --graph` writes the graph of a model, a training configuration or a graph file
as one file. `tilewise inspect --plan` writes the plan of a training configuration as a page.

Only configurations and graph files are read, never weights. The suffix of the file to write selects
the format: a page (`.html`) or Mermaid text (`.mmd`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tilewise.core import ConfigError

if TYPE_CHECKING:
    from tilewise.session import ComputeGraph, Plan

__all__ = ["draw_graph", "plan_of_training"]

_FORMS = (".html", ".mmd")
_MOST_CONTEXT = 4096  # of the drawn graph: a picture shows only the shape of position tables
_TOKENS = 256  # of a call, as in generation
_TEXTS = 16  # of a call, as in encoding


class _Drawing(NamedTuple):
    graph: ComputeGraph
    note: str


def draw_graph(source: Path, file: Path, ignore: Sequence[str] = (), settings: Sequence[str] = ()) -> str:
    """The picture of a graph, as the text of a file. Nothing is written.

    Args:
        source: a model's directory or its config.json, a training configuration (.toml), or a graph
            that `ComputeGraph.save` wrote (.json).
        file: the path to which the caller will write the text; .html or .mmd.
        ignore: fields of a model's config.json to ignore.
        settings: overrides of a training configuration, as SECTION.KEY=VALUE.

    Raises:
        ConfigError: the suffix is unknown, or the source is invalid. The message names the file and
            the field.
        PlanError: a graph file is invalid.
    """
    if file.suffix.lower() not in _FORMS:
        raise ConfigError(
            f"[cli.inspect] the file of a graph must end in {' or '.join(_FORMS)}; got {str(file)!r}; "
            "choose a format"
        )
    drawing = _drawing(source, ignore, settings)
    if file.suffix.lower() == ".mmd":
        return drawing.graph.to_mermaid() + "\n"
    from tilewise.observe import render_graph

    return render_graph(drawing.graph.freeze(), f"The graph of {drawing.graph.name}", drawing.note)


def plan_of_training(source: Path, file: Path, settings: Sequence[str] = ()) -> Plan:
    """The plan of a training configuration, even if it does not fit in this machine's memory.
    Nothing is written.

    Args:
        source: a training configuration (.toml).
        file: the path to which the caller will write the plan's page; .html.

    Raises:
        ConfigError: the suffix is unknown, or the source is invalid. The message names the file and
            the field.
        LayoutError, PlanError: the strategy is not possible for this model.
    """
    for path, ending, rule in (
        (file, ".html", "the page of a plan must be"),
        (source, ".toml", "the source of a plan must be"),
    ):
        if path.suffix.lower() != ending:
            raise ConfigError(
                f"[cli.inspect] {rule} a file that ends in {ending}; got {str(path)!r}; "
                "pass a training configuration and a page"
            )
    from tilewise.train import load_config, make_plan

    return make_plan(load_config(source, settings), must_fit=False)[1]


def _drawing(source: Path, ignore: Sequence[str], settings: Sequence[str]) -> _Drawing:
    if source.suffix.lower() == ".toml":
        return _of_training(source, settings)
    if source.suffix.lower() == ".json" and source.name != "config.json":
        from tilewise.session import ComputeGraph

        return _Drawing(ComputeGraph.load(source), "The saved graph.")
    return _of_model(source.parent if source.name == "config.json" else source, ignore)


def _of_training(source: Path, settings: Sequence[str]) -> _Drawing:
    from tilewise.train import load_config, make_graph

    config = load_config(source, settings)
    is_padded = config.data.is_padded
    words = f"up to {config.data.context}" if is_padded else f"{config.data.context}"
    note = f"A training step before gradients are added: {config.num_sequences} sequences of {words} tokens."
    return _Drawing(make_graph(config, is_padded=is_padded), note)


def _of_model(directory: Path, ignore: Sequence[str]) -> _Drawing:
    from tilewise import models
    from tilewise.core import Dim, choose_dtype
    from tilewise.session import ComputeGraph

    config = models.open(directory, ignore=ignore)
    dtype = choose_dtype("auto", config.dtype)
    graph = ComputeGraph(config.model_type)
    context = min(models.max_context(config), _MOST_CONTEXT)
    if models.is_encoder(config):
        models.build_encoding_graph(graph, config, _TEXTS, Dim("seq", 1, context), dtype)
        return _Drawing(graph, f"The encoding of {_TEXTS} texts of up to {context} tokens, in {dtype}.")
    models.build_decoding_graph(
        graph, config, _TOKENS, 1, -(-context // models.BLOCK_SIZE), dtype, context=context
    )
    note = f"Prefill and decoding, up to {_TOKENS} tokens per call, with room for {context} positions, in {dtype}."
    return _Drawing(graph, note)
