"""`Encoder`: vectors of texts, by one encoding graph over batches of texts of any length. Threads
share an encoder by taking turns.

A text's vector does not depend on the other texts, on the padding of its batch, or on the number of
devices. Texts longer than the model's context are an error unless truncation is requested.

Shapes: B texts of a call, S tokens of the longest, D hidden.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilewise import models
from tilewise.checkpoint import check_token_ids, load_tokenizer
from tilewise.core import MAX_DEVICES, ConfigError, NotFinite, Validator, choose_dtype
from tilewise.core.dims import Dim
from tilewise.encode.pooling import Pooling, load_max_length, load_pooling
from tilewise.generate import encode_prompt
from tilewise.strategy import DistributionStrategy

__all__ = ["Encoder"]

_MOST = 1 << 20
_LARGEST_ID = (1 << 31) - 1
_validate = Validator("encode")


class Encoder:
    """Computes vectors of texts with a model. Use it with `with`, or call `close`.

    Args:
        model_dir: a Hugging Face directory of an encoder (config.json, weights, tokenizer.json).
            Files of sentence-transformers next to it determine the pooling and the maximum number
            of tokens.
        tp: number of devices that share every layer.
        dtype: `bf16` or `f32` in any spelling of `core.dtypes`, or `auto`: as in config.json,
            otherwise bf16.
        pooling: None for the directory's, otherwise the mean.
        batch: texts of a call.
        truncate: truncate longer texts instead of rejecting them.
        ignore_config_fields: unknown fields of config.json to ignore (`models.open`).

    Raises:
        ConfigError, CheckpointError: the directory is not a supported encoder, or a setting is
            invalid.
        LayoutError: the model cannot be sharded over `tp` devices.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        tp: int = 1,
        dtype: str = "f32",
        pooling: Pooling | None = None,
        batch: int = 16,
        truncate: bool = False,
        ignore_config_fields: Sequence[str] = (),
    ) -> None:
        from tilewise.session import ComputeGraph  # loads the native module

        tp = _validate.integer("encoder", "tp", tp, 1, MAX_DEVICES)
        self._batch = _validate.integer("encoder", "batch", batch, 1, _MOST)
        self._truncate = bool(truncate)
        self.config = models.open(model_dir, ignore=ignore_config_fields)
        dtype = choose_dtype(dtype, self.config.dtype)
        self.tokenizer = load_tokenizer(model_dir, self.config.vocab_size)
        self.pooling = load_pooling(model_dir) if pooling is None else pooling
        longest, limit = models.max_context(self.config), load_max_length(model_dir)
        self.max_context = longest if limit is None else min(longest, limit)
        graph = ComputeGraph(self.config.model_type)
        length = Dim("seq", 1, self.max_context)
        models.build_encoding_graph(graph, self.config, self._batch, length, dtype)
        weights = models.open_weights(model_dir, self.config, with_head=False)
        strategy = DistributionStrategy.tensor_parallel(tp) if tp > 1 else DistributionStrategy.single()
        graph.set_distribution(strategy)
        self._turn = threading.Lock()  # held from a batch's inputs to its result
        self.instance = graph.instantiate(graph.plan(batch_splits=1))
        try:
            self.instance.load_parameters(weights)
        except BaseException:
            self.instance.close()
            raise

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the devices and free their memory."""
        self.instance.close()

    def encode(
        self,
        texts: Sequence[str | Sequence[int]],
        show: Callable[[int, int], None] = lambda done, total: None,
    ) -> NDArray[np.float32]:
        """One vector per text, `[N, D]`, in the texts' order.

        Args:
            texts: strings or token ids. Texts of similar lengths are batched together, to limit
                padding.
            show: called with the texts done and all texts after each call of the model.

        Raises:
            ConfigError: a text is invalid, has no tokens, or is longer than the context; before
                anything is encoded.
            NotFinite: the model's result for a text is not finite.
        """
        sequence = _validate.sequence("encoder", "texts", texts, "texts")
        ids = [self.ids(text, i) for i, text in enumerate(sequence)]
        vectors = np.zeros((len(ids), self.config.hidden_size), np.float32)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for first in range(0, len(order), self._batch):
            members = order[first : first + self._batch]
            hidden_BSD = self._forward([ids[i] for i in members])
            for row, i in enumerate(members):
                vectors[i] = self.pooling.pool(hidden_BSD[row, : len(ids[i])])
                if not np.isfinite(vectors[i]).all():
                    raise NotFinite(
                        f"[encode.encoder] vectors must be finite; got others for text {i}; the weights are damaged, "
                        "or too large for the element type: encode in f32"
                    )
            show(min(first + self._batch, len(order)), len(order))
        return vectors

    def ids(self, text: str | Sequence[int], index: int = 0) -> list[int]:
        """A text's tokens, as they are encoded.

        Args:
            text: a string or token ids.
            index: the text's number in errors.

        Raises:
            ConfigError: it is invalid, has no tokens, or is longer than the context.
        """
        if isinstance(text, str):
            ids = encode_prompt(self.tokenizer, text)
        else:
            sequence = _validate.sequence("encoder", "a text", text, "ids, or a str")
            ids = [_validate.integer("encoder", "an id of a text", id_, 0, _LARGEST_ID) for id_ in sequence]
        check_token_ids(self.tokenizer, ids, self.config.vocab_size, f"text {index}")
        if not ids:
            raise ConfigError(
                f"[encode.encoder] a text must have tokens; got none in text {index}; leave it out"
            )
        if len(ids) > self.max_context and not self._truncate:
            raise ConfigError(
                f"[encode.encoder] a text must fit the context of {self.max_context} tokens; got {len(ids)} in text "
                f"{index}; shorten it, or pass truncate=True"
            )
        if len(ids) > self.max_context:  # the truncated text keeps the end token
            ids = [*ids[: self.max_context - 1], ids[-1]]
        return ids

    def _forward(self, ids: list[list[int]]) -> NDArray[np.float32]:
        """Vectors of all tokens `[B, S, D]`; a batch is filled up with texts of one token."""
        longest = max(map(len, ids))
        tokens = np.zeros((self._batch, longest), np.int32)
        lengths = np.ones(self._batch, np.int32)
        for row, of in enumerate(ids):
            tokens[row, : len(of)] = of
            lengths[row] = len(of)
        with self._turn:
            self.instance.forward(tokens=tokens, token_types=np.zeros_like(tokens), lengths=lengths)
            vectors = np.asarray(self.instance.get_tensor("hidden"), np.float32)
        return vectors.reshape(self._batch, -1, self.config.hidden_size)[:, :longest]
