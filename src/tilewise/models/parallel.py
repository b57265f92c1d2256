"""`ParallelModelBuilder`: any family's graph, its layers described next to one another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from tilewise.core.collector import collector_paused
from tilewise.core.errors import ShapeError
from tilewise.core.progress import Progress
from tilewise.core.validation import Validator
from tilewise.graph.parallel import LayerSpec, ParallelGraphBuilder, SpecHandle
from tilewise.models.model_config import ModelConfig
from tilewise.models.parts import STREAM, ModelParts
from tilewise.models.registry import model_parts
from tilewise.nn import GraphBuilder

__all__ = ["ParallelModelBuilder"]

_validate = Validator("models", ShapeError)
Specs = Sequence[LayerSpec]


class ParallelModelBuilder:
    """Builds the graph that `models.build_training_graph`, `build_decoding_graph` or `build_encoding_graph` builds, to
    the same digest, for any number of threads.

    Args:
        config: the model, or its parts (`ModelParts`).
        purpose: `training`, `decoding` or `encoding`; not used for `ModelParts`.
        sizes: the arguments of that function after the configuration, by name: `batch=8, seq=128`.
        threads: that describe layers.
        progress: receives the phases.

    Raises:
        ConfigError, ShapeError: as that function.

    Examples:
        >>> from tilewise.models.llama import LlamaConfig
        >>> config = LlamaConfig(64, 32, 64, 2, num_attention_heads=4, num_key_value_heads=2)
        >>> graph = GraphBuilder("small")
        >>> ParallelModelBuilder(config, "training", batch=2, seq=8).build(graph)
        >>> [op.op for op in graph.freeze().ops]
        ['embedding', 'call', 'call', 'rms_norm', 'linear', 'cross_entropy']
    """

    def __init__(
        self,
        config: ModelConfig | ModelParts,
        purpose: str = "training",
        *,
        threads: int = 2,
        progress: Progress | None = None,
        **sizes: Any,
    ) -> None:
        is_divided = isinstance(config, ModelParts)
        self.parts = config if isinstance(config, ModelParts) else model_parts(config, purpose, **sizes)
        if is_divided and sizes:
            _validate.invalid(
                "ParallelModelBuilder", "ModelParts already have sizes", ", ".join(sizes), "remove them"
            )
        self.builder = ParallelGraphBuilder(threads, progress=progress)

    def build(self, graph: GraphBuilder) -> None:
        """Write the model into an empty graph; all of it or nothing."""
        groups = (
            [self.create_layers()]
            if self.parts.caches is None
            else [self.create_kv_caches(), self.create_layers()]
        )
        self.assemble(graph, *groups)

    def create_kv_caches(self) -> Future[Specs]:
        """Have the KV caches of all layers described.

        Raises:
            ShapeError: the model has none.
        """
        if self.parts.caches is None:
            _validate.invalid(
                "create_kv_caches",
                "the model must have KV caches (purpose decoding)",
                "one without",
                "remove the call",
            )
        return self.builder.specify(self._describe_caches, range(self.parts.num_layers), kind="kv_cache")

    def create_layers(self) -> Future[Specs]:
        """Have all layers described."""
        return self.builder.specify(self._describe_layer, range(self.parts.num_layers))

    def assemble(self, graph: GraphBuilder, *groups: Future[Specs] | Specs) -> None:
        """Write inputs and embedding, the described layers, and the head into an empty graph; all of it or nothing.

        Raises:
            ShapeError: as `ParallelGraphBuilder.assemble`; or the groups are not all layers, each once.
        """
        _validate.instance("assemble", "the first argument", graph, GraphBuilder, "pass the graph")
        specs = [g.result() if isinstance(g, Future) else g for g in groups]
        with collector_paused(), graph.all_or_nothing():
            with self.builder.progress.phase("assembly"):
                named = self.parts.before(graph)
            results = self.builder.assemble(graph, *specs, named=named)
            if len(results) != self.parts.num_layers:
                _validate.invalid(
                    "assemble",
                    f"a model has {self.parts.num_layers} layers",
                    str(len(results)),
                    "pass create_layers()",
                )
            with self.builder.progress.phase("assembly"):
                last = next(reversed(results.values())) if results else named[STREAM]
                self.parts.after(graph, last, named)

    def _describe_caches(self, handle: SpecHandle, number: int) -> None:
        assert self.parts.caches is not None
        for spec in self.parts.caches(number):
            handle.tensor(
                "state", spec.shape, spec.dtype, name=spec.name, labels=spec.labels, storage=spec.storage
            )

    def _describe_layer(self, handle: SpecHandle, number: int) -> None:
        use = self.parts.layer(number)
        before = self.parts.layer(number - 1).path if number else STREAM
        handle.layer(use.function, before, *use.operands, path=use.path, **use.attrs)
