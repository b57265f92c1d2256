"""The common part of the configurations of decoders with rotary positions. Families add their own
choices.

It reads both notations of RoPE settings (`rope_theta` with `rope_scaling`, and `rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewise.core.dtypes import MAX_F32, MIN_F32
from tilewise.core.validation import Validator
from tilewise.models.decoder.architecture import Decoder, LayerKind
from tilewise.models.decoder.rope import ORIGINAL, SCALING_FIELDS, SLOWEST, Rope, checked_scaling
from tilewise.models.model_config import ModelConfig

__all__ = ["ACTIVATIONS", "MAX_HEAD_DIM", "RotaryConfig", "layer_kinds"]

_validate = Validator("models")

MAX_HEAD_DIM = 1024  # of attention's kernels
_SCALINGS = ("rope_scaling", "rope_parameters")  # two names of one field

# Names of activations in `hidden_act` and in the graph.
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class RotaryConfig(ModelConfig):
    """A decoder with rotary positions and RMS norms.

    Attributes:
        num_key_value_heads: 0 means one per query head.
        head_dim: 0 means `hidden_size / num_attention_heads`.
        hidden_act: the MLP's activation.
        rms_norm_eps: of all norms.
        rope_theta: base of the wavelengths.
        rope_scaling: None, or their scaling (`decoder/rope.py`).
    """

    num_key_value_heads: int = 0
    head_dim: int = 0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None

    # Features that these decoders always have: a file that disables one describes another model.
    only: ClassVar[Mapping[str, tuple[object, ...]]] = dict.fromkeys(
        (
            "use_rope",
            "use_rotary",
            "use_rotary_emb",
            "use_rms_norm",
            "use_rmsnorm",
            "gated_mlp",
            "use_gated_mlp",
        ),
        (True,),
    )
    # some files have it; transformers ignores it
    without_effect: ClassVar[frozenset[str]] = frozenset(("type_vocab_size",))

    def __post_init__(self) -> None:
        family = self.model_type
        for name in ("num_key_value_heads", "head_dim", "num_attention_heads", "hidden_size"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            _validate.require(family, is_count, name, "must be an integer of at least 0", value, "correct it")
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.head_dim:
            _validate.require(
                family,
                self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads == 0,
                "hidden_size",
                "must divide by num_attention_heads",
                f"{self.hidden_size} over {self.num_attention_heads}",
                "set head_dim, or choose sizes that divide",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        super().__post_init__()
        _validate.require(
            family,
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_attention_heads",
            "must divide by num_key_value_heads",
            f"{self.num_attention_heads} over {self.num_key_value_heads}",
            "choose a divisor",
        )
        advice = "choose an even size (RoPE rotates pairs)"
        _validate.require(family, self.head_dim % 2 == 0, "head_dim", "must be even", self.head_dim, advice)
        rotary, rule = self.rotary_dim, "must rotate an even number of elements of a head"
        is_paired = rotary >= 2 and rotary % 2 == 0
        _validate.require(family, is_paired, "partial_rotary_factor", rule, rotary, advice)
        _validate.choice(family, self.spelled("hidden_act"), self.hidden_act, ACTIVATIONS)
        _validate.number(family, "rms_norm_eps", self.rms_norm_eps, MIN_F32, MAX_F32)
        _validate.number(family, "rope_theta", self.rope_theta, SLOWEST, MAX_F32)
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", self.checked(self.rope_scaling, self.rope_theta))

    def checked(self, scaling: Mapping[str, Any], theta: float) -> dict[str, Any]:
        """A scaling of this model's RoPE, in one notation and with valid numbers."""
        return checked_scaling(scaling, theta, self.rotary_dim, self.max_position_embeddings, self.model_type)

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that are rotated."""
        return self.head_dim

    @classmethod
    def limits(cls) -> Mapping[str, int]:
        """Of heads."""
        return {"num_key_value_heads": 1024, "head_dim": MAX_HEAD_DIM}

    @classmethod
    def _check_ignored(cls, ignore: Collection[str], computed: Collection[str]) -> None:
        super()._check_ignored(ignore, {*computed, *_SCALINGS})

    @classmethod
    def _without_unknown_nested(
        cls, data: dict[str, Any], ignore: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, object]]:
        unknown: dict[str, object] = {}
        ignored = {name.partition(".")[2] for name in ignore if name.partition(".")[0] in _SCALINGS}

        def known_fields(place: str, scaling: Mapping[str, Any]) -> dict[str, Any]:
            fields: dict[str, Any] = {}
            for key, value in scaling.items():
                if isinstance(value, Mapping):  # the entry of one kind of layer
                    fields[key] = known_fields(f"{place}.{key}", value)
                elif key in SCALING_FIELDS:
                    fields[key] = value
                elif key not in ignored:
                    unknown[f"{place}.{key}"] = value
            return fields

        nested = {
            key: known_fields(key, data[key]) for key in _SCALINGS if isinstance(data.get(key), Mapping)
        }
        return {**data, **nested}, unknown

    @classmethod
    def _adapted(cls, data: dict[str, Any]) -> dict[str, Any]:
        original = None if ORIGINAL in cls.__dataclass_fields__ else data.pop(ORIGINAL, None)
        partial_name = "partial_rotary_factor"
        partial = data.pop(partial_name, None)
        scaling, parameters = data.get("rope_scaling"), data.pop("rope_parameters", None)
        if isinstance(parameters, Mapping) and isinstance(scaling, Mapping):
            same = {**scaling, "rope_theta": None} == {**parameters, "rope_theta": None}
            rule, got = "must equal rope_parameters", "different values"
            _validate.require(cls.model_type, same, "rope_scaling", rule, got, "remove one of them")
        one = parameters if parameters is not None else scaling
        if isinstance(one, Mapping):
            one = dict(one)
            theta = one.pop("rope_theta", None)
            data["rope_theta"] = cls.agreed_value(
                "rope_theta", data.get("rope_theta"), "rope_parameters.rope_theta", theta
            )
            nested = one.pop(partial_name, None)
            partial = cls.agreed_value(partial_name, partial, f"rope_parameters.{partial_name}", nested)
            kind = one.get("rope_type", one.get("type", "default"))
            one = None if kind == "default" else one
        if partial_name in cls.__dataclass_fields__:
            data[partial_name] = partial
        else:
            rule, advice = "must be 1", "others are not supported"
            _validate.require(cls.model_type, partial in (None, 1), partial_name, rule, partial, advice)
        if original is not None and isinstance(one, Mapping):  # without scaling it has no effect
            place = f"rope_scaling.{ORIGINAL}"
            one = {**one, ORIGINAL: cls.agreed_value(ORIGINAL, original, place, one.get(ORIGINAL))}
        data["rope_scaling"] = one
        return super()._adapted(data)

    def rope(self) -> Rope:
        """The rotary positions of `rope_theta` and `rope_scaling`."""
        return Rope(self.rope_theta, self.max_position_embeddings, self.rope_scaling)

    def as_decoder(self, layers: tuple[LayerKind, ...], **choices: Any) -> Decoder:
        """The decoder with these sizes and a family's own choices."""
        ropes = choices.pop("ropes", (self.rope(),))
        longest = choices.pop("max_positions", max(rope.longest_context for rope in ropes))
        return Decoder(
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            longest,
            layers,
            ropes,
            tied_head=self.tie_word_embeddings,
            norm_eps=self.rms_norm_eps,
            activation=ACTIVATIONS[self.hidden_act],
            **choices,
        )


