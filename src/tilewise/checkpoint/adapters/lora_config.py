"""`LoraConfig`: which modules of a model have low-rank adapters, and with which settings. Names, defaults
and meaning are those of PEFT's `LoraConfig`.

Modules have their names in Hugging Face files, such as `model.layers.0.self_attn.q_proj`. Settings may come
from files that any program has written, so regular expressions that could take exponential time are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from tilewise.core.dims import MAX_SIZE
from tilewise.core.dtypes import MAX_F32
from tilewise.core.frozen import FrozenMap
from tilewise.core.validation import Validator, shown

__all__ = ["ALL_LINEAR", "LoraConfig"]

ALL_LINEAR = "all-linear"
_OTHER_INITS = ("pissa", "olora", "loftq", "eva", "corda", "orthogonal", "mica", "lora_ga")
_MOST_CHARS, _MOST_REPEATS = 512, 4  # of a regular expression
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+?{]")
_REPEAT = re.compile(r"(?<!\\)[*+{]")
_validate = Validator("lora")


@dataclass(frozen=True)
class LoraConfig:
    """The settings of an adapter.

    Args:
        r: rank.
        alpha: an adapter's product is scaled by alpha / r.
        dropout: probability with which an element of an adapter's input is dropped in training, in [0, 1).
        target_modules: names of modules, or their last parts, such as `q_proj`; or a regular expression for
            whole names; or `all-linear` for all but the head. None: queries and values.
        exclude_modules: modules that have no adapter, as names or a regular expression.
        rank_pattern: ranks of some modules: by name, last parts of a name, or regular expression for them.
        alpha_pattern: the same for alpha.
        use_rslora: scale by alpha / sqrt(r).
        modules_to_save: ends of the names of modules that are trained and saved as a whole.
        init: initial values. True: a uniform in ±1/sqrt(columns), b zeros. `gaussian`: a normal with
            standard deviation 1/r, b zeros. False: both uniform.

    Raises:
        ConfigError: a value has the wrong type or is out of range, a regular expression is invalid or has
            more than four repetitions or a repeated group, or `init` is a method that is not supported.
    """

    r: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] = ()
    init: bool | str = True

    def __post_init__(self) -> None:
        put = object.__setattr__
        _rank("r", self.r)
        put(self, "alpha", _number("alpha", self.alpha))
        dropout = _validate.number("config", "dropout", self.dropout, 0.0, 1.0)
        if dropout == 1.0:
            _validate.invalid("config", "dropout must be below 1", "1", "lower it")
        put(self, "dropout", dropout)
        put(self, "target_modules", _modules("target_modules", self.target_modules))
        put(self, "exclude_modules", _modules("exclude_modules", self.exclude_modules))
        ranks = _validate.mapping("config", "rank_pattern", self.rank_pattern, "ranks")
        put(
            self,
            "rank_pattern",
            FrozenMap({_regex(k): _rank(f"the rank of {k!r}", v) for k, v in ranks.items()}),
        )
        alphas = _validate.mapping("config", "alpha_pattern", self.alpha_pattern, "numbers")
        alphas = {_regex(k): _number(f"the alpha of {k!r}", v) for k, v in alphas.items()}
        put(self, "alpha_pattern", FrozenMap(alphas))
        _validate.truth("config", "use_rslora", self.use_rslora)
        put(self, "modules_to_save", _names("modules_to_save", self.modules_to_save))
        _check_init(self.init)

    def is_target(self, module: str, defaults: Sequence[str]) -> bool:
        """Whether a linear module has an adapter.

        Args:
            module: its name.
            defaults: the modules that have one if no targets are set.
        """
        is_inside = any(f".{name}." in f".{module}." for name in self.modules_to_save)
        if _is_listed(module, self.exclude_modules) or is_inside:
            return False
        if self.target_modules is None:
            return module in defaults
        return self.target_modules == ALL_LINEAR or _is_listed(module, self.target_modules)

    def is_saved(self, module: str) -> bool:
        """Whether a module is trained as a whole, or lies in one that is. As in PEFT, a name of
        `modules_to_save` is the end of a module's name: `norm` is also `input_layernorm`.
        """
        parts = module.split(".")
        whole = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return any(outer.endswith(name) for outer in whole for name in self.modules_to_save)

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return self.rank_pattern.get(_pattern_of(module, self.rank_pattern), self.r)

    def scale_of(self, module: str, rank: int) -> float:
        """The factor of a module's adapter of some rank."""
        alpha = self.alpha_pattern.get(_pattern_of(module, self.alpha_pattern), self.alpha)
        return alpha / (sqrt(rank) if self.use_rslora else rank)


def _rank(name: str, value: object) -> int:
    return _validate.integer("config", name, value, 1, MAX_SIZE)


def _number(name: str, value: object) -> float:
    return _validate.number("config", name, value, 0.0, MAX_F32)


def _names(field_name: str, value: Any) -> tuple[str, ...]:
    names = tuple(_validate.sequence("config", field_name, value, "names of modules"))
    for name in names:
        _validate.text("config", f"a name in {field_name}", name)
    return names


def _modules(field_name: str, value: Any) -> str | tuple[str, ...] | None:
    """A regular expression as it is, names as a tuple."""
    if value is None:
        return None
    if isinstance(value, str):
        if value.lower() == ALL_LINEAR and field_name == "target_modules":
            return ALL_LINEAR
        return _regex(value)
    return _names(field_name, value)


def _regex(pattern: str) -> str:
    """A regular expression that is valid and takes polynomial time."""
    rule = f"a regular expression must have no repeated group and at most {_MOST_REPEATS} repetitions"
    is_small = len(pattern) <= _MOST_CHARS and len(_REPEAT.findall(pattern)) <= _MOST_REPEATS
    try:
        re.compile(pattern)
        is_valid = pattern.isprintable() and bool(pattern)
    except (re.error, OverflowError, RecursionError):
        is_valid = False
    if not is_valid or not is_small or _REPEATED_GROUP.search(pattern):
        _validate.invalid("config", rule, shown(pattern), "list the names of modules, or simplify it")
    return pattern


def _check_init(init: object) -> None:
    if isinstance(init, str) and any(init.startswith(name) for name in _OTHER_INITS):
        rule, advice = "init must be true, false or 'gaussian'", f"{init} is not supported: use one of these"
        _validate.invalid("config", rule, shown(init), advice)
    if init != "gaussian" and not isinstance(init, bool):
        _validate.invalid(
            "config", "init must be true, false or 'gaussian'", shown(init), "choose one of them"
        )


def _is_listed(module: str, modules: str | tuple[str, ...] | None) -> bool:
    if modules is None:
        return False
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in modules)


def _pattern_of(module: str, patterns: Mapping[str, object]) -> str:
    """The first pattern that matches the end of a module's name; as in PEFT, the name itself if none does."""
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), module)
