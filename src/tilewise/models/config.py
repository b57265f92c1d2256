"""What every family's configuration is: frozen sizes and choices under Hugging Face's names, read from and written to
config.json.

A family's class declares fields; this base reads them, holds them to their types (nothing is coerced: a text is no
number, a fraction is no size) and refuses what the family does not compute by the field's name: values, and keys that
no table here or there knows, so that a model is never run as something it is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_origin, get_type_hints

from tilewise.core.border import Border, shown
from tilewise.core.errors import ConfigError
from tilewise.core.reading import Unreadable, first_problem, plain_json, read_whole
from tilewise.models.require import MAX_POSITIONS, Require

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["ModelConfig", "config_content", "read_config_file"]

_border = Border("models")
_Config = TypeVar("_Config", bound="ModelConfig")
_LIMITS = {
    "vocab_size": 1 << 20,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "max_position_embeddings": MAX_POSITIONS,
}
# What transformers and others write that decides nothing of what a forward pass computes: training's dropout and
# initialisation, caches, tokens that generation_config.json decides, labels of tasks, notes about tools.
_UNUSED = """
_name_or_path _attn_implementation _attn_implementation_autoset _commit_hash transformers_version use_cache
cache_implementation pretraining_tp attention_dropout hidden_dropout hidden_dropout_prob
attention_probs_dropout_prob embd_pdrop resid_pdrop attn_pdrop classifier_dropout initializer_range
sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id tokenizer_class
max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
suppress_tokens begin_suppress_tokens return_dict output_hidden_states output_attentions torchscript
use_bfloat16 tf_legacy_loss finetuning_task task_specific_params problem_type id2label label2id num_labels
prefix chunk_size_feed_forward gradient_checkpointing tie_encoder_decoder unsloth_version unsloth_fixed
_num_labels output_past max_sequence_length transformers.js_config
"""
_WITHOUT_EFFECT = frozenset(_UNUSED.split())
# Keys whose other values make another model, in every family.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "pruned_heads": ({},),
    "quantization_config": (),
    "auto_map": (),
    "use_bidirectional_attention": (False,),
}
_ADVICE = {
    "quantization_config": "give the unquantized weights",
    "auto_map": "code that a model brings is not run; where its weights are those of its model_type, as built in, "
    "remove the key from a copy of the file",
}


def read_config_file(model_dir: str | Path, read: Callable[[Mapping[str, Any]], _Config]) -> _Config:
    """config.json of a Hugging Face directory, as a configuration.

    Args:
        model_dir: the directory.
        read: makes a configuration of the file's content.

    Raises:
        ConfigError: there is none, it is not a JSON object, or `read` refuses it; names the file.
    """
    data = config_content(model_dir)
    try:
        return read(data)
    except ConfigError as error:
        raise ConfigError(f"{error} ({str(Path(model_dir) / 'config.json')!r})") from None


def config_content(model_dir: str | Path) -> dict[str, Any]:
    """What the config.json of a Hugging Face directory holds, of whatever model.

    Raises:
        ConfigError: there is none, or it is not a JSON object; names the file.
    """
    path = _border.path("open", "a model directory", model_dir) / "config.json"
    if not os.path.lexists(path):
        raise ConfigError(
            f"[models.open] a model directory must hold config.json; got {str(model_dir)!r}; "
            "give a Hugging Face directory"
        )
    try:
        data = plain_json(read_whole(path))
        if not isinstance(data, dict):
            raise Unreadable(f"it holds no object but {shown(data)}")
        return data
    except Unreadable as error:
        raise ConfigError(
            f"[models.open] config.json must be JSON; got {str(path)!r}: {error}; repair the file"
        ) from None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants that every family has.

    Attributes:
        vocab_size: tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: layers.
        num_attention_heads: query heads.
        max_position_embeddings: positions that the model was made for.
        tie_word_embeddings: the head is the embedding.
        bos_token_id: begins a text; None when nothing does.
        eos_token_ids: generation stops at any of them.
        pad_token_id: fills up shorter texts in other programs; decides nothing here.
        dtype: what the weights are stored in, as config.json spells it; None when it does not say.

    Raises:
        ConfigError: values that no model has, or that do not fit together; names the field.
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

    # Of a family: its name in files, the class that files name, others that hold the same; fields that it spells in
    # another way; keys with the values that are computed;
    # keys without effect.
    model_type: ClassVar[str] = ""
    architecture: ClassVar[str] = ""
    also: ClassVar[tuple[str, ...]] = ()
    spellings: ClassVar[Mapping[str, str]] = {}
    only: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        require = self.require()
        for name, limit in {**_LIMITS, **self.limits()}.items():
            require.integer(self.spelled(name), getattr(self, name), 1, limit)
        require.truth("tie_word_embeddings", self.tie_word_embeddings)
        pad, dtype = self.pad_token_id, self.dtype
        is_integer = isinstance(pad, int) and not isinstance(pad, bool)
        require(pad is None or is_integer, "pad_token_id", "must be an integer", pad, "correct it")
        require(dtype is None or isinstance(dtype, str), "dtype", "must be a name", dtype, "correct it")
        ends = self.eos_token_ids
        require(isinstance(ends, tuple | list), "eos_token_ids", "must be a tuple of ids", ends, "write one")
        object.__setattr__(self, "eos_token_ids", tuple(ends))
        for name, tokens in (("bos_token_id", (self.bos_token_id,)), ("eos_token_id", self.eos_token_ids)):
            for token in tokens:
                is_id = (
                    isinstance(token, int) and not isinstance(token, bool) and 0 <= token < self.vocab_size
                )
                rule = f"must lie in the vocabulary, 0 to {self.vocab_size - 1}"
                require(token is None or is_id, name, rule, token, "correct it")

    @classmethod
    def limits(cls) -> Mapping[str, int]:
        """The largest values of a family's further sizes, which are at least 1."""
        return {}

    @classmethod
    def require(cls) -> Require:
        """The family's checks."""
        return Require(cls.model_type)

    @classmethod
    def spelled(cls, field: str) -> str:
        """A field as the family's files spell it."""
        return cls.spellings.get(field, field)

    @classmethod
    def one_answer(cls, older: str, theirs: Any, name: str, ours: Any) -> Any:
        """What two keys of one meaning say; None where neither says anything.

        Args:
            older: one of the keys.
            theirs: its value.
            name: the other.
            ours: its value.

        Raises:
            ConfigError: they say different things.
        """
        agree = theirs is None or ours is None or theirs == ours
        got = f"{shown(theirs)} and {shown(ours)}"
        cls.require()(agree, older, f"must say what {name} says", got, "remove one of them")
        return ours if ours is not None else theirs

    @classmethod
    def from_pretrained(cls: type[_Config], model_dir: str | Path) -> _Config:
        """The configuration of a Hugging Face directory.

        Raises:
            ConfigError: no config.json, broken JSON, or not a model of this family that we compute.
        """
        return read_config_file(model_dir, cls.from_dict)

    @classmethod
    def from_dict(cls: type[_Config], data: Mapping[str, Any]) -> _Config:
        """The configuration that a parsed config.json describes.

        Raises:
            ConfigError: a field is missing, unknown or of another type, or asks for something that is not computed.
        """
        from pydantic import ValidationError

        given = dict(_border.mapping(cls.model_type, "a configuration", data, "values"))
        require = cls.require()
        kind, names = given.pop("model_type", None), given.pop("architectures", None)
        known = (cls.architecture, *cls.also)
        fits = kind in (None, cls.model_type) and names in (None, [], *([name] for name in known))
        rule = f"must be {' or '.join(known)}"
        require(
            fits, "architectures", rule, f"{shown(kind)} {shown(names)}", f"give a {cls.model_type} model"
        )
        for key, allowed in {**_ONLY, **cls.only}.items():
            value = given.pop(key, None)
            holds = value is None or any(type(value) is type(a) and value == a for a in allowed)
            rule = f"must be {' or '.join(shown(a) for a in allowed)}" if allowed else "must be absent"
            require(holds, key, rule, value, _ADVICE.get(key, "others are not supported"))
        given = cls._adapted(
            {k: v for k, v in given.items() if k not in _WITHOUT_EFFECT | cls.without_effect}
        )
        spelled = {cls.spelled(name): name for name in _types(cls).model_fields}
        for key in given:
            rule = "must be a field that this family's models have"
            advice = "remove it if it decides nothing of what the model computes"
            if near := get_close_matches(key, spelled, 1):
                advice = f"did you mean {near[0]}? {advice}"
            if key in cls.spellings:
                advice = f"this family's files spell it {cls.spelled(key)}"
            require(key in spelled, shown(key)[1:-1], rule, "an unknown one", advice)
        try:
            found = _types(cls).model_validate({spelled[key]: value for key, value in given.items()})
        except ValidationError as error:
            raise ConfigError(
                f"[models.{cls.model_type}] fields must be as in a {cls.model_type}'s config.json; "
                f"got {first_problem(error)}; correct it"
            ) from None
        return cls(**{name: getattr(found, name) for name in found.model_fields_set})

    @classmethod
    def _adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The keys of a file in this class's spelling; what a family's files say in several ways is said in one.

        A missing key has the field's default; null is a value where the field has one, and missing where not.
        """
        ends = given.pop("eos_token_id", None)
        if ends is not None:
            given["eos_token_ids"] = tuple(ends) if isinstance(ends, list) else (ends,)
        given["dtype"] = cls.one_answer(
            "torch_dtype", given.pop("torch_dtype", None), "dtype", given.get("dtype")
        )
        hints = get_type_hints(cls)
        kinds = {cls.spelled(name): getattr(hint, "__args__", ()) for name, hint in hints.items()}
        takes_none = {key for key, of in kinds.items() if type(None) in of}
        takes_list = {key for key, of in kinds.items() if any(get_origin(kind) is tuple for kind in of)}
        return {
            key: tuple(value) if isinstance(value, list) and key in takes_list else value
            for key, value in given.items()
            if value is not None or key in takes_none
        }

    def to_dict(self) -> dict[str, Any]:
        """The same as Hugging Face's config.json."""
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


def _plain(value: Any) -> Any:
    """A field's value as JSON gives it back."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


_TYPES: dict[type, type[BaseModel]] = {}


def _types(cls: type[ModelConfig]) -> type[BaseModel]:
    """The types of a family's fields, for pydantic to hold a file to; made once."""
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
