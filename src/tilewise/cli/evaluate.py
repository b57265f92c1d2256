"""`tilewise evaluate`: measures how well a model predicts files."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.cli.before_work import before_work
from tilewise.core import ConfigError, NotFinite, choose_dtype
from tilewise.core.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from tilewise.train import Score

__all__ = ["evaluate_files"]

_LONGEST = 1024  # tokens of a window, if the model supports more


def evaluate_files(
    model_dir: Path,
    data: str,
    *,
    context: int | None,
    batch: int,
    tp: int,
    dtype: str,
    quantization: str | None,
    adapters: Mapping[str, str],
    console: Console,
    ignore: Sequence[str] = (),
) -> Score:
    """Score the files at a path with a model.

    Args:
        model_dir: a Hugging Face directory of a model that generates text.
        data: a text file or a directory; `stdlib` for this Python's own sources.
        context: maximum number of tokens of a window; None for the model's maximum, but at most
            1024.
        batch: number of windows per call.
        tp: number of devices that share every layer.
        dtype: dtype of weights and activations.
        quantization: as `EngineSettings.quantization`.
        adapters: the directory of an adapter by name; at most one.
        console: shows progress.
        ignore: fields of config.json to ignore.

    Raises:
        ConfigError, CheckpointError, LayoutError: the model, the data or an argument is invalid.
            Raised before any work.
        NotFinite: the model's predictions are not finite.
    """
    import tilewise as tw
    from tilewise import models
    from tilewise.checkpoint import load_tokenizer
    from tilewise.data import load_corpus, load_standard_library
    from tilewise.train import score_files, track_work

    with before_work():
        config = models.open(model_dir, ignore=ignore)
        if models.is_encoder(config):
            raise ConfigError(
                f"[cli.evaluate] evaluation needs a model that generates text; got {config.architecture}; give another"
            )
        limit = models.max_context(config)
        width = min(_LONGEST, models.default_context(config)) if context is None else context
        if not 1 <= width <= limit:
            raise ConfigError(
                f"[cli.evaluate] --context must lie in [1, {limit}], the model's context; got {width}; correct it"
            )
        tokenizer = load_tokenizer(model_dir, config.vocab_size)
        start = (
            config.bos_token_id if config.bos_token_id is not None else next(iter(config.eos_token_ids), 0)
        )
        corpus = load_standard_library(0.0) if data == "stdlib" else load_corpus(data, 0.0)
        if len(adapters) > 1:
            raise ConfigError(
                f"[cli.evaluate] --lora must be given once; got {', '.join(adapters)}; evaluate one after the other"
            )
        adapter = next((models.load_adapter(path, config) for path in adapters.values()), None)
        graph = tw.ComputeGraph(
            config.model_type, adapters=None if adapter is None else adapter.layout.adapters
        )
        length = tw.Dim("seq", 1, width)
        models.build_training_graph(graph, config, batch, length, choose_dtype(dtype, config.dtype))
        weights = models.with_quantization(models.open_weights(model_dir, config), config, quantization)
        plan = graph.plan({"tp": tp} if tp > 1 else {})
    started = time.perf_counter()
    with graph.instantiate(plan) as model, track_work(console, "files") as progress:
        model.load_parameters(weights if adapter is None else {**weights, **adapter.weights})
        score = score_files(
            model,
            tokenizer,
            corpus.train,
            batch,
            width,
            start=start,
            end=None,
            vocab_size=config.vocab_size,
            show=progress.show,
        )
    seconds = time.perf_counter() - started
    if not math.isfinite(score.nats):
        raise NotFinite(
            f"[cli.evaluate] losses must be finite; got {score.nats} over all tokens; the weights are damaged, or too "
            "large for the dtype: evaluate in f32"
        )
    console.print(
        f"{len(corpus.train)} files, {format_bytes(score.num_bytes)}, {score.num_tokens:,} tokens in {seconds:.1f} s; "
        f"windows of {width} tokens, each token predicted from at least {width // 2} if a file has them",
        highlight=False,
        markup=False,
    )
    return score