def layer_kinds(
    config: RotaryConfig, layer_types: tuple[str, ...] | None, window: int | None
) -> tuple[LayerKind, ...]:
    """The kind of every layer, from its name: `full_attention` or `sliding_attention`.

    Args:
        config: of the model.
        layer_types: names for every layer, from config.json; None: all have full attention.
        window: of sliding layers.

    Raises:
        ConfigError: the number of layers is wrong, a kind is unknown, or a sliding layer has no
            window.
    """
    family, count = config.model_type, config.num_hidden_layers
    names = ("full_attention",) * count if layer_types is None else layer_types
    _validate.require(
        family,
        isinstance(names, tuple | list),
        "layer_types",
        "must be a tuple of names",
        names,
        "correct it",
    )
    rule = f"must name {count} layers, the value of num_hidden_layers"
    _validate.require(
        family, len(names) == count, "layer_types", rule, f"{len(names)}", "correct one of them"
    )
    for name in names:
        _validate.choice(family, "layer_types", name, ("full_attention", "sliding_attention"))
    slides = "sliding_attention" in names
    rule = "must be set if layer_types has sliding_attention"
    _validate.require(
        family, not slides or window is not None, "sliding_window", rule, None, "correct one of them"
    )
    if window is not None:
        _validate.integer(family, "sliding_window", window, 1, 1 << 30)
    return tuple(LayerKind(window if name == "sliding_attention" else None) for name in names)
