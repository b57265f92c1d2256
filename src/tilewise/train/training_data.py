"""The data of a training run: the corpus, its tokens, and the batches of training and evaluation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tilewise import models
from tilewise.checkpoint import check_token_ids, load_tokenizer
from tilewise.core import ConfigError
from tilewise.data import (
    END_OF_TEXT,
    MASK,
    Batches,
    Corpus,
    MaskedBatches,
    PaddedBatches,
    encode_files,
    load_corpus,
    load_standard_library,
    special_id,
    train_tokenizer,
)
from tilewise.train.progress import track_work
from tilewise.train.train_config import TrainConfig, make_model_config

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console
    from tokenizers import Tokenizer

__all__ = ["TrainingData", "prepare_data"]


@dataclass(frozen=True)
class TrainingData:
    """The data of a training run.

    Attributes:
        corpus: the files.
        tokenizer: the model's tokenizer.
        batches: batches of the training files. The number of a step gives its batch.
        end: the id that ends a file.
        digest: SHA-256 of the training files' token stream.
        held_out: batches of the held-out files; None if training does not evaluate them.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    batches: Batches | MaskedBatches
    end: int
    digest: str
    held_out: Batches | MaskedBatches | None = None


def prepare_data(config: TrainConfig, console: Console) -> TrainingData:
    """Read the corpus and encode its texts. The tokenizer is trained on the corpus, or loaded from
    the model that training starts from.

    Args:
        config: configuration of the run.
        console: shows progress.

    Raises:
        ConfigError: there is no text at the configured path, or not enough.
        CheckpointError: there is no tokenizer in the directory that training starts from.
    """
    percent = config.data.held_out_percent
    is_stdlib = config.data.path == "stdlib"
    corpus = load_standard_library(percent) if is_stdlib else load_corpus(config.data.path, percent)
    model = make_model_config(config)
    is_encoder = models.is_encoder(model)
    if config.model.path is not None:
        tokenizer = load_tokenizer(config.model.path, model.vocab_size)
    else:
        special = (END_OF_TEXT, MASK) if is_encoder else (END_OF_TEXT,)
        texts = (file.text for file in corpus.train)
        tokenizer = train_tokenizer(texts, model.vocab_size, special_tokens=special)
    end = (
        model.eos_token_ids[0] if model.eos_token_ids else special_id(tokenizer, END_OF_TEXT, "[SEP]", "</s>")
    )
    mask = special_id(tokenizer, MASK, "<mask>") if is_encoder else None

    def cut(stream: NDArray[np.int32]) -> Batches | MaskedBatches:
        parts = (stream, config.train.batch, config.data.context, config.train.seed)
        windows = PaddedBatches(*parts, end) if config.data.is_padded else Batches(*parts)
        if mask is None:
            return windows
        return MaskedBatches(windows, mask, model.vocab_size, config.data.masked_percent)

    with track_work(console, "encoding") as progress:
        stream = encode_files(tokenizer, [file.text for file in corpus.train], end, progress.show)
    beyond = stream[stream >= model.vocab_size][:1].tolist()
    check_token_ids(tokenizer, beyond, model.vocab_size, "the training data")
    batches, held_out = cut(stream), None
    if config.train.evaluate_every:
        held_out_stream = encode_files(tokenizer, [file.text for file in corpus.held_out], end)
        try:
            held_out = cut(held_out_stream)
        except ConfigError:
            raise ConfigError(
                f"[train.data] train.evaluate_every needs at least {config.data.context + 1} tokens of held-out text; "
                f"got {len(held_out_stream)} in {len(corpus.held_out)} files; raise data.held_out_percent, or give "
                "more text"
            ) from None
    digest = hashlib.sha256(stream.tobytes()).hexdigest()
    return TrainingData(corpus, tokenizer, batches, end, digest, held_out)
