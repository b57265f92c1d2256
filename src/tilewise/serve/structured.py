"""Texts that follow a JSON schema, a regular expression, a list of choices or a grammar.

Before each token the grammar gives the mask of allowed tokens. The logits of allowed tokens are not
changed. The library llguidance advances the grammars. This module checks and compiles grammars, on
the caller's thread and within limits of size and work, before the engine gets the request. Large
grammars are compiled in a child process first.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from tilewise.core import ConfigError, Validator
from tilewise.core.validation import cut, shown
from tilewise.serve.grammar_child import compile_grammar, make_tokenizer
from tilewise.serve.grammar_trial import GrammarTrials

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Grammar", "Grammars", "StructuredOutputsParams"]

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_RULES = {
    "json": "json must be a JSON schema that llguidance supports",
    "json_object": "whitespace_pattern must be a regular expression in Rust's syntax",
    "regex": "regex must be a regular expression in Rust's syntax that a text can match",
    "choice": "choice must be texts that the tokenizer can encode",
    "grammar": "grammar must be in Lark's syntax, with a rule `start`",
}
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_MAX_CHARACTERS = 1 << 20
_MAX_COMPILED = 64
_MAX_REASON, _MAX_EXPRESSION = 500, 200  # characters
_MAX_WITHOUT_TRIAL = 2048  # characters; shorter grammars cannot nest deep enough for a stack overflow
_validate = Validator("serve")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The grammar that a text must follow, with vLLM's names. Exactly one of the first five must be set.

    A text ends with the reason `stop` when its grammar is complete. A text that `max_tokens` cuts is only a prefix of
    one that follows the grammar.

    Args:
        json: a JSON schema, as a dictionary or its text.
        regex: a regular expression that the whole text matches (Rust's syntax).
        choice: texts, one of which is written.
        grammar: a grammar in Lark's syntax; the whole text matches its rule `start`.
        json_object: any JSON object.
        disable_any_whitespace: JSON without whitespace between its parts.
        whitespace_pattern: a regular expression of the whitespace between parts of JSON.

    Raises:
        ConfigError: not exactly one of the first five is set, or a value is invalid.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            _validate.truth("structured_outputs", name, getattr(self, name))
        kinds = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            got, rule = ", ".join(kinds) or "none", f"exactly one of {', '.join(_KINDS)} must be set"
            _validate.invalid("structured_outputs", rule, got, "correct it")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.choice is not None:
            texts = tuple(_validate.sequence("structured_outputs", "choice", self.choice, "texts"))
            for index, text in enumerate(texts):
                _check_text(f"choice.{index}", text)
            if not texts:
                _validate.invalid("structured_outputs", "choice must not be empty", "no texts", "add one")
            object.__setattr__(self, "choice", texts)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if (self.disable_any_whitespace or self.whitespace_pattern is not None) and not self._is_json:
            rule = "disable_any_whitespace and whitespace_pattern need json or json_object"
            _validate.invalid("structured_outputs", rule, kinds[0], "remove them")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            rule = "disable_any_whitespace excludes whitespace_pattern"
            _validate.invalid("structured_outputs", rule, "both", "remove one")
        try:
            size = len(self.source)
        except ValueError as error:  # a number beyond the range of llguidance's JSON
            rule = "a grammar must be readable by llguidance"
            _validate.invalid("structured_outputs", rule, str(error), "correct it")
        if size > _MAX_CHARACTERS:
            got, rule = f"{size:,}", f"a grammar must have at most {_MAX_CHARACTERS:,} characters"
            _validate.invalid("structured_outputs", rule, got, "shorten it")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """Make the object from a dictionary, as a request in JSON has it.

        Args:
            values: values by name; None counts as not set.

        Raises:
            ConfigError: as for the constructor, or a name is unknown.
        """
        _validate.mapping("structured_outputs", "structured_outputs", values, "fields")
        for name in values:
            _validate.choice("structured_outputs", "a field", name, [field.name for field in fields(cls)])
        return cls(**{name: value for name, value in values.items() if value is not None})

    @property
    def kind(self) -> str:
        """The field that is set: `json`, `json_object`, `regex`, `choice` or `grammar`."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def source(self) -> str:
        """The grammar in llguidance's format; it may have errors that only compiling finds."""
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, self.choice)))
        if self.grammar is not None:
            return LLMatcher.grammar_from_lark(self.grammar)
        options: dict[str, Any] = {"whitespace_flexible": not self.disable_any_whitespace}
        if self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        schema = '{"type": "object"}' if self.json is None else self.json
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]

    @property
    def _is_json(self) -> bool:
        return self.json_object or self.json is not None


