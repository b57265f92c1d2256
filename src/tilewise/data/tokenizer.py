"""A byte-level BPE tokenizer that is trained on the corpus, and the conversion of texts to token
streams.

Any byte string can be encoded and decoded without loss. A special token ends a document; tokenizers
of encoders also have a mask token. The `tokenizers` library trains and encodes. This module fixes
its settings, so that equal texts give equal tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilewise.core import ConfigError, Validator, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["END_OF_TEXT", "MASK", "encode_files", "special_id", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
MASK = "[MASK]"
_BATCH = 64
# ids of any model; the library allocates the maximum at once and aborts the process if there is no memory
_MOST_IDS = 1 << 20
_validate = Validator("data")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 4096, *, special_tokens: Sequence[str] = (END_OF_TEXT,)
) -> Tokenizer:
    """Train a byte-level BPE tokenizer with `<|endoftext|>` as id 0.

    Args:
        texts: training texts.
        vocab_size: maximum number of ids.
        special_tokens: with ids from 0 on.

    Raises:
        ConfigError: the vocabulary is too small for all bytes and the special tokens, or too large;
            or a text is not a string.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if isinstance(texts, (str, bytes, np.ndarray)) or not isinstance(texts, Iterable):
        _validate.invalid("tokenizer", "texts must be an iterable of them", shown(texts), "pass a list")
    vocab_size = _validate.integer("tokenizer", "vocab_size", vocab_size, 0, _MOST_IDS)
    for token in _validate.sequence("tokenizer", "special_tokens", special_tokens, "texts"):
        _validate.text("tokenizer", "a special token", token)
    if vocab_size < 256 + len(special_tokens):
        raise ConfigError(
            f"[data.tokenizer] a vocabulary must hold 256 bytes and {' and '.join(special_tokens)}; got "
            f"{vocab_size}; use at least {256 + len(special_tokens)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_each_text(texts), trainer)
    return tokenizer


def _each_text(texts: Iterable[str]) -> Iterator[str]:
    """The texts, checked one by one. An exception raised inside of the library is passed on unchanged."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            _validate.invalid(
                "tokenizer", "a text must be UTF-8", shown(text[error.start : error.end]), "convert it"
            )
        yield text


def special_id(tokenizer: Tokenizer, *tokens: str) -> int:
    """The id of the first of some special tokens that a tokenizer has.

    Raises:
        ConfigError: it has none of them.
    """
    id_ = next((i for i in map(tokenizer.token_to_id, tokens) if i is not None), None)
    if id_ is None:
        raise ConfigError(
            f"[data.tokenizer] the tokenizer must know {' or '.join(tokens)}; got none; use another model's"
        )
    return int(id_)


def encode_files(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    end: int,
    show: Callable[[int, int], None] = lambda done, total: None,
    fit: Callable[[NDArray[np.int32]], NDArray[np.int32]] = lambda ids: ids,
) -> NDArray[np.int32]:
    """Encode all texts as one stream of ids, each followed by an end id.

    Args:
        tokenizer: special tokens that it adds (such as one that begins a text) are left out.
        texts: to encode.
        end: id after each.
        show: called with the files done and all files, now and then.
        fit: called with the ids of each text and its end id; returns the ids that are used.

    Raises:
        ConfigError: `end` is not an id, or a text is not a string.
    """
    texts = _validate.sequence("tokenizer", "texts", texts, "texts")
    end = _validate.integer("tokenizer", "end", end, 0, (1 << 31) - 1)
    parts: list[NDArray[np.int32]] = []
    for first in range(0, len(texts), _BATCH):
        batch = list(_each_text(texts[first : first + _BATCH]))
        parts += [
            fit(np.array([*encoded.ids, end], np.int32))
            for encoded in tokenizer.encode_batch(batch, add_special_tokens=False)
        ]
        show(min(first + _BATCH, len(texts)), len(texts))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
