"""The configuration of a model: frozen fields with Hugging Face's names, as in config.json.

A family's class declares fields. This base class reads them, checks their types strictly (nothing
is converted), and rejects, by name, settings that the family does not support, so that a model is
never run as a different one. `fields.py` lists fields that have no effect, and decides which
unknown ones are ignored with a line in the log.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_origin, get_type_hints

from tilewise.checkpoint import QUANTISATION_KEYS, open_companions, parse_quantisation
from tilewise.core.errors import ConfigError
from tilewise.core.log import warn_once
from tilewise.core.validation import Validator, bare, nearest, shown
from tilewise.files.reading import Unreadable, first_problem, plain_json
from tilewise.models.fields import MAX_POSITIONS, ONLY, WITHOUT_EFFECT, has_no_effect, ignore_advice

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["ModelConfig", "config_content", "read_config_file"]

_validate = Validator("models")
_Config = TypeVar("_Config", bound="ModelConfig")
_LIMITS = {
    "vocab_size": 1 << 20,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "max_position_embeddings": MAX_POSITIONS,
}
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_MOST_NAMED = 8  # fields in one line of the log


def read_config_file(
    model_dir: str | Path, read: Callable[..., _Config], ignore: Collection[str] = ()
) -> _Config:
    """The configuration in the config.json of a Hugging Face directory.

    Args:
        model_dir: the directory.
        read: makes a configuration of the file's content; also takes `ignore` and `where`, as
            `ModelConfig.from_dict` does.
        ignore: fields to ignore.

    Raises:
        ConfigError: the file is missing, is not a JSON object, or `read` rejects it; names the
            file.
    """
    data = config_content(model_dir)
    place = open_companions(Path(model_dir)).called("config.json")
    try:
        return read(data, ignore=ignore, where=place)
    except ConfigError as error:
        raise ConfigError(f"{error} ({place})") from None


def config_content(model_dir: str | Path) -> dict[str, Any]:
    """The parsed config.json of a Hugging Face directory, of any model; of a GGUF file, the same from
    its metadata.

    Raises:
        ConfigError: the file is missing or is not a JSON object; names it. If the path is another
            kind of file, the message names the directory to use, or how to convert it. Or the GGUF
            file's metadata does not describe a supported model.
    """
    directory = _validate.path("open", "a model directory", model_dir)
    files, name = open_companions(directory), "config.json"
    if not files.has(name):
        raise ConfigError(_not_a_model(directory))
    try:
        data = plain_json(files.read(name))
        if not isinstance(data, dict):
            raise Unreadable(f"it must hold an object; got {shown(data)}")
        return data
    except Unreadable as error:
        rule, advice = "config.json must be JSON", "repair the file"
        if files.gguf is not None:
            rule, advice = "a GGUF file must describe a supported model", "choose another model or file"
        raise ConfigError(f"[models.open] {rule}; got {files.called(name)}: {error}; {advice}") from None


def _not_a_model(path: Path) -> str:
    """The message for a path without config.json."""
    advice = "give a Hugging Face directory"
    if not os.path.lexists(path):
        advice = f"there is no such file or directory: {advice}"
    elif not os.path.isdir(path) and path.suffix.lower() in _TORCH_FILES:
        command = f"tilewise checkpoint convert {shlex.quote(str(path))} NEW_DIRECTORY --model MODEL"
        advice = (
            f"convert it: {command}, where MODEL is a directory with the model's config.json and tokenizer"
        )
    elif not os.path.isdir(path) and os.path.lexists(path.parent / "config.json"):
        advice = f"give its directory, {str(path.parent)!r}"
    return f"[models.open] a model directory must hold config.json; got {str(path)!r}; {advice}"


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and settings that every family has.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width inside of the MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        max_position_embeddings: number of positions that the model was trained for.
        tie_word_embeddings: the head is the embedding.
        bos_token_id: the token at the beginning of a text; None for no such token.
        eos_token_ids: generation stops at any of them.
        pad_token_id: padding in other programs; has no effect here.
        dtype: dtype of the stored weights, as in config.json; None if missing.

    Raises:
        ConfigError: a value is invalid, or values contradict each other; names the field.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str | None = None

    # Set by a family: its `model_type` in files; the class that files name as `architectures`, and other classes whose
    # files have the same parameters (`also`); types of larger models that contain this one, with their classes
    # (`containers`); other names of fields in its files; fields with the values that
    # are supported (`only`), and fields without effect, each added to those of the base classes.
    model_type: ClassVar[str] = ""
    architecture: ClassVar[str] = ""
    also: ClassVar[tuple[str, ...]] = ()
    containers: ClassVar[Mapping[str, str]] = {}
    spellings: ClassVar[Mapping[str, str]] = {}
    only: ClassVar[Mapping[str, tuple[object, ...]]] = ONLY
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT

    def __post_init__(self) -> None:
        family = self.model_type
        for name, limit in {**_LIMITS, **self.limits()}.items():
            size = _validate.integer(family, self.spelled(name), getattr(self, name), 1, limit)
            object.__setattr__(self, name, size)
        _validate.truth(family, "tie_word_embeddings", self.tie_word_embeddings)
        pad, dtype = self.pad_token_id, self.dtype
        is_integer = isinstance(pad, int) and not isinstance(pad, bool)
        _validate.require(
            family, pad is None or is_integer, "pad_token_id", "must be an integer", pad, "correct it"
        )
        _validate.require(
            family, dtype is None or isinstance(dtype, str), "dtype", "must be a name", dtype, "correct it"
        )
        ends = self.eos_token_ids
        _validate.require(
            family,
            isinstance(ends, tuple | list),
            "eos_token_ids",
            "must be a tuple of ids",
            ends,
            "correct it",
        )
        object.__setattr__(self, "eos_token_ids", tuple(ends))
        for name, tokens in (("bos_token_id", (self.bos_token_id,)), ("eos_token_id", self.eos_token_ids)):
            for token in tokens:
                is_id = (
                    isinstance(token, int) and not isinstance(token, bool) and 0 <= token < self.vocab_size
                )
                rule = f"must lie in the vocabulary, 0 to {self.vocab_size - 1}"
                _validate.require(family, token is None or is_id, name, rule, token, "correct it")

    @classmethod
    def limits(cls) -> Mapping[str, int]:
        """The largest values of a family's other sizes, which are at least 1."""
        return {}

    @classmethod
    def spelled(cls, field: str) -> str:
        """The name of a field in the family's files."""
        return cls.spellings.get(field, field)

    @classmethod
    def agreed_value(cls, older: str, theirs: Any, name: str, ours: Any) -> Any:
        """The common value of two keys with the same meaning; None if both are missing.

        Args:
            older: one of the keys.
            theirs: its value.
            name: the other.
            ours: its value.

        Raises:
            ConfigError: they differ.
        """
        agree = theirs is None or ours is None or theirs == ours
        got = f"{shown(theirs)} and {shown(ours)}"
        _validate.require(cls.model_type, agree, older, f"must equal {name}", got, "remove one of them")
        return ours if ours is not None else theirs

    @classmethod
    def from_pretrained(
        cls: type[_Config], model_dir: str | Path, *, ignore: Collection[str] = ()
    ) -> _Config:
        """The configuration of a Hugging Face directory.

        Args:
            model_dir: the directory.
            ignore: fields to ignore, as in `from_dict`.

        Raises:
            ConfigError: there is no config.json, its JSON is invalid, or it is not a supported
                model of this family.
        """
        return read_config_file(model_dir, cls.from_dict, ignore)

    @classmethod
    def from_dict(
        cls: type[_Config],
        data: Mapping[str, Any],
        *,
        ignore: Collection[str] = (),
        where: str = "a configuration",
        only_known: bool = False,
    ) -> _Config:
        """The configuration that a parsed config.json describes.

        Unknown fields that have no effect, by name and value (`fields.has_no_effect`), are
        ignored with one warning for all of them. End tokens at or beyond `vocab_size` are left out,
        with one warning.

        Args:
            data: the parsed file.
            ignore: fields to ignore although the family does not know them, or does not support
                their value. A field in `rope_scaling` is named `rope_scaling.NAME`.
            where: name of the file in the warning.
            only_known: reject every unknown field and every end token outside of the vocabulary,
                for a configuration that is written by hand.

        Raises:
            ConfigError: a field is missing, unknown or of another type, or asks for something
                unsupported; or `ignore` names a field that the computation needs.
        """
        from pydantic import ValidationError

        values = dict(_validate.mapping(cls.model_type, "a configuration", data, "values"))
        ignore = _validate.sequence("open", "ignore", ignore, "names of fields", in_any_order=True)
        family = cls.model_type
        if cls.contained_in(values):
            values = cls._unpacked(values)
        kind, names = values.pop("model_type", None), values.pop("architectures", None)
        architectures = (cls.architecture, *cls.also)
        fits = kind in (None, cls.model_type) and names in (None, [], *([name] for name in architectures))
        rule = f"must be {' or '.join(architectures)}"
        _validate.require(
            family,
            fits,
            "architectures",
            rule,
            f"{shown(kind)} {shown(names)}",
            f"give a {cls.model_type} model",
        )
        spelled = {cls.spelled(name): name for name in _types(cls).model_fields}
        cls._check_ignored(ignore, spelled)
        values = {key: value for key, value in values.items() if key not in ignore}
        if not only_known:
            for key in QUANTISATION_KEYS:  # open_weights reads it again with the files
                if (settings := values.pop(key, None)) is not None:
                    parse_quantisation(settings)
        for key, allowed in cls._gathered("only").items():
            value = values.pop(key, None)
            holds = value is None or any(type(value) is type(a) and value == a for a in allowed)
            rule = f"must be {' or '.join(shown(a) for a in allowed)}" if allowed else "must be absent"
            _validate.require(family, holds, key, rule, value, "others are not supported")
        without_effect = frozenset().union(*cls._each("without_effect"))
        values = {key: value for key, value in values.items() if key not in without_effect}
        values, unknown = cls._without_unknown_nested(values, ignore)
        values = cls._adapted(values)
        if not only_known:
            values = cls._without_absent_ends(values, where)
        unknown |= {key: values.pop(key) for key in [*values] if key not in spelled}
        for key, value in unknown.items():
            rule = "must be a field that this family's models have"
            advice = "remove the key" if only_known else ignore_advice(bare(key))
            if near := nearest(key, spelled):
                advice = f"did you mean {near}? If not, {advice}"
            if key in cls.spellings:
                advice = f"this family's files name it {cls.spelled(key)}"
            is_ignored = not only_known and has_no_effect(key, value)
            _validate.require(family, is_ignored, bare(key), rule, "an unknown one", advice)
        if unknown:
            _warn_of_ignored(cls.model_type, where, unknown)
        try:
            checked = _types(cls).model_validate({spelled[key]: value for key, value in values.items()})
        except ValidationError as error:
            raise ConfigError(
                f"[models.{cls.model_type}] fields must be those of a {cls.model_type} config.json; "
                f"got {first_problem(error)}; correct it"
            ) from None
        return cls(**{name: getattr(checked, name) for name in checked.model_fields_set})

    @classmethod
    def contained_in(cls, data: Mapping[str, Any]) -> bool:
        """Whether the content of a config.json describes a larger model with this family's inside."""
        kind, names = data.get("model_type"), data.get("architectures")
        return any(
            (kind == of and names in (None, [], [name])) or (kind is None and names == [name])
            for of, name in cls.containers.items()
        )

    @classmethod
    def _unpacked(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The content of a larger model's file as the content of a file of this family."""
        return dict(data)

    @classmethod
    def _each(cls, table: str) -> list[Any]:
        """A class attribute of this class and of each of its bases, bases first."""
        return [vars(base)[table] for base in reversed(cls.__mro__) if table in vars(base)]

    @classmethod
    def _gathered(cls, table: str) -> dict[str, tuple[object, ...]]:
        """A mapping of this class and its bases, merged; the class's own entries take precedence."""
        return {key: value for one in cls._each(table) for key, value in one.items()}

    @classmethod
    def _check_ignored(cls, ignore: Collection[str], computed: Collection[str]) -> None:
        for name in ignore:
            _validate.text("open", "a field to ignore", name)
            rule, advice = "must not be ignored, because it affects the computation", "do not name it"
            _validate.require(cls.model_type, name not in computed, name, rule, f"ignore={[*ignore]}", advice)

    @classmethod
    def _without_unknown_nested(
        cls, data: dict[str, Any], ignore: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, object]]:
        """Fields without ignored or unknown entries of nested ones (`rope_scaling`); and the
        unknown entries, under dotted names.
        """
        return data, {}

    @classmethod
    def _adapted(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The content of a file under this class's names, with alternative notations converted.

        A missing key has the field's default. null is a value if the field may be None, and
        otherwise counts as missing.
        """
        ends = data.pop("eos_token_id", None)
        if ends is not None:
            data["eos_token_ids"] = tuple(ends) if isinstance(ends, list) else (ends,)
        data["dtype"] = cls.agreed_value(
            "torch_dtype", data.pop("torch_dtype", None), "dtype", data.get("dtype")
        )
        hints = get_type_hints(cls)
        kinds = {cls.spelled(name): getattr(hint, "__args__", ()) for name, hint in hints.items()}
        takes_none = {key for key, of in kinds.items() if type(None) in of}
        takes_list = {key for key, of in kinds.items() if any(get_origin(kind) is tuple for kind in of)}
        return {
            key: tuple(value) if isinstance(value, list) and key in takes_list else value
            for key, value in data.items()
            if value is not None or key in takes_none or key not in kinds
        }

    @classmethod
    def _without_absent_ends(cls, values: dict[str, Any], where: str) -> dict[str, Any]:
        """Fields without end tokens at or beyond the vocabulary, which the model never generates."""
        size, ends = values.get(cls.spelled("vocab_size")), values.get("eos_token_ids", ())
        absent = [token for token in ends if type(token) is type(size) is int and token >= size > 0]
        if not absent:
            return values
        ids = ", ".join(map(str, absent[:_MOST_NAMED]))
        rule = f"eos_token_id at or beyond vocab_size {size} is ignored: {ids}"
        warn_once("models", f"[models.{cls.model_type}] {rule} ({where})")
        return {**values, "eos_token_ids": tuple(token for token in ends if token not in absent)}

    def to_dict(self) -> dict[str, Any]:
        """The content of Hugging Face's config.json."""
        ends = list(self.eos_token_ids)
        written = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("eos_token_ids", "dtype")
        }
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{self.spelled(name): _plain(value) for name, value in written.items()},
            "eos_token_id": None if not ends else ends[0] if len(ends) == 1 else ends,
            "initializer_range": self.initializer_range,
            "use_cache": True,
            **({} if self.dtype is None else {"torch_dtype": self.dtype}),
        }

    @property
    def initializer_range(self) -> float:
        """Standard deviation of random weights, by width (Nguyen and Salazar 2019, GPT-NeoX)."""
        return float((2 / (5 * self.hidden_size)) ** 0.5)


