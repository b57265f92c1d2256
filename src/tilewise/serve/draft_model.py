"""A smaller model that guesses how texts go on, for the larger one to confirm.

Its cache has as many blocks as the larger model's, and a text has the same ones in both; so nothing is to be managed
here but how far each text has been read. Guesses are drawn with the number that the larger model will draw with: models
that agree draw the same token.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tilewise import models
from tilewise.core import Border, TilewiseError, dtype, get_logger
from tilewise.core.limits import available_memory
from tilewise.kernels.sampling import draw_tokens
from tilewise.models import BLOCK_SIZE
from tilewise.serve.model import ServedModel
from tilewise.serve.runner import Runner
from tilewise.serve.scheduler import Scheduled
from tilewise.serve.sequence import Sequence
from tilewise.serve.speculation import ModelDrafter

__all__ = ["DraftModel"]

_border = Border("serve")


class DraftModel:
    """A loaded model that guesses. One thread at a time.

    Args:
        model_dir: a Hugging Face directory, of a model with the same vocabulary.
        target: whose tokens are guessed.
        count: guesses for a text, at most.

    Raises:
        ConfigError, CheckpointError: the directory is not a model we can run, or has another vocabulary.
        ResourceError: not enough memory.
    """

    def __init__(self, model_dir: str, target: ServedModel, count: int) -> None:
        config = models.open(model_dir, ignore=target.settings.ignore_config_fields)
        if config.vocab_size != target.config.vocab_size:
            rule = f"a draft model needs the model's vocabulary of {target.config.vocab_size}"
            _border.refuse(
                "speculative_config", rule, str(config.vocab_size), "choose one of the same family"
            )
        settings = target.settings
        per_block = models.kv_elements_per_token(config) * BLOCK_SIZE * dtype(target.dtype).numpy.itemsize
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
        """Read what is new in texts, and guess how those go on that are about to be written.

        Args:
            sequences: that have blocks.
        """
        asked = [s.drafter for s in sequences if isinstance(s.drafter, ModelDrafter) and s.left == 1]
        asked = [one for one in asked if len(one.sequence) < self._longest]
        try:
            ready = self._read([one for one in asked if one.length != len(one.sequence)])
            for _ in range(1, self._count):
                ready = self._step([(one, self._part(one)) for one in ready if self._has_room(one)])
        except TilewiseError as error:  # a text needs no guesses
            get_logger("serve").warning("the draft model failed, and its texts are read again: %s", error)
            for one in asked:
                one.done, one.guesses = 0, []

    def _read(self, asked: list[ModelDrafter]) -> list[ModelDrafter]:
        """Bring texts up to date, as many tokens as one call takes; first guesses of those that are."""
        room = self._limits.max_num_batched_tokens
        parts: list[tuple[ModelDrafter, Scheduled]] = []
        for one in asked:
            start, length = one.resume(), len(one.sequence)
            held = len(one.blocks) * BLOCK_SIZE  # the last token's block may not be there yet
            end = max(start, min(length, start + room, held))
            room -= end - start
            one.guesses, one.length = [], length if end == length else 0
            if end > start:
                first_row = end - 1 if end == length else end
                blocks = tuple(one.blocks[: self._model.max_blocks])
                parts.append((one, Scheduled(one.sequence, start, end, first_row, blocks)))
        return self._step(parts)

    def _part(self, one: ModelDrafter) -> Scheduled:
        """The last guess, to be computed."""
        end = one.length + len(one.guesses)
        blocks = tuple(one.blocks[: self._model.max_blocks])
        return Scheduled(one.sequence, end - 1, end, end - 1, blocks, (one.guesses[-1],))

    def _has_room(self, one: ModelDrafter) -> bool:
        return one.length + len(one.guesses) <= min(self._longest, len(one.blocks) * BLOCK_SIZE)

    def _step(self, parts: list[tuple[ModelDrafter, Scheduled]]) -> list[ModelDrafter]:
        """One call; a guess more for each text whose last token was in it."""
        if not parts:
            return []
        rows = self._runner.run([part for _, part in parts])
        sampling_drafters: list[ModelDrafter] = []
        places: list[int] = []
        end = 0
        for one, part in parts:
            one.done, end = part.known, end + part.end - part.first_row
            if part.first_row < part.end:
                sampling_drafters.append(one)
                places.append(end - 1)
        if not sampling_drafters:
            return []
        ways = [(one.sequence.request.sampling, one) for one in sampling_drafters]
        settings = [way.sampler_settings for way, _ in ways]
        keys = [(w.seed, one.length + len(one.guesses), one.sequence.choice) for w, one in ways]
        tokens = draw_tokens(
            np.ascontiguousarray(rows, np.float32),
            np.array(places, np.int64),
            np.array(settings, np.float64),
            np.array(keys, np.uint64),
        )
        for one, token in zip(sampling_drafters, tokens):
            if token >= 0:
                one.guesses.append(token)
        return [one for one, token in zip(sampling_drafters, tokens) if token >= 0]
