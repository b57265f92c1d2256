"""Settings of the engine, each declared once: how a model is loaded and how much it computes and stores at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tilewise.core import KV_CACHE_DTYPES, MAX_DEVICES, MODEL_DTYPES, QUANTIZED_MATMULS, Validator
from tilewise.core.validation import shown
from tilewise.settings.declaration import check_settings, documented, setting

__all__ = ["EngineSettings", "SpeculativeConfig"]

_METHODS = ("ngram", "draft_model")
_MAX_GUESSES = 256
_USUAL_LOOKUP = 5
_MAX_SIZE = 1 << 20
_MAX_BYTES = 1 << 62
_PANEL = "Engine"
_validate = Validator("serve")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of speculative decoding, with vLLM's names and defaults.

    Args:
        num_speculative_tokens: maximum number of guesses per call and text.
        method: `ngram` guesses what followed an earlier occurrence of the last few tokens; `draft_model` guesses the
            tokens of a smaller model. Default: `draft_model` if `model` is set, else `ngram`.
        model: a Hugging Face directory of the smaller model, of the same vocabulary.
        prompt_lookup_max: largest number of last tokens to look up; None: `prompt_lookup_min`, or 5 without it.
        prompt_lookup_min: smallest number of last tokens to look up; None: as `prompt_lookup_max`.

    Raises:
        ConfigError: a value is invalid.
    """

    num_speculative_tokens: int
    method: str | None = None
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        place = "speculative_config"
        if self.model is not None:
            object.__setattr__(self, "model", str(_validate.path(place, "model", self.model)))
        usual = "ngram" if self.model is None else "draft_model"
        object.__setattr__(self, "method", usual if self.method is None else self.method)
        _validate.choice(place, "method", self.method, _METHODS)
        if (self.method == "draft_model") != (self.model is not None):
            got = f"{self.method} {'without' if self.model is None else 'with'} a model"
            _validate.invalid(
                place, "method draft_model needs model, and ngram excludes it", got, "correct one"
            )
        _validate.integer(place, "num_speculative_tokens", self.num_speculative_tokens, 1, _MAX_GUESSES)
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        for name, value in (("prompt_lookup_max", longest), ("prompt_lookup_min", shortest)):
            if value is not None:
                _validate.integer(place, name, value, 1, _MAX_GUESSES)
        longest = (shortest or _USUAL_LOOKUP) if longest is None else longest
        shortest = longest if shortest is None else shortest
        if shortest > longest:
            got = f"{shortest} and {longest}"
            _validate.invalid(
                place, "prompt_lookup_min must not be above prompt_lookup_max", got, "correct one"
            )
        object.__setattr__(self, "prompt_lookup_max", longest)
        object.__setattr__(self, "prompt_lookup_min", shortest)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """From a dictionary.

        Args:
            values: values by the names above.

        Raises:
            ConfigError: as when made, or an unknown name.
        """
        _validate.mapping("engine", "speculative_config", values, "settings")
        for name in values:
            _validate.choice("speculative_config", "a setting", name, [one.name for one in fields(cls)])
        if "num_speculative_tokens" not in values:
            rule, advice = "num_speculative_tokens is required", "add it, 5 for example"
            _validate.invalid("speculative_config", rule, "none", advice)
        return cls(**values)


