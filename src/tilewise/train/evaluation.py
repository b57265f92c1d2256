"""Evaluates how well a model predicts files that it was not trained on, in bits per byte, and
compares it with gzip and xz.

A file is scored as a compressor would store it: every token and the end mark, each predicted from
at most `context` preceding tokens. Windows overlap by half, so all tokens after the first window
have at least half a context before them. The losses per token come from the forward pass of the
training graph.
"""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint import check_token_ids
from tilewise.core.validation import Validator
from tilewise.data.examples import IGNORED

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tilewise.data import TextFile
    from tilewise.session import GraphInstance

__all__ = ["CompressionReport", "Score", "compress_files", "score_files", "sliding_windows"]

_Ids = NDArray[np.int32]
_validate = Validator("train")
_MOST_TOKENS = 1 << 30  # of a window; no model has so many positions
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class CompressionReport:
    """Bits per byte of general compressors on some files.

    Attributes:
        gzip_each, xz_each: each file compressed separately.
        gzip_joined, xz_joined: all files concatenated, so that later files profit from earlier
            ones.
    """

    gzip_each: float
    xz_each: float
    gzip_joined: float
    xz_joined: float


def compress_files(files: Sequence[TextFile]) -> CompressionReport:
    """Compress the files with gzip -9 and xz -9e."""
    contents = [file.text.encode("utf-8") for file in files]
    total = sum(len(content) for content in contents)

    def bits(parts: Sequence[bytes], compress: Callable[[bytes], bytes]) -> float:
        return 8.0 * sum(len(compress(part)) for part in parts) / total

    def xz(data: bytes) -> bytes:
        return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)

    def gz(data: bytes) -> bytes:
        return gzip.compress(data, 9)

    joined = [b"".join(contents)]
    return CompressionReport(bits(contents, gz), bits(contents, xz), bits(joined, gz), bits(joined, xz))


def sliding_windows(ids: Sequence[int], context: int, start: int) -> tuple[_Ids, _Ids]:
    """Tokens and labels `[W, context]` that score each of `ids` exactly once.

    Windows begin half a context apart. Labels that the previous window scores, and padding, are
    -100.

    Args:
        ids: the tokens to score.
        context: maximum number of tokens of a window.
        start: the id before the first token (the end mark of the previous document).

    Raises:
        ConfigError: a window cannot have this size.
    """
    context = _validate.integer("evaluation", "context", context, 1, _MOST_TOKENS)
    stream = np.array([start, *ids], np.int32)
    stride = max(1, context // 2)
    num_windows = max(1, math.ceil((len(ids) - context) / stride) + 1)
    tokens = np.zeros((num_windows, context), np.int32)
    labels = np.full((num_windows, context), IGNORED, np.int32)
    for w in range(num_windows):
        part = stream[w * stride : w * stride + context + 1]
        tokens[w, : len(part) - 1] = part[:-1]
        first_new = 0 if w == 0 else context - stride
        labels[w, first_new : len(part) - 1] = part[1 + first_new :]
    return tokens, labels


@dataclass(frozen=True)
class Score:
    """How well a model predicts some files.

    Attributes:
        nats: the sum over tokens of minus the logarithm of each token's probability.
        num_tokens: number of predicted tokens.
        num_bytes: bytes of the files in UTF-8.
    """

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def perplexity(self) -> float:
        """Perplexity per token; infinite if it is beyond a double."""
        mean = self.nats / max(self.num_tokens, 1)
        return math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The size of the files, compressed by the model's predictions."""
        return self.nats / math.log(2.0) / max(self.num_bytes, 1)


def score_files(
    model: GraphInstance,
    tokenizer: Tokenizer,
    files: Sequence[TextFile],
    batch: int,
    context: int,
    *,
    start: int,
    end: int | None,
    vocab_size: int | None = None,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """Predict every token of files.

    Args:
        model: an instance of a training graph over `batch` sequences of any length up to the
            context.
        tokenizer: the model's tokenizer. Special tokens that it adds to a text are not used.
        files: the files to score.
        batch: number of windows per call.
        context: maximum number of tokens of a window.
        start: the id before the first token of a file.
        end: the id of the end mark after each file, which is predicted too; None for no mark.
        vocab_size: the model's vocabulary size, if its tokenizer may have larger token ids;
            otherwise None.
        show: called after each forward pass with the number of windows done and of all windows.

    Raises:
        ConfigError: a window cannot have the size `context`, or a file has a token without weights
            in the model.
    """
    encoded = [e.ids for e in tokenizer.encode_batch([file.text for file in files], add_special_tokens=False)]
    for file, ids in zip(files, encoded):
        if vocab_size is not None:
            check_token_ids(tokenizer, ids, vocab_size, repr(file.name))
    behind = [] if end is None else [end]
    windows = [sliding_windows([*ids, *behind], context, start) for ids in encoded if ids or behind]
    num_bytes = sum(file.num_bytes for file in files)
    if not windows:
        return Score(0.0, 0, num_bytes)
    tokens = np.concatenate([w[0] for w in windows])
    labels = np.concatenate([w[1] for w in windows])
    nats = 0.0
    for i, (batch_tokens, batch_labels) in enumerate(_in_batches(tokens, labels, batch)):
        nats += _sum_of_losses(model, batch_tokens, batch_labels)
        show(min(len(tokens), (i + 1) * batch), len(tokens))
    return Score(nats, int((labels != IGNORED).sum()), num_bytes)


def _sum_of_losses(model: GraphInstance, tokens: _Ids, labels: _Ids) -> float:
    """The sum of losses over the scored labels. (The graph's loss is the mean.)"""
    model.forward(tokens=tokens, labels=labels)
    return float(model.get_tensor("loss").reshape(())) * int((labels != IGNORED).sum())


def _in_batches(tokens: _Ids, labels: _Ids, batch: int) -> Iterator[tuple[_Ids, _Ids]]:
    """Batches of `batch` windows, as wide as needed. The last batch is filled up with windows that
    score nothing.
    """
    for first in range(0, len(tokens), batch):
        part_tokens, part_labels = tokens[first : first + batch], labels[first : first + batch]
        width = np.flatnonzero((part_labels != IGNORED).any(0))[-1] + 1
        part_tokens, part_labels = part_tokens[:, :width], part_labels[:, :width]
        missing = batch - len(part_tokens)
        yield (
            np.pad(part_tokens, ((0, missing), (0, 0))),
            np.pad(part_labels, ((0, missing), (0, 0)), constant_values=IGNORED),
        )
