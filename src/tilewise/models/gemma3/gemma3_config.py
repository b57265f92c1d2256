"""The configuration of Gemma 3 for text: like Gemma 2, with norms of queries and keys, five
sliding-window layers per full-attention layer, and rotary positions of two bases. It also reads the
text part of configurations of models with images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tilewise.core.dtypes import MAX_F32
from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rope import SLOWEST, Rope
from tilewise.models.decoder.rotary_config import layer_kinds
from tilewise.models.fields import WITHOUT_EFFECT
from tilewise.models.gemma2.gemma2_config import GemmaConfig

__all__ = ["Gemma3Config"]

_validate = Validator("models")

_TEXT = "text_config"
# fields of models with images, next to `text_config`, that describe images
_IMAGES = frozenset(
    (
        "vision_config",
        "mm_tokens_per_image",
        *(
            f"{token}_{kind}"
            for token in ("boi_token", "eoi_token", "image_token")
            for kind in ("id", "index")
        ),
    )
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# the format's own values of fields that these files may omit: gemma-3-4b-it has neither
_OMITTED = {"vocab_size": 262_208, "num_attention_heads": 8}


@dataclass(frozen=True)
class Gemma3Config(GemmaConfig):
    """Settings of Gemma 3 for text, with the names of Hugging Face's config.json.

    Attributes:
        rope_theta: base of the wavelengths of layers with full attention, which `rope_scaling`
            scales.
        rope_local_base_freq: base of the wavelengths of sliding layers.
        sliding_window_pattern: every n-th layer has full attention, if `layer_types` is missing.
    """

    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    sliding_window_pattern: int = 6

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Gemma3TextModel",)
    containers: ClassVar[Mapping[str, str]] = {"gemma3": "Gemma3ForConditionalGeneration"}

    def __post_init__(self) -> None:
        _validate.integer(self.model_type, "sliding_window_pattern", self.sliding_window_pattern, 1, 1 << 20)
        super().__post_init__()
        _validate.number(self.model_type, "rope_local_base_freq", self.rope_local_base_freq, SLOWEST, MAX_F32)

    @classmethod
    def _unpacked(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The text part as the content of a text model's file."""
        family, text = cls.model_type, data.get(_TEXT)
        rule, advice = "must have the fields of the text model", "give its config.json"
        _validate.require(family, isinstance(text, Mapping), _TEXT, rule, text, advice)
        fields = {**_OMITTED, **(text if isinstance(text, Mapping) else {})}
        kind, place = fields.pop("model_type", None), f"{_TEXT}.model_type"
        _validate.require(family, kind in (None, family), place, f"must be {family}", kind, "correct it")
        fields.pop("architectures", None)
        cap, rule = "final_logit_softcapping", "must be null, because models with images do not cap logits"
        _validate.require(
            family, fields.get(cap) is None, f"{_TEXT}.{cap}", rule, fields.get(cap), "remove it"
        )
        # fields without effect may differ, as each config class has its own defaults; token ids above
        # are those of the whole model
        unread = {"model_type", "architectures", _TEXT, *_IMAGES, *WITHOUT_EFFECT}
        for name, value in {"tie_word_embeddings": True, **data}.items():
            if name in _TOKENS and value is not None:
                fields[name] = value
            elif name not in unread:
                fields[name] = cls.agreed_value(name, value, f"{_TEXT}.{name}", fields.get(name))
        return fields

    @classmethod
    def _adapted(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = dict(data)
        name, hidden = (
            "sliding_window_pattern",
            "_sliding_window_pattern",
        )  # the name that transformers 5 writes
        data[name] = cls.agreed_value(hidden, data.pop(hidden, None), name, data.get(name))
        parameters = data.get("rope_parameters")
        if isinstance(parameters, Mapping) and {*parameters} & {"full_attention", "sliding_attention"}:
            data = _flattened(cls, data, parameters)
        return super()._adapted(data)

    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer; sliding ones have their own RoPE."""
        types = self.every(self.sliding_window_pattern) if self.layer_types is None else self.layer_types
        kinds = layer_kinds(self, types, self.sliding_window)
        return tuple(replace(kind, rope=0 if kind.window is None else 1) for kind in kinds)

    @property
    def decoder(self) -> Decoder:
        """The computation of the model."""
        local = Rope(self.rope_local_base_freq, self.max_position_embeddings)
        ropes = (self.rope(), local)
        longest = self.max_position_embeddings  # it includes the scaling of RoPE
        return self.as_gemma(self.kinds(), qk_norm="head", ropes=ropes, max_positions=longest)


def _flattened(
    cls: type[Gemma3Config], data: dict[str, Any], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """`rope_parameters` by kind of layer, as transformers 5 writes them, converted to the earlier
    fields.
    """
    family = cls.model_type
    kinds = ("full_attention", "sliding_attention")
    for name in parameters:
        _validate.require(
            family, name in kinds, "rope_parameters", f"must have {' and '.join(kinds)}", name, "correct it"
        )
    local = parameters.get("sliding_attention")
    local = {} if local is None else local
    _validate.require(
        family,
        isinstance(local, Mapping),
        "rope_parameters.sliding_attention",
        "must be a dictionary",
        local,
        "correct it",
    )
    others = {
        k: v for k, v in local.items() if k not in ("rope_theta", "rope_type", "type") and v is not None
    }
    is_plain = not others and local.get("rope_type", local.get("type")) in (None, "default")
    rule = "must have a rope_theta and no scaling"
    _validate.require(
        family, is_plain, "rope_parameters.sliding_attention", rule, dict(local), "others are not supported"
    )
    flat = {**data, "rope_parameters": parameters.get("full_attention")}
    name = "rope_local_base_freq"
    place = "rope_parameters.sliding_attention.rope_theta"
    flat[name] = cls.agreed_value(name, data.get(name), place, local.get("rope_theta"))
    return flat
