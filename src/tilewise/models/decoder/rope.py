"""Rotary positions (RoPE): the frequencies of every supported scaling, and the table of cosines and
sines.

A table is made for a context limit, which is chosen when the graph is defined. With `dynamic` and
`longrope`, the frequencies change if the context grows beyond the trained length. Keys in the KV
cache that were rotated with the old frequencies would then be wrong. So the frequencies depend on
the context limit, never on the length of a text or of the table.

Source: Su et al. 2021; Peng et al. 2023 (YaRN); Ding et al. 2024 (LongRoPE); the Llama 3.1 release;
`transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.dtypes import MAX_F32
from tilewise.core.validation import Validator
from tilewise.models.fields import MAX_POSITIONS

__all__ = ["ORIGINAL", "SCALING_FIELDS", "SLOWEST", "Rope", "checked_scaling", "rope_table"]

_validate = Validator("models")

SLOWEST = 1e-9  # least theta and divisor of frequencies; the angle at the longest position is finite
ORIGINAL = "original_max_position_embeddings"
"""Positions that a model was trained with before its RoPE was scaled."""
# Per type: required fields and optional fields. `finetuned` (in Yarn-Llama-2's files) describes how the model
# was made. transformers computes `linear` and `dynamic` without the original length.
_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), (ORIGINAL, "finetuned")),
    "dynamic": (("factor",), (ORIGINAL, "finetuned")),
    "llama3": (("factor", "high_freq_factor", "low_freq_factor", ORIGINAL), ()),
    "yarn": (
        ("factor",),
        (
            ORIGINAL,
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",
        ),
    ),
    "longrope": (("long_factor", "short_factor"), (ORIGINAL, "factor", "attention_factor")),
}
SCALING_FIELDS = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor")).union(
    *(needed + optional for needed, optional in _FIELDS.values())
)
"""Every field that `rope_scaling` or `rope_parameters` has for some type of scaling."""
# As in transformers, 0 in one of these fields of yarn means that the field is not set.
_UNSET_AT_ZERO = frozenset(("mscale", "mscale_all_dim", "beta_fast", "beta_slow"))
_ALIASES = {"su": "longrope"}  # the name in early files of Phi-3


@dataclass(frozen=True)
class Rope:
    """The rotary positions of some layers.

    Attributes:
        theta: base of the wavelengths.
        max_positions: the model's `max_position_embeddings`.
        scaling: None, or the result of `checked_scaling`.
        rotary_dim: number of elements of a head that are rotated, the first ones; even. None: all.
    """

    theta: float
    max_positions: int
    scaling: Mapping[str, Any] | None = None
    rotary_dim: int | None = None

    @property
    def longest_context(self) -> int:
        """Positions that the model supports."""
        scaling = self.scaling or {}
        kind, factor = scaling.get("rope_type"), min(scaling.get("factor", 1.0), float(MAX_POSITIONS))
        if kind == "dynamic":  # its frequencies change beyond max_positions, whatever the original length
            return min(MAX_POSITIONS, int(self.max_positions * max(1.0, factor)))
        if kind in ("linear", "yarn"):
            stretched = int(scaling.get(ORIGINAL, self.max_positions) * factor)
            return min(MAX_POSITIONS, max(self.max_positions, stretched))
        return self.max_positions

    @property
    def default_context(self) -> int:
        """The default context limit; `dynamic` scales only for a longer one."""
        is_dynamic = self.scaling is not None and self.scaling["rope_type"] == "dynamic"
        return self.max_positions if is_dynamic else self.longest_context


def checked_scaling(
    scaling: Mapping[str, Any], theta: float, rotary_dim: int, max_positions: int, family: str
) -> dict[str, Any]:
    """The fields of a scaling under one spelling, with numbers that its formula can use.

    Args:
        scaling: `rope_scaling` of a config.json.
        theta: the base that it changes.
        rotary_dim: number of elements of a head that are rotated.
        max_positions: the model's `max_position_embeddings`.
        family: `model_type`, for messages.

    Raises:
        ConfigError: an unknown type, a field that is missing, unknown or has an invalid value; names it.
    """
    _validate.require(
        family, isinstance(scaling, Mapping), "rope_scaling", "must be a dictionary", scaling, "correct it"
    )
    values = {key: value for key, value in scaling.items() if value is not None}
    types = {str(values.pop(key)) for key in ("rope_type", "type") if key in values}
    _validate.require(
        family, len(types) == 1, "rope_scaling", "must name one rope_type", sorted(types), "name one"
    )
    kind = _ALIASES.get(*types, *types) if len(types) == 1 else ""
    partial = values.pop("partial_rotary_factor", 1)
    _validate.require(
        family, partial == 1, "partial_rotary_factor", "must be 1", partial, "others are not supported"
    )
    kinds = ", ".join(_FIELDS)
    _validate.require(
        family,
        kind in _FIELDS,
        "rope_scaling",
        f"must have a rope_type of {kinds}",
        kind,
        "others are not supported",
    )
    if kind == "yarn":
        values = {name: value for name, value in values.items() if not _is_unset(name, value)}
    needed, optional = _FIELDS[kind]
    for name in needed:
        rule = f"must have {', '.join(needed)} if its type is {kind}"
        _validate.require(family, name in values, "rope_scaling", rule, f"no {name}", "add it")
    for name in values:
        rule = f"must have only {', '.join((*needed, *optional))} if its type is {kind}"
        _validate.require(family, name in needed or name in optional, "rope_scaling", rule, name, "remove it")
        _check_field(name, values[name], rotary_dim, family)
    if kind == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        place = "rope_scaling.low_freq_factor"
        _validate.require(
            family, low < high, place, "must be below high_freq_factor", f"{low} and {high}", "correct them"
        )
    if kind == "yarn":
        fast, slow = values.get("beta_fast", 32), values.get("beta_slow", 1)
        place = "rope_scaling.beta_slow"
        _validate.require(
            family, slow < fast, place, "must be below beta_fast", f"{slow} and {fast}", "correct them"
        )
        _validate.require(
            family, theta > 1, "rope_theta", "must be above 1 if rope_scaling is yarn", theta, "correct it"
        )
    if kind in ("yarn", "longrope"):
        _validate.integer(family, f"rope_scaling.{ORIGINAL}", values.get(ORIGINAL, max_positions), 2, 1 << 30)
    return {"rope_type": kind, **values}


def _is_unset(name: str, value: object) -> bool:
    return name in _UNSET_AT_ZERO and value == 0 and not isinstance(value, bool)


def _check_field(name: str, value: object, rotary_dim: int, family: str) -> None:
    place = f"rope_scaling.{name}"
    if name == ORIGINAL:
        _validate.integer(family, place, value, 2, 1 << 30)
    elif name in ("truncate", "finetuned"):
        _validate.require(
            family, isinstance(value, bool), place, "must be true or false", value, "correct it"
        )
    elif name in ("long_factor", "short_factor"):
        rule = f"must be a list of {rotary_dim // 2} numbers, one per rotated pair of a head"
        is_list = isinstance(value, list | tuple) and len(value) == rotary_dim // 2
        _validate.require(family, is_list, place, rule, value, "correct it")
        for number in value if isinstance(value, list | tuple) else ():
            _validate.number(family, place, number, SLOWEST, MAX_F32)
    else:
        _validate.number(family, place, value, SLOWEST, MAX_F32)


def rope_table(rope: Rope, head_dim: int, num_positions: int, context: int) -> NDArray[np.float32]:
    """Cosines and sines `[num_positions, n]` fp32: the first half cosines, the second sines; `n` is
    `rope.rotary_dim`, or `head_dim` if all elements are rotated.

    Args:
        rope: of the layers.
        head_dim: size of a head, even.
        num_positions: rows of the table.
        context: the limit of positions, which `dynamic` and `longrope` choose their frequencies by.
    """
    # fp32 for frequencies, angles and cosines, as in PyTorch, so that texts are equal
    frequency, factor = _frequencies(rope, rope.rotary_dim or head_dim, context)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequency.astype(np.float32)[None, :]
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return (table * np.float32(factor)).astype(np.float32)


def _frequencies(rope: Rope, rotary_dim: int, context: int) -> tuple[NDArray[np.float64], float]:
    """Angles per position of each pair, and the factor of cosines and sines."""
    half, scaling = rotary_dim // 2, rope.scaling or {}
    exponent = np.arange(half, dtype=np.float64) / half
    plain = rope.theta**-exponent
    kind = scaling.get("rope_type")
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "dynamic":
        longest, factor = max(context, rope.max_positions), scaling["factor"]
        grown = factor * longest / rope.max_positions - (factor - 1)
        power = rotary_dim / (rotary_dim - 2) if rotary_dim > 2 else 1.0
        return (rope.theta * grown**power) ** -exponent, 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(rope, plain, scaling)
    if kind == "longrope":
        original = scaling.get(ORIGINAL, rope.max_positions)
        chosen = scaling["long_factor" if context > original else "short_factor"]
        factor = scaling.get("factor", rope.max_positions / original)
        stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return plain / np.array(chosen, np.float64), scaling.get("attention_factor", stretched)
    return plain, 1.0


def _llama3(plain: NDArray[np.float64], scaling: Mapping[str, Any]) -> NDArray[np.float64]:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    old = scaling[ORIGINAL]
    wavelength = 2 * math.pi / plain
    smooth = np.clip((old / wavelength - low) / (high - low), 0.0, 1.0)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = np.where(wavelength > old / low, plain / factor, blended)
    return np.where(wavelength < old / high, plain, scaled)


def _yarn(
    rope: Rope, plain: NDArray[np.float64], scaling: Mapping[str, Any]
) -> tuple[NDArray[np.float64], float]:
    """Long wavelengths are scaled, short ones unchanged, those in between blended."""
    half, factor = len(plain), scaling["factor"]
    original = scaling.get(ORIGINAL, rope.max_positions)

    def pair_with(rotations: float) -> float:
        return half * math.log(original / (rotations * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_with(scaling.get("beta_fast", 32)), pair_with(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001  # as in transformers, so that the ramp has a slope
    stretched = np.clip((np.arange(half) - low) / (high - low), 0.0, 1.0)
    frequency = plain / factor * stretched + plain * (1 - stretched)
    if "attention_factor" in scaling:
        return frequency, scaling["attention_factor"]
    both = [scaling.get(name) for name in ("mscale", "mscale_all_dim")]
    if all(both):
        return frequency, _stretch(factor, both[0]) / _stretch(factor, both[1])
    return frequency, _stretch(factor, 1.0)


def _stretch(factor: float, scale: float | None) -> float:
    return 0.1 * (scale or 1.0) * math.log(factor) + 1.0 if factor > 1 else 1.0
