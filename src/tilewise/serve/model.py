"""A loaded model: decoding graph with weights, KV cache and workers, tokenizer and generation_config.json.

`ServedModel` owns the graph instance. Settings that are sizes affect memory and speed. Only the dtype,
`quantization`, `quantized_matmul`, `kv_cache_dtype`, and `max_model_len`, which determines RoPE's frequencies in some
models, affect the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise import models
from tilewise.checkpoint import formats_of, load_generation_config, load_tokenizer
from tilewise.core import ResourceError, Validator, choose_dtype, dtype, get_logger
from tilewise.core.limits import available_memory, num_cores
from tilewise.core.sizes import format_bytes
from tilewise.formats import FORMATS
from tilewise.models import BLOCK_SIZE
from tilewise.models.registry import maker_of
from tilewise.serve.scheduler import Limits, num_blocks_for
from tilewise.settings import EngineSettings
from tilewise.strategy import DistributionStrategy

if TYPE_CHECKING:
    from tilewise.checkpoint import Tensor
    from tilewise.models import ModelConfig, StackedAdapters
    from tilewise.session import GraphInstance, Plan

__all__ = ["ENCODER_SETTINGS", "ServedModel", "encoder_settings", "end_ids"]

_FEWEST_ROWS = 16
_USUAL_CACHE_BYTES = 1 << 30
_SHORTEST_CONTEXT = 2048  # a cache that cannot hold this is an error
_SHARE_TO_FILL = 0.9  # share of the available memory, if that decides the size of the cache
_OF_ENCODERS = {
    "tensor_parallel_size": "tp",
    "dtype": "dtype",
    "max_num_seqs": "batch",
    "ignore_config_fields": "ignore_config_fields",
}
ENCODER_SETTINGS = ("runner", *_OF_ENCODERS)
_validate = Validator("serve")


def encoder_settings(call: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings of an engine to those of an `Encoder`.

    Args:
        call: name of the function for error messages.
        settings: fields of `EngineSettings` by name.

    Raises:
        ConfigError: encoders do not have such a setting.
    """
    for name in settings:
        _validate.choice(call, "a setting of an encoder", name, ENCODER_SETTINGS)
    _validate.choice(call, "runner", settings.get("runner", "pooling"), ("generate", "pooling"))
    return {ours: settings[name] for name, ours in _OF_ENCODERS.items() if name in settings}


