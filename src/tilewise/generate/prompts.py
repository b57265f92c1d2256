"""Encodes prompts as token ids.

Strings that are not valid Unicode (an argument of a command line may have bytes that are not
UTF-8), and texts that a tokenizer cannot encode, are rejected.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewise.core import ConfigError, Validator
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable, refusals_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["check_prompt", "encode_prompt", "word_ids"]

_MOST = 1 << 31
_SHORT = 1 << 12  # characters; a longer prompt is encoded as a batch, which releases the interpreter's lock
_validate = Validator("generate")


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a prompt; may be empty.

    Args:
        tokenizer: of the model.
        prompt: text.
        add_special_tokens: add the tokens that the tokenizer puts before and after a text.

    Raises:
        ConfigError: the prompt is not UTF-8 text, or the tokenizer has no tokens for it.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"[generate.prompt] a prompt must be UTF-8 text; got {shown(prompt[error.start : error.end])} at character "
            f"{error.start}; convert it"
        ) from None
    try:
        with refusals_of("tokenizers"):
            if len(prompt) <= _SHORT:
                return list(tokenizer.encode(prompt, add_special_tokens=add_special_tokens).ids)
            (encoding,) = tokenizer.encode_batch_fast([prompt], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
    except Unreadable as error:
        raise ConfigError(
            f"[generate.prompt] a prompt must have tokens in tokenizer.json; got {shown(prompt, 40)}: {error}; "
            "choose another prompt, or check the tokenizer"
        ) from None


def check_prompt(num_tokens: int, max_context: int) -> None:
    """Reject a prompt that leaves no room for a token.

    Raises:
        ConfigError: it is too long.
    """
    max_context = _validate.integer("prompt", "max_context", max_context, 1, _MOST)
    if _validate.integer("prompt", "the length of a prompt", num_tokens, 0, sys.maxsize) >= max_context:
        raise ConfigError(
            f"[generate.prompt] a prompt must leave room in the context of {max_context} tokens; "
            f"got {num_tokens}; shorten it"
        )


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
    """Token ids of words inside a text: with and without a space before them.

    Raises:
        ConfigError: as `encode_prompt`, and for a word that has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            ids = tuple(encode_prompt(tokenizer, text, add_special_tokens=False))
            if not ids:
                rule = "bad_words must have tokens in the tokenizer"
                _validate.invalid("prompt", rule, shown(word), "choose other words")
            sequences[ids] = None
    return list(sequences)
