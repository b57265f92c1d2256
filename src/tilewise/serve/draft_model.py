"""The draft model: a smaller model whose tokens the target model confirms.

The draft model's KV cache has as many blocks as the target model's, and a sequence uses the same
block numbers in both caches. So this module manages only the number of positions that each sequence
has in the draft model's cache. Draft tokens are sampled with the random number that the target
model will use, so that equal distributions give equal tokens.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tilewise import models
from tilewise.core import TilewiseError, Validator, get_logger
from tilewise.core.limits import available_memory
from tilewise.kernels.sampling import sample_tokens
from tilewise.models import BLOCK_SIZE
from tilewise.serve.model import ServedModel, block_bytes
from tilewise.serve.runner import Runner
from tilewise.serve.scheduler import Scheduled
from tilewise.serve.sequence import Sequence
from tilewise.serve.speculation import ModelDrafter

__all__ = ["DraftModel"]

_validate = Validator("serve")


class DraftModel:
    """A loaded draft model. Not thread-safe.

    Args:
        model_dir: Hugging Face directory of a model with the same vocabulary.
        target: the model whose tokens are guessed.
        count: largest number of draft tokens of a sequence.

    Raises:
        ConfigError, CheckpointError: the directory is not a supported model, or has another vocabulary.
        ResourceError: not enough memory.
    """

    def __init__(self, model_dir: str, target: ServedModel, count: int) -> None:
        config = models.open(model_dir, ignore=target.settings.ignore_config_fields)
        if config.vocab_size != target.config.vocab_size:
            rule = f"a draft model must have the model's vocab_size {target.config.vocab_size}"
            _validate.invalid(
                "speculative_config", rule, str(config.vocab_size), "choose one of the same family"
            )
        settings = target.settings
        per_block = block_bytes(config, settings, target.dtype)
        longest = min(models.max_context(config), target.limits.max_context)
        self._model = ServedModel(
            model_dir,
            replace(
                settings,
                dtype=target.dtype,
                max_model_len=longest,
                max_context=longest,
                kv_cache_memory_bytes=target.limits.num_blocks * per_block,
                speculative_config=None,
            ),
            memory_bytes=available_memory() - target.cache_bytes,
        )
        self._runner = Runner(self._model.instance, self._model.limits)
        self._limits, self._longest, self._count = self._model.limits, longest, count

    def close(self) -> None:
        """Stop the devices and free their memory."""
        self._runner.close()
        self._model.close()

    def guess(self, sequences: Iterable[Sequence]) -> None:
        """Read new tokens of sequences, and make draft tokens for the sequences that are in decode.

        Args:
            sequences: sequences that have blocks.
        """
        drafters = [
            s.drafter for s in sequences if isinstance(s.drafter, ModelDrafter) and s.num_uncached == 1
        ]
        drafters = [one for one in drafters if len(one.sequence) < self._longest]
        try:
            ready = self._read([one for one in drafters if one.length != len(one.sequence)])
            for _ in range(1, self._count):
                ready = self._step([(one, self._part(one)) for one in ready if self._has_room(one)])
        except TilewiseError as error:  # speculative decoding is optional
            get_logger("serve").warning("the draft model failed; its cache is rebuilt: %s", error)
            for one in drafters:
                one.done, one.guesses = 0, []

    def _read(self, drafters: list[ModelDrafter]) -> list[ModelDrafter]:
        """Read new tokens, as many as fit in one call. Make the first draft token of each sequence
        that has been read fully.
        """
        room = self._limits.max_num_batched_tokens
        parts: list[tuple[ModelDrafter, Scheduled]] = []
        for one in drafters:
            start, length = one.resume(), len(one.sequence)
            capacity = len(one.blocks) * BLOCK_SIZE  # the last token's block may not be allocated yet
            end = max(start, min(length, start + room, capacity))
            room -= end - start
            one.guesses, one.length = [], length if end == length else 0
            if end > start:
                first_row = end - 1 if end == length else end
                blocks = tuple(one.blocks[: self._model.max_blocks])
                parts.append((one, Scheduled(one.sequence, start, end, first_row, blocks)))
        return self._step(parts)

    def _part(self, one: ModelDrafter) -> Scheduled:
        """The part that computes the last draft token."""
        end = one.length + len(one.guesses)
        blocks = tuple(one.blocks[: self._model.max_blocks])
        return Scheduled(one.sequence, end - 1, end, end - 1, blocks, (one.guesses[-1],))

    def _has_room(self, one: ModelDrafter) -> bool:
        return one.length + len(one.guesses) <= min(self._longest, len(one.blocks) * BLOCK_SIZE)

    def _step(self, parts: list[tuple[ModelDrafter, Scheduled]]) -> list[ModelDrafter]:
        """Run one call, and make a draft token for each sequence whose last token was in the call."""
        if not parts:
            return []
        rows = self._runner.run([part for _, part in parts])
        sampled: list[ModelDrafter] = []
        places: list[int] = []
        end = 0
        for one, part in parts:
            one.done, end = part.confirmed_end, end + part.end - part.first_row
            if part.first_row < part.end:
                sampled.append(one)
                places.append(end - 1)
        if not sampled:
            return []
        settings_of_each = [(one.sequence.request.sampling, one) for one in sampled]
        settings = [way.sampler_settings for way, _ in settings_of_each]
        keys = [(w.seed, one.length + len(one.guesses), one.sequence.choice) for w, one in settings_of_each]
        tokens = sample_tokens(
            np.ascontiguousarray(rows, np.float32),
            np.array(places, np.int64),
            np.array(settings, np.float64),
            np.array(keys, np.uint64),
        )
        for one, token in zip(sampled, tokens):
            if token >= 0:
                one.guesses.append(token)
        return [one for one, token in zip(sampled, tokens) if token >= 0]