@documented
@dataclass(frozen=True)
class EngineSettings:
    """How a model is loaded and how much it computes and stores at a time.

    Only `dtype`, `quantization`, `quantized_matmul`, `kv_cache_dtype`, an adapter that a request names and, if RoPE is
    scaled as `dynamic` or `longrope`, `max_model_len` affect the text. All other settings affect memory and speed.

    Args:

    Raises:
        ConfigError: a value outside its range.
    """

    tensor_parallel_size: int = setting(
        1,
        "Number of devices that share every layer (1, 2, 4, ...).",
        low=1,
        high=MAX_DEVICES,
        options=("--tensor-parallel-size", "--tp", "-tp"),
        panel=_PANEL,
    )
    data_parallel_size: int = setting(
        1,
        "Number of copies of the model, each with devices of its own, that share the requests.",
        low=1,
        high=MAX_DEVICES,
        options=("--data-parallel-size", "--dp", "-dp"),
        panel=_PANEL,
    )
    dtype: str = setting(
        "auto",
        "Dtype of weights and activations: bf16 or bfloat16; f32, float32 or fp32; auto: that of config.json if "
        "it is bf16 or f32, otherwise bf16.",
        choices=("auto", *MODEL_DTYPES),
        panel=_PANEL,
        metavar="TYPE",
    )
    quantization: str | None = setting(
        None,
        "Quantise the weights of products while they are loaded, to 8 or 4 bits with one scale per 32 inputs (the "
        "numbers of llama.cpp's Q8_0 and Q4_0) or per 128. Norms, biases and embeddings stay. For a model whose files "
        "are not quantised.",
        choices=("int8", "int4", "int8:128", "int4:128"),
        panel=_PANEL,
        metavar="FORMAT",
        default_text="as in the files",
    )
    quantized_matmul: str = setting(
        "exact",
        "exact: dequantise weights to bf16 before products; grouped: multiply codes of 4 bits and scale the sums of 32 "
        "products in fp32, which is faster for small batches, slower for long prompts, and differs in the last bits. "
        "Weights of other sizes are not affected.",
        choices=QUANTIZED_MATMULS,
        panel=_PANEL,
        metavar="HOW",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "auto: the KV cache has the dtype of the model; int8: 8 bits per number and a scale for every position and "
        "head, which holds nearly twice as many tokens in the same memory.",
        choices=KV_CACHE_DTYPES,
        panel=_PANEL,
        metavar="TYPE",
    )
    max_model_len: int | None = setting(
        None,
        "Context: maximum number of tokens of prompt and text together. If RoPE is scaled as `dynamic` or "
        "`longrope`, it also determines the frequencies, so the text depends on it.",
        low=1,
        high=1 << 62,
        panel=_PANEL,
        reader="size",
        default_text="that of config.json",
    )
    max_context: int | None = setting(
        None,
        "Maximum number of tokens of one text in the KV cache, if less than max_model_len. A smaller value saves "
        "memory and, unlike max_model_len, never affects RoPE.",
        low=1,
        high=1 << 62,
        on_command_line=False,
        default_text="max_model_len",
    )
    max_num_seqs: int = setting(
        64,
        "Maximum number of texts generated at a time; others wait. For an encoder: texts per call.",
        low=1,
        high=_MAX_SIZE,
        panel=_PANEL,
        default_text="64, for an encoder 16",
    )
    max_num_batched_tokens: int = setting(
        256,
        "Maximum number of tokens of one model call; longer prompts are read in chunks. Raised to max_num_seqs "
        "if that is larger.",
        low=1,
        high=_MAX_SIZE,
        panel=_PANEL,
    )
    enable_prompt_pacing: bool = setting(
        True,
        "While texts are generated in the same call, limit the prompt tokens per call, so that these texts are "
        "hardly delayed. False reads as many as fit, which finishes a fixed list of prompts soonest (the default of "
        "`LLM`).",
        on_command_line=False,
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Size of the KV cache over all devices of a copy, for example 2G. It is reserved at the start, and "
        "allocated as texts fill it.",
        low=1,
        high=_MAX_BYTES,
        options=("--kv-cache-memory", "--kv-cache-memory-bytes"),
        panel=_PANEL,
        reader="size",
        default_text="enough for max_num_seqs texts of full length; at most 1G unless one text needs more",
    )
    workers_per_device: int | None = setting(
        None,
        "Number of threads per device.",
        low=1,
        high=_MAX_SIZE,
        panel=_PANEL,
        default_text="the cores divided among the devices",
    )
    enable_prefix_caching: bool = setting(
        True,
        "Keep blocks of prompts and texts in the cache, so that requests with the same beginning share them.",
        options=("--enable-prefix-caching/--no-enable-prefix-caching",),
        panel=_PANEL,
    )
    generation_config: bool = setting(
        True,
        "Use the model's generation_config.json for settings that are not set.",
        options=("--generation-config/--no-generation-config",),
        panel=_PANEL,
    )
    runner: str = setting(
        "generate",
        "generate: the model generates text; pooling: it computes embeddings of prompts, as encoders always do.",
        choices=("generate", "pooling"),
        panel=_PANEL,
    )
    load_format: str = setting(
        "auto",
        "auto: the model's weights; dummy: random weights, only config.json and the tokenizer are read.",
        choices=("auto", "dummy"),
        panel=_PANEL,
        metavar="FORMAT",
    )
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = setting(
        None,
        "Speculative decoding, as `SpeculativeConfig` or its fields, for example "
        '{"num_speculative_tokens": 4, "prompt_lookup_max": 3}. It does not change the text.',
        panel=_PANEL,
        metavar="JSON",
        reader="json",
        default_text="off",
    )
    lora_modules: Sequence[str] = setting(
        (),
        "Adapters in PEFT's form, each as NAME=PATH. A request names one as its model (in Python: the field `lora` of "
        "a prompt); other requests use the model alone. A text does not depend on other adapters.",
        options=("--lora", "--lora-modules"),
        panel=_PANEL,
        metavar="NAME=PATH",
        default_text="no adapter",
    )
    ignore_config_fields: Sequence[str] = setting(
        (),
        "Unsupported fields of config.json to ignore because they do not affect the computation.",
        options=("--ignore-config-field",),
        panel=_PANEL,
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        check_settings(self, EngineSettings, _validate, "engine")
        if self.quantization is not None and self.load_format == "dummy":
            rule, advice = "quantization needs weights from files", "remove one of the settings"
            _validate.invalid("engine", rule, "load_format 'dummy'", advice)
        self.adapters()
        speculative = self.speculative_config
        if speculative is not None and not isinstance(speculative, SpeculativeConfig):
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(speculative))

    def adapters(self) -> dict[str, str]:
        """The paths of adapters by name.

        Raises:
            ConfigError: an entry of `lora_modules` is not NAME=PATH, or a name comes twice.
        """
        paths: dict[str, str] = {}
        for entry in _validate.sequence("engine", "lora_modules", self.lora_modules, "NAME=PATH"):
            name, _, path = entry.partition("=") if isinstance(entry, str) else ("", "", "")
            if not name.isprintable() or not name or not path:
                rule, advice = "lora_modules must be NAME=PATH", "write --lora pirate=runs/pirate/adapter"
                _validate.invalid("engine", rule, shown(entry), advice)
            if name in paths:
                rule = "every adapter of lora_modules must have a name of its own"
                _validate.invalid("engine", rule, f"{name!r} for {paths[name]} and {path}", "rename one")
            paths[name] = path
        if paths and self.load_format == "dummy":
            rule, advice = "adapters need weights from files", "remove one of the settings"
            _validate.invalid("engine", rule, "load_format 'dummy'", advice)
        return paths

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The settings of speculative decoding."""
        config = self.speculative_config
        assert config is None or isinstance(config, SpeculativeConfig)  # converted by __post_init__
        return config