def _check_text(name: str, value: Any) -> None:
    """Check for text that is not empty and can be encoded as UTF-8."""
    _validate.instance("structured_outputs", name, value, str, "pass text")
    if not value or any("\ud800" <= character <= "\udfff" for character in value):
        rule, advice = f"{name} must be non-empty UTF-8 text", "correct it"
        _validate.invalid("structured_outputs", rule, shown(value), advice)


def _schema_text(value: Any) -> str:
    """A JSON schema as text, checked to be JSON."""
    if isinstance(value, str):
        text = value
    else:
        _validate.mapping("structured_outputs", "json", value, "a schema, or pass its text")
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            _validate.invalid("structured_outputs", "json must be a JSON schema", str(error), "correct it")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        _validate.invalid("structured_outputs", "json must be a JSON schema", str(error), "correct it")
    if not isinstance(schema, (dict, bool)):
        _validate.invalid("structured_outputs", "json must be a JSON schema", shown(schema), "pass an object")
    return text


class Grammar:
    """State of a text in its grammar. Not thread-safe.

    Args:
        matcher: llguidance's object.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether only the end may follow."""
        return self._matcher.is_stopped()

    def copy(self) -> Grammar:
        """A copy in the same state."""
        return Grammar(self._matcher.deep_copy())

    def allowed(self) -> NDArray[np.uint8]:
        """The mask of allowed tokens: a byte per token of the tokenizer, 0 for forbidden ones.

        Ids beyond the mask are forbidden.

        Raises:
            ConfigError: the mask takes more work than the limits allow.
        """
        mask = self._matcher.compute_logit_bias()
        self._check()
        return np.frombuffer(mask, np.uint8)

    def take(self, token: int) -> None:
        """Advance by an allowed token.

        Args:
            token: its id.

        Raises:
            ConfigError: the new state takes more work than the limits allow.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(
                "[serve.structured_outputs] a grammar must not exceed the limits of work; got "
                f"{_reason(self._matcher.get_error(), shows_position=False)}; simplify it"
            )


class Grammars:
    """Compiles grammars for a model, and caches the last ones. Thread-safe.

    Args:
        tokenizer: tokenizer of the model.
        end_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        self._source_tokenizer = tokenizer
        self._end_ids = sorted(id_ for id_ in end_ids if id_ < tokenizer.get_vocab_size())
        self._tokenizer: LLTokenizer | None = None
        self._trials = GrammarTrials("", [])
        self._compiled: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, params: StructuredOutputsParams) -> Grammar:
        """A grammar in its initial state; copy it for each text.

        Args:
            params: the grammar in one of its forms.

        Raises:
            ConfigError: the grammar is invalid or too large, or no text can follow it. Or the model
                has no end token.
        """
        with self._lock:
            if params in self._compiled:
                self._compiled.move_to_end(params)
                return self._compiled[params]
            tokenizer = self._guidance_tokenizer()
        source = params.source
        error = self._trials.problem(source) if len(source) > _MAX_WITHOUT_TRIAL else ""
        if not error:
            matcher, error = compile_grammar(tokenizer, source)
        if error:
            got = _reason(error, shows_position=params.kind == "grammar")
            _validate.invalid("structured_outputs", _RULES[params.kind], got, "correct or simplify it")
        with self._lock:
            self._compiled[params] = Grammar(matcher)
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return self._compiled[params]

    def _guidance_tokenizer(self) -> LLTokenizer:
        """llguidance's tokenizer, made when it is first needed."""
        if not self._end_ids:
            rule = "structured_outputs need an end token in config.json or generation_config.json"
            _validate.invalid("structured_outputs", rule, "no end token", "add eos_token_id")
        if self._tokenizer is None:
            text = self._source_tokenizer.to_str()
            self._trials = GrammarTrials(text, self._end_ids)
            self._tokenizer = make_tokenizer(text, self._end_ids)
        return self._tokenizer


def _reason(text: str, shows_position: bool) -> str:
    """llguidance's error in one line: its first line or, for a regular expression, the expression and what is wrong
    with it.

    Args:
        text: the error.
        shows_position: whether the caller wrote the text that the error's line and column refer to.
    """
    first, *others = text.strip().splitlines() or [""]
    position = _POSITION.match(first)
    first = first[position.end() :] if position else first
    details = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    if details:  # the parser of regular expressions prints the expression in the second line
        first = f"the regular expression {cut(others[0].strip(), _MAX_EXPRESSION)}: {' '.join(details)}"
    if position and shows_position:
        first = f"line {position[1]}, column {position[2]}: {first}"
    return cut(first, _MAX_REASON)