class ServedModel:
    """A loaded model. Call `close`.

    Args:
        model_dir: Hugging Face directory (config.json, weights, tokenizer files).
        settings: settings of the engine.
        on_progress: called with the number of bytes of weights read so far, and the number of all
            bytes.
        memory_bytes: memory that the model may use, including the KV cache; None for all available
            memory.

    Attributes:
        adapters: number of each adapter by name, from 1 on; 0 stands for the model alone.
        cache_bytes: size of the KV cache over all devices. It is reserved when the model is loaded, and allocated as
            texts fill it.

    Raises:
        ConfigError, CheckpointError: the directory is not a supported model, or a setting is invalid.
        LayoutError: the model cannot be cut over so many devices.
        ResourceError: not enough memory.
    """

    def __init__(
        self,
        model_dir: str | Path,
        settings: EngineSettings,
        on_progress: Callable[[int, int], object] | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        from tilewise.session import GraphInstance  # imports the native module

        _validate.function("engine", "on_progress", on_progress)
        self.settings = settings
        self.config: ModelConfig = models.open(model_dir, ignore=settings.ignore_config_fields)
        maker_of(self.config, "decoding")  # raises for an encoder, which has no KV cache
        self.dtype = choose_dtype(settings.dtype, self.config.dtype)
        self.tokenizer = load_tokenizer(model_dir, self.config.vocab_size)
        uses_file = settings.generation_config
        self.generation_config = (
            load_generation_config(model_dir, self.config.vocab_size) if uses_file else {}
        )
        self.end_ids = end_ids(self.generation_config, self.config)
        self.max_model_len, self.limits = _sizes(self.config, settings, self.dtype)
        kind = f"{self.dtype} {settings.quantization} {settings.quantized_matmul} {settings.kv_cache_dtype}"
        self.name = f"{model_dir} {kind} {self.max_model_len}".encode("utf-8", "surrogatepass")
        is_dummy = settings.load_format == "dummy"
        writes = settings.runner == "generate"
        weights: Mapping[str, Tensor] = {}
        if not is_dummy:
            stored = models.open_weights(model_dir, self.config, with_head=writes)
            weights = models.with_quantization(stored, self.config, settings.quantization)
        paths = settings.adapters()
        self.adapters = {name: number for number, name in enumerate(paths, 1)}
        self._stacked: StackedAdapters | None = None
        if paths:
            loaded = {name: models.load_adapter(path, self.config) for name, path in paths.items()}
            self._stacked = models.stack_adapters(loaded)
        self.stored_dtypes = frozenset(str(tensor.dtype) for tensor in weights.values())
        memory_bytes = available_memory() if memory_bytes is None else memory_bytes
        self._formats: Mapping[str, str] = formats_of(weights) if self.dtype == "bf16" else {}
        self._is_grouped = settings.quantized_matmul == "grouped"
        if self._is_grouped and not any(FORMATS[form].has_grouped_product for form in self._formats.values()):
            get_logger("serve").warning(
                "quantized_matmul grouped has no effect, because no weight has 4 bits in memory (dtype %s)",
                self.dtype,
            )
        plan = self._plan_within(memory_bytes)
        self.max_blocks = num_blocks_for(self.limits.max_context)
        self.cache_bytes = _cache_bytes(plan)
        self.instance: GraphInstance = GraphInstance(plan, memory_limit_bytes=memory_bytes)
        try:
            if is_dummy:
                self.instance.initialize(0, self.config.initializer_range)
            else:
                own = {} if self._stacked is None else self._stacked.weights
                self.instance.load_parameters({**weights, **own}, on_progress=on_progress)
        except BaseException:
            self.instance.close()
            raise

    def close(self) -> None:
        """Stop the devices and free their memory."""
        self.instance.close()

    def _plan(self) -> Plan:
        """Plan the decoding graph for the current limits."""
        plan, self._formats = models.plan_in_formats(
            self._formats, self._plan_with, is_grouped=self._is_grouped
        )
        return plan

    def _plan_with(self, formats: Mapping[str, str]) -> Plan:
        from tilewise.session import ComputeGraph

        settings, limits, stacked = self.settings, self.limits, self._stacked
        adapters = None if stacked is None else stacked.adapters
        graph = ComputeGraph(
            self.config.model_type,
            formats=formats,
            quantized_matmul=settings.quantized_matmul,
            adapters=adapters,
        )
        models.build_decoding_graph(
            graph,
            self.config,
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            limits.num_blocks,
            self.dtype,
            context=self.max_model_len,
            num_positions=limits.max_context,
            max_rows=limits.max_rows,
            with_head=settings.runner == "generate",
            kv_cache_dtype=settings.kv_cache_dtype,
            gates=None if stacked is None else stacked.gates,
        )
        tp, copies = settings.tensor_parallel_size, settings.data_parallel_size
        workers = settings.workers_per_device
        if workers is None and copies > 1:
            workers = max(1, num_cores() // (tp * copies))
        strategy = DistributionStrategy.tensor_parallel(tp) if tp > 1 else DistributionStrategy.single()
        graph.set_distribution(strategy)
        return graph.plan(workers_per_device=workers)

    def _plan_within(self, memory_bytes: int) -> Plan:
        """Plan the decoding graph within the available memory.

        If no setting decides the context or the size of the cache, a cache that does not fit is
        made smaller. This also shortens the longest possible text.

        Raises:
            ResourceError: the plan does not fit. The message names the settings to lower.
        """
        settings, limits = self.settings, self.limits
        is_free = (settings.max_model_len, settings.max_context, settings.kv_cache_memory_bytes) == (
            None,
        ) * 3
        plan = self._plan()
        needed = plan.total_bytes
        excess = needed - int(memory_bytes * (_SHARE_TO_FILL if is_free else 1))
        if excess <= 0:
            return plan
        per_block = _cache_bytes(plan) / limits.num_blocks
        num_blocks = limits.num_blocks - math.ceil(excess / per_block)
        if not is_free or num_blocks * BLOCK_SIZE < min(_SHORTEST_CONTEXT, limits.max_context):
            raise ResourceError(
                "[serve.engine] the weights and the KV cache must fit the available memory; got "
                f"{format_bytes(needed)}, {format_bytes(_cache_bytes(plan))} of them for the cache, with "
                f"{format_bytes(memory_bytes)} available; lower "
                "--max-model-len (max_model_len), --kv-cache-memory (kv_cache_memory_bytes) or --max-num-seqs "
                "(max_num_seqs), or use a smaller model"
            )
        context = min(limits.max_context, num_blocks * BLOCK_SIZE)
        if context < limits.max_context:
            get_logger("serve").warning(
                "a text may have %d positions, because the KV cache of the model's %d would need %s with %s available "
                "for all; set --max-model-len and --kv-cache-memory to change this",
                context,
                limits.max_context,
                format_bytes(num_blocks_for(limits.max_context) * int(per_block)),
                format_bytes(memory_bytes),
            )
        self.limits = replace(limits, num_blocks=num_blocks, max_context=context)
        return self._plan()


def _cache_bytes(plan: Plan) -> int:
    """Size of the KV cache over all devices."""
    return sum(usage["state"] for usage in plan.estimate_memory_usage())


def block_bytes(config: ModelConfig, settings: EngineSettings, dtype_name: str) -> int:
    """Size of a block of the KV cache over all devices."""
    itemsize = dtype(dtype_name).numpy.itemsize
    return int(BLOCK_SIZE * models.kv_bytes_per_token(config, itemsize, settings.kv_cache_dtype))


def _sizes(config: ModelConfig, settings: EngineSettings, dtype_name: str) -> tuple[int, Limits]:
    """The context, and the sizes of a step and of the cache."""
    length = models.default_context(config) if settings.max_model_len is None else settings.max_model_len
    limit = _validate.integer("engine", "max_model_len", length, 1, models.max_context(config))
    length = limit if settings.max_context is None else settings.max_context
    context = _validate.integer("engine", "max_context", length, 1, limit)
    seqs = settings.max_num_seqs
    per_block = block_bytes(config, settings, dtype_name)
    if settings.kv_cache_memory_bytes is None:
        usual = max(_USUAL_CACHE_BYTES // per_block, num_blocks_for(context))
        num_blocks = min(seqs * num_blocks_for(context), usual)
    else:
        num_blocks = max(1, settings.kv_cache_memory_bytes // per_block)
    tokens = max(settings.max_num_batched_tokens, seqs)
    guesses = settings.speculation.num_speculative_tokens if settings.speculation is not None else 0
    rows = max(seqs, min(tokens, max(_FEWEST_ROWS, seqs * (1 + guesses))))
    return limit, Limits(seqs, tokens, rows, num_blocks, context, settings.enable_prompt_pacing)


def end_ids(generation_config: dict[str, Any], config: ModelConfig) -> frozenset[int]:
    """Ids of end tokens, from generation_config.json, or from config.json if that file has none."""
    eos = generation_config.get("eos_token_id")
    if eos is None:
        return frozenset(config.eos_token_ids)
    return frozenset([eos] if isinstance(eos, int) else eos)
