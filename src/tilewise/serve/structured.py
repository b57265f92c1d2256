"""Texts that follow a JSON schema, a regular expression, a list of choices or a grammar.

A grammar says before each token which ones may come; what the model thinks of those is not changed. llguidance keeps
grammars in step with tokens; here they are checked and compiled, on the caller's thread and within limits of size and
work, before the engine hears of a request. Large ones are tried out in a process of their own first.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from tilewise.core import Border, ConfigError
from tilewise.core.border import cut, shown
from tilewise.serve.grammar_child import compile_grammar, make_tokenizer
from tilewise.serve.grammar_trial import GrammarTrials

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Grammar", "Grammars", "StructuredOutputsParams"]

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_MOST_CHARACTERS = 1 << 20
_MOST_KEPT = 64
_MOST_REASON = 500  # characters
_MOST_UNTRIED = 2048  # characters, in which references cannot lead deep enough to do harm
_border = Border("serve")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What a text must follow, with vLLM's names: one of the first five.

    A text whose grammar is complete ends with the reason `stop`; one that is cut by `max_tokens` is only the beginning
    of what would follow it.

    Args:
        json: a JSON schema, as a dictionary or its text.
        regex: a regular expression that the whole text matches (Rust's syntax).
        choice: texts, one of which is written.
        grammar: a grammar in Lark's syntax, whose rule `start` the whole text is.
        json_object: any JSON object.
        disable_any_whitespace: JSON without blanks between its parts.
        whitespace_pattern: a regular expression of what may stand between parts of JSON.

    Raises:
        ConfigError: none or several of them, or one that is no such thing.
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
            _border.truth("structured_outputs", name, getattr(self, name))
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got, rule = ", ".join(given) or "none", f"one of {', '.join(_KINDS)} must be given"
            _border.refuse("structured_outputs", rule, got, "correct it")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.choice is not None:
            texts = tuple(_border.sequence("structured_outputs", "choice", self.choice, "texts"))
            for text in texts:
                _check_text("a choice", text)
            if not texts:
                _border.refuse("structured_outputs", "choice must name a text", "none", "add one")
            object.__setattr__(self, "choice", texts)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if (self.disable_any_whitespace or self.whitespace_pattern is not None) and not self._is_json:
            rule = "rules of blanks go with json or json_object"
            _border.refuse("structured_outputs", rule, given[0], "leave them out")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            rule = "disable_any_whitespace leaves nothing to whitespace_pattern"
            _border.refuse("structured_outputs", rule, "both", "leave one out")
        try:
            size = len(self.source)
        except ValueError as error:  # a number that Python's JSON can hold, and llguidance's cannot
            rule = "a grammar must be one that llguidance reads"
            _border.refuse("structured_outputs", rule, str(error), "correct it")
        if size > _MOST_CHARACTERS:
            got, rule = f"{size:,}", f"a grammar has at most {_MOST_CHARACTERS:,} characters"
            _border.refuse("structured_outputs", rule, got, "shorten it")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StructuredOutputsParams:
        """From a dictionary, as a request in JSON has it.

        Args:
            given: values by the names above; those that are None are left out.

        Raises:
            ConfigError: as when made, or a name that is none of them.
        """
        _border.mapping("structured_outputs", "structured_outputs", given, "fields")
        for name in given:
            _border.choice("structured_outputs", "a field", name, [field.name for field in fields(cls)])
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def source(self) -> str:
        """The grammar as llguidance reads it; may hold mistakes that only compiling finds."""
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
    """Text that is not empty, and that bytes can be made of."""
    _border.instance("structured_outputs", name, value, str, "pass text")
    if not value or any("\ud800" <= character <= "\udfff" for character in value):
        rule, advice = f"{name} must be UTF-8 text that is not empty", "correct it"
        _border.refuse("structured_outputs", rule, shown(value), advice)


def _schema_text(given: Any) -> str:
    """A JSON schema as text that is JSON."""
    if isinstance(given, str):
        text = given
    else:
        _border.mapping("structured_outputs", "json", given, "a schema, or pass its text")
        try:
            text = json.dumps(given, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            _border.refuse("structured_outputs", "json must be a JSON schema", str(error), "correct it")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        _border.refuse("structured_outputs", "json must be a JSON schema", str(error), "correct it")
    if not isinstance(found, (dict, bool)):
        _border.refuse("structured_outputs", "json must be a JSON schema", shown(found), "pass an object")
    return text


class Grammar:
    """Where a text stands in its grammar. One thread at a time.

    Args:
        matcher: llguidance's.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped()

    def copy(self) -> Grammar:
        """Another that stands where this one does."""
        return Grammar(self._matcher.deep_copy())

    def allowed(self) -> NDArray[np.uint8]:
        """Which tokens may come, one byte for each that its tokenizer has: 0 for those that may not. Others may not.

        Raises:
            ConfigError: working it out is more than the limits allow.
        """
        mask = self._matcher.compute_logit_bias()
        self._check()
        return np.frombuffer(mask, np.uint8)

    def take(self, token: int) -> None:
        """A token that may come, came.

        Args:
            token: its id.

        Raises:
            ConfigError: working out what follows is more than the limits allow.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(
                "[serve.structured_outputs] a grammar must be simple enough to follow; got "
                f"{_reason(self._matcher.get_error())}; make it simpler"
            )


class Grammars:
    """Compiles grammars for a model, and keeps the last ones. Any thread.

    Args:
        tokenizer: of the model.
        end_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        self._given = tokenizer
        self._end_ids = sorted(id_ for id_ in end_ids if id_ < tokenizer.get_vocab_size())
        self._tokenizer: LLTokenizer | None = None
        self._trials = GrammarTrials("", [])
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, wanted: StructuredOutputsParams) -> Grammar:
        """A grammar at its beginning; to be copied for each text.

        Args:
            wanted: what texts follow.

        Raises:
            ConfigError: it has a mistake, is too large, or says what no text can be; or the model has no end token.
        """
        with self._lock:
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
                return self._kept[wanted]
            tokenizer = self._prepared()
        source = wanted.source
        why = self._trials.problem(source) if len(source) > _MOST_UNTRIED else ""
        if not why:
            matcher, why = compile_grammar(tokenizer, source)
        if why:
            rule = "structured_outputs must be a grammar within the limits"
            _border.refuse("structured_outputs", rule, _reason(why), "correct it")
        with self._lock:
            self._kept[wanted] = Grammar(matcher)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return self._kept[wanted]

    def _prepared(self) -> LLTokenizer:
        """The tokenizer as llguidance wants it, made when it is first needed."""
        if not self._end_ids:
            rule = "structured_outputs need an end token in config.json or generation_config.json"
            _border.refuse("structured_outputs", rule, "none", "add eos_token_id")
        if self._tokenizer is None:
            text = self._given.to_str()
            self._trials = GrammarTrials(text, self._end_ids)
            self._tokenizer = make_tokenizer(text, self._end_ids)
        return self._tokenizer


def _reason(text: str) -> str:
    """llguidance's error in one line: its first line, then what its regular-expression parser says, which stands below
    a quotation of the expression."""
    first, *others = text.strip().splitlines() or [""]
    details = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return cut(" ".join([first, *details]), _MOST_REASON)
