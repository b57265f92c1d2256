"""A byte-level BPE tokenizer, trained on the corpus at hand, and texts turned into token streams.

Any byte string survives encoding and decoding. The one special token ends a document. Training and encoding
are the `tokenizers` library's; this file fixes the settings, so that equal texts give equal tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilewise.core import Border, ConfigError, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["END_OF_TEXT", "encode_files", "end_of_text_id", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
_BATCH = 64
_border = Border("data")


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """A byte-level BPE tokenizer with `<|endoftext|>` as id 0.

    Raises:
        ConfigError: a vocabulary too small for all bytes and the special token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if isinstance(texts, (str, bytes, np.ndarray)) or not isinstance(texts, Iterable):
        _border.refuse("tokenizer", "texts must be an iterable of them", shown(texts), "pass a list")
    vocab_size = _border.integer("tokenizer", "vocab_size", vocab_size, 0, 1 << 31)
    if vocab_size < 257:
        raise ConfigError(
            f"[data.tokenizer] a vocabulary must hold 256 bytes and {END_OF_TEXT}; got "
            f"{vocab_size}; use at least 257"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_each_text(texts), trainer)
    return tokenizer


def _each_text(texts: Iterable[str]) -> Iterator[str]:
    """The texts, held to be some; what refuses one in the library's hands comes out of it as it is."""
    for text in texts:
        yield _border.instance("tokenizer", "a text", text, str, "decode it")


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id of `<|endoftext|>`.

    Raises:
        ConfigError: this tokenizer has none.
    """
    found = tokenizer.token_to_id(END_OF_TEXT)
    if found is None:
        raise ConfigError(
            f"[data.tokenizer] the tokenizer must know {END_OF_TEXT}; got none; use the one made by train"
        )
    return int(found)


def encode_files(
    tokenizer: Tokenizer, texts: Sequence[str], show: Callable[[int, int], None] = lambda done, total: None
) -> NDArray[np.int32]:
    """All texts as one stream of ids, each followed by `<|endoftext|>`.

    Args:
        show: called with the files done and all files, now and then.
    """
    end = end_of_text_id(tokenizer)
    parts: list[NDArray[np.int32]] = []
    for first in range(0, len(texts), _BATCH):
        batch = list(texts[first : first + _BATCH])
        parts += [np.array([*encoded.ids, end], np.int32) for encoded in tokenizer.encode_batch(batch)]
        show(min(first + _BATCH, len(texts)), len(texts))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
