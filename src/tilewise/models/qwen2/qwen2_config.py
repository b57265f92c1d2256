"""The configuration of Qwen2: biases of queries, keys and values; sliding windows in the upper
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rotary_config import RotaryConfig, layer_kinds

__all__ = ["Qwen2Config", "QwenConfig"]

_validate = Validator("models")


@dataclass(frozen=True)
class QwenConfig(RotaryConfig):
    """The common settings of Qwen2 and Qwen3: the layers with a window.

    Attributes:
        use_sliding_window: whether some layers have one.
        sliding_window: number of positions that their queries attend to.
        max_window_layers: layers below this have full attention, if `layer_types` is missing.
        layer_types: `full_attention` or `sliding_attention` per layer; None: as the fields above
            say.
    """

    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    only: ClassVar[Mapping[str, tuple[object, ...]]] = {"use_mrope": (False,)}

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.truth(self.model_type, "use_sliding_window", self.use_sliding_window)
        _validate.integer(self.model_type, "max_window_layers", self.max_window_layers, 0, 1 << 20)
        slides, window = self.use_sliding_window, self.sliding_window
        if window is not None:
            _validate.integer(
                self.model_type, "sliding_window", window, 0, 1 << 30
            )  # 0 without sliding layers
        rule = "must be set if use_sliding_window is true"
        _validate.require(
            self.model_type,
            not slides or window is not None,
            "sliding_window",
            rule,
            window,
            "correct one of them",
        )
        self.kinds()

    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        window = self.sliding_window if self.use_sliding_window else None
        types = self.layer_types
        if types is None:
            slide = [
                window is not None and i >= self.max_window_layers for i in range(self.num_hidden_layers)
            ]
            types = tuple("sliding_attention" if s else "full_attention" for s in slide)
        return layer_kinds(self, types, window)


@dataclass(frozen=True)
class Qwen2Config(QwenConfig):
    """Sizes and constants of a Qwen2 model; the names are those of Hugging Face's config.json."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Qwen2Model",)

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        return self.as_decoder(self.kinds(), qkv_bias=True)