def _warn_of_ignored(family: str, where: str, ignored: Mapping[str, object]) -> None:
    """Log one line about the ignored unknown fields of a file."""
    named = [f"{bare(name)} = {shown(value, 40)}" for name, value in ignored.items()]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    text = f"unknown fields without effect are ignored: {', '.join(named[:_MOST_NAMED])}{more}"
    warn_once("models", f"[models.{family}] {text} ({where})")


def _plain(value: Any) -> Any:
    """A field's value as JSON returns it."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


_TYPES: dict[type, type[BaseModel]] = {}


def _types(cls: type[ModelConfig]) -> type[BaseModel]:
    """The types of a family's fields as a pydantic model, cached."""
    if cls not in _TYPES:
        _TYPES[cls] = _make_types(cls)
    return _TYPES[cls]


def _make_types(cls: type[ModelConfig]) -> type[BaseModel]:
    from pydantic import ConfigDict, create_model

    hints = get_type_hints(cls)
    declared = {
        f.name: (hints[f.name], ... if f.default is MISSING and f.default_factory is MISSING else None)
        for f in fields(cls)
    }
    model: type[BaseModel] = create_model(
        cls.__name__,
        __config__=ConfigDict(strict=True, extra="forbid", frozen=True),
        **declared,  # type: ignore[call-overload]
    )
    return model
