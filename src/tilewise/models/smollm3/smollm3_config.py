"""The configuration of SmolLM3: like Llama, with layers that have no rotary positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rotary_config import RotaryConfig, layer_kinds

__all__ = ["SmolLM3Config"]

_validate = Validator("models")


@dataclass(frozen=True)
class SmolLM3Config(RotaryConfig):
    """Settings of a SmolLM3 model, with the names of Hugging Face's config.json.

    Attributes:
        no_rope_layers: per layer 1 for rotary positions and 0 for none; None: as
            `no_rope_layer_interval` says. It may name more layers than the model has.
        no_rope_layer_interval: every n-th layer has no rotary positions.
        use_sliding_window: whether some layers have a window.
        sliding_window: number of positions that their queries attend to.
        layer_types: `full_attention` or `sliding_attention` per layer; None: layers without rotary
            positions have the window, if there is one.
        attention_bias: the four projections of attention have biases.
        mlp_bias: the projections of the MLP have biases.
    """

    max_position_embeddings: int = 32768
    num_key_value_heads: int = 4
    tie_word_embeddings: bool = True
    rope_theta: float = 2_000_000.0
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    model_type: ClassVar[str] = "smollm3"
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("SmolLM3Model",)
    without_effect: ClassVar[frozenset[str]] = frozenset(("max_window_layers",))

    def __post_init__(self) -> None:
        super().__post_init__()
        family = self.model_type
        for name in ("use_sliding_window", "attention_bias", "mlp_bias"):
            _validate.truth(family, name, getattr(self, name))
        _validate.integer(family, "no_rope_layer_interval", self.no_rope_layer_interval, 1, 1 << 20)
        if self.sliding_window is not None:  # 0 without sliding layers
            _validate.integer(family, "sliding_window", self.sliding_window, 0, 1 << 30)
        if self.no_rope_layers is not None:
            self._check_rope_layers(self.no_rope_layers)
        self.kinds()

    def _check_rope_layers(self, layers: object) -> None:
        name, count = "no_rope_layers", self.num_hidden_layers
        is_list = isinstance(layers, tuple | list) and len(layers) >= count
        rule = f"must name at least {count} layers, the value of num_hidden_layers"
        _validate.require(self.model_type, is_list, name, rule, layers, "correct one of them")
        for value in layers if isinstance(layers, tuple | list) else ():
            is_flag = type(value) is int and value in (0, 1)
            _validate.require(
                self.model_type, is_flag, name, "must have values of 0 or 1", value, "correct it"
            )

    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        count, interval = self.num_hidden_layers, self.no_rope_layer_interval
        flags = self.no_rope_layers
        if flags is None:
            flags = tuple(int((i + 1) % interval != 0) for i in range(count))
        window = self.sliding_window if self.use_sliding_window else None
        types = self.layer_types
        if types is None:
            slides = [window is not None and not flag for flag in flags[:count]]
            types = tuple("sliding_attention" if s else "full_attention" for s in slides)
        kinds = layer_kinds(self, types, window)
        return tuple(replace(kind, rope=0 if flag else None) for kind, flag in zip(kinds, flags))

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        bias = self.attention_bias
        return self.as_decoder(self.kinds(), qkv_bias=bias, out_bias=bias, mlp_bias=self.mlp_bias)
