"""The data of a training run: its sources, the tokenizer, and the batches of training and
evaluation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from tilewise import models
from tilewise.checkpoint import load_tokenizer
from tilewise.core import ConfigError, Validator
from tilewise.data import (
    END_OF_TEXT,
    MASK,
    Batches,
    Corpus,
    MaskedBatches,
    PairBatches,
    Sequences,
    TextWindows,
    special_id,
    train_tokenizer,
)
from tilewise.generate import ChatTemplate
from tilewise.train.progress import track_work
from tilewise.train.sources import Encoder, PreparedSource, prepare_source, read_corpus, training_texts
from tilewise.train.train_config import TrainConfig, make_model_config

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

__all__ = ["TrainingData", "describe_source", "prepare_data"]

_validate = Validator("train")


@dataclass(frozen=True)
class TrainingData:
    """The data of a training run.

    Attributes:
        corpus: the texts of all sources of text.
        tokenizer: the model's tokenizer.
        batches: batches of the training data. The number of a step gives its batch.
        end: the id that ends a document.
        digest: SHA-256 of the training data: its ids, and its labels if there are examples.
        held_out: batches of the held-out data; None if training does not evaluate them.
        sources: the sources, in the order of the configuration.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    batches: Batches | MaskedBatches | PairBatches
    end: int
    digest: str
    held_out: Batches | MaskedBatches | PairBatches | None = None
    sources: tuple[PreparedSource, ...] = ()


def prepare_data(config: TrainConfig, console: Console) -> TrainingData:
    """Read and encode all sources. The tokenizer is trained on them, or loaded from the model that
    training starts from.

    Args:
        config: configuration of the run.
        console: shows progress.

    Raises:
        ConfigError: there is no data at a configured path, or not enough, or a record is invalid.
        CheckpointError: there is no tokenizer in the directory that training starts from.
    """
    model, data = make_model_config(config), config.data
    is_encoder = models.is_encoder(model)
    odd = next((source.type for source in data.sources if source.type != "text"), None)
    if is_encoder and odd is not None:
        _validate.invalid("data", "an encoder needs data of type = 'text'", repr(odd), "choose another model")
    corpora = [read_corpus(source) if source.type == "text" else None for source in data.sources]
    if config.model.path is not None:
        tokenizer = load_tokenizer(config.model.path, model.vocab_size)
    else:
        special = (END_OF_TEXT, MASK) if is_encoder else (END_OF_TEXT,)
        tokenizer = train_tokenizer(_texts(config, corpora), model.vocab_size, special_tokens=special)
    end = (
        model.eos_token_ids[0] if model.eos_token_ids else special_id(tokenizer, END_OF_TEXT, "[SEP]", "</s>")
    )
    mask = special_id(tokenizer, MASK, "<mask>") if is_encoder else None
    encoder = Encoder(tokenizer, end, model.vocab_size, lru_cache(lambda: _template(config)))
    with track_work(console, "encoding") as progress:
        sources = tuple(
            prepare_source(
                source, data, corpus, encoder, progress.show, evaluates=config.train.evaluate_every > 0
            )
            for source, corpus in zip(data.sources, corpora)
        )

    def make_batches(
        sequences: Sequence[Sequences], weights: Sequence[float] | None = None
    ) -> Batches | MaskedBatches | PairBatches:
        width = None if data.is_padded else data.context
        train = config.train
        has_documents = data.separates_documents
        batches = Batches(sequences, train.batch, train.seed, weights, width, end, has_documents)
        if config.dpo is not None:
            return PairBatches(batches, has_lengths=config.dpo.loss_type == "ipo")
        if mask is None:
            return batches
        return MaskedBatches(batches, mask, model.vocab_size, data.masked_percent)

    corpus = Corpus(
        tuple(file for source in sources for file in source.corpus.train),
        tuple(file for source in sources for file in source.corpus.held_out),
    )
    held_out = None
    if config.train.evaluate_every:
        held_out_sequences = [source.held_out for source in sources if source.held_out is not None]
        if not held_out_sequences:
            raise ConfigError(
                f"[train.data] train.evaluate_every needs at least {data.context + 1} tokens of held-out text, or an "
                f"example; got fewer in {len(corpus.held_out)} files; raise data.held_out_percent, or give more data"
            )
        held_out = make_batches(held_out_sequences)
    digests = [source.digest for source in sources]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    batches = make_batches([source.train for source in sources], data.weights)
    return TrainingData(corpus, tokenizer, batches, end, digest, held_out, sources)


def _texts(config: TrainConfig, corpora: Sequence[Corpus | None]) -> Iterator[str]:
    """The texts that a new tokenizer is trained on."""
    for source, corpus in zip(config.data.sources, corpora):
        if corpus is None:
            yield from training_texts(source)
        else:
            yield from (file.text for file in corpus.train)


def _template(config: TrainConfig) -> ChatTemplate:
    """The chat template of the model that training starts from.

    Raises:
        ConfigError: there is no such model, or it has no template.
    """
    if config.model.path is None:
        _validate.invalid(
            "data", "lists of messages need a model with a chat template", "no model.path", "set model.path"
        )
    return ChatTemplate(config.model.path)


_NOUNS = {"text": "document", "preference": "pair"}


def describe_source(source: PreparedSource) -> str:
    """Figures about a source in one line."""
    counts, noun = source.counts, _NOUNS.get(source.source.type, "example")
    rest = {
        "truncated": counts.truncated,
        "split": counts.split,
        "longer than the context and dropped": counts.dropped,
        "without a counted label and dropped": counts.unlabelled,
    }
    if isinstance(source.train, TextWindows):
        rest["tokens at the end left out"] = source.train.num_unused
    words = "".join(f", {number:,} {what}" for what, number in rest.items() if number)
    return (
        f"{source.source.path}: {counts.examples:,} {noun}s in {len(source.train):,} sequences, {counts.tokens:,} "
        f"tokens, {counts.counted:,} labels counted{words}"
    )
