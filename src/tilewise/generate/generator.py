"""Text from a model directory: prompts in, pieces of text out as they come.

One decoding graph over flattened tokens serves prefill in chunks and decoding alike; each call mixes what the
sequences need next. Text does not depend on the batch, the chunks or the number of devices. Owns an instance
and its KV cache, whose blocks all sequences of all iterators share. Refuses prompts that leave no room for a
token, and more sequences at a time than it was made for.

Shapes: T tokens of a call, S sequences of a call, V vocabulary.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import tilewise as tw
from tilewise import models
from tilewise.checkpoint import load_generation_config, load_tokenizer
from tilewise.core import MAX_DEVICES, Border, ConfigError, PlanError, ResourceError, choose_dtype, shown
from tilewise.generate.blocks import BlockTable, num_blocks_for
from tilewise.generate.detokenizer import Detokenizer
from tilewise.generate.history import History
from tilewise.generate.prompts import check_prompt, encode_prompt, word_ids
from tilewise.generate.sampling import Sampling, pick_token
from tilewise.generate.stopping import StopFinder
from tilewise.models import BLOCK_SIZE

if TYPE_CHECKING:
    from tilewise.models import ModelConfig
    from tilewise.session import GraphInstance

__all__ = ["Generator", "Piece"]

_MOST = 1 << 20
_LOAD_FORMATS = ("auto", "dummy")
_border = Border("generate")


@dataclass(frozen=True)
class Piece:
    """What one step added to one sequence.

    Attributes:
        sequence: index of the prompt.
        choice: index among the prompt's texts.
        token: the new token.
        text: whole characters that can be shown now; may be empty.
        finish_reason: `stop` (an end token or a stop string), `length` (max_tokens or the context), or None while it
            goes on.
    """

    sequence: int
    choice: int
    token: int
    text: str
    finish_reason: str | None


@dataclass
class _Sequence:
    """A sequence on its way. `done` counts the positions already in the KV cache, whose blocks `key` owns."""

    index: int
    choice: int
    key: int
    history: History
    sampling: Sampling
    detokenizer: Detokenizer
    stops: StopFinder
    done: int = 0

    @property
    def left(self) -> int:
        """Tokens that are not yet in the KV cache."""
        return len(self.history) - self.done

    @property
    def is_ready(self) -> bool:
        """Whether the next call sees all of its tokens but those it makes."""
        return self.left == 0


@dataclass
class _Call:
    """Inputs of one call of the decoding graph, as they gather."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)

    def add(self, ids: Sequence[int], first: int, blocks: list[int]) -> None:
        """Add tokens of one sequence at positions from `first` on."""
        for position, token in enumerate(ids, first):
            self.tokens.append(token)
            self.positions.append(position)
            self.slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            self.sequence.append(len(self.blocks))
        self.rows.append(len(self.tokens) - 1)
        self.blocks.append(blocks)

    def inputs(self, max_blocks: int) -> dict[str, NDArray[np.int32]]:
        """The arrays that the graph takes."""
        table = np.zeros((len(self.blocks), max_blocks), np.int32)
        for row, blocks in enumerate(self.blocks):
            table[row, : len(blocks)] = blocks
        named = {name: getattr(self, name) for name in ("tokens", "positions", "slots", "sequence", "rows")}
        return {**{name: np.array(values, np.int32) for name, values in named.items()}, "block_table": table}


class Generator:
    """Writes with a model. Use with `with`, or call `close`. Threads may write at once: their calls take turns.

    Args:
        model_dir: a Hugging Face directory (config.json, weights, tokenizer files).
        tp: devices that share every layer.
        dtype: `bf16` or `f32` in any spelling of `core.dtypes`, or `auto`: as config.json says, else bf16.
        max_sequences: texts at a time, over all iterators that are being read.
        max_model_len: the context limit, which RoPE's frequencies are chosen by where they depend on one (`dynamic`,
            `longrope`); by default `models.default_context`. The text depends on it, and on no other size.
        max_context: positions per sequence that there is memory for; at most `max_model_len`, which is the default.
        max_tokens_per_call: prompts are read in chunks of at most so many tokens.
        generation_config: end tokens are those of generation_config.json, where there is one and it has some, and its
            settings stand in `generation_config`, for `combine_settings`; False: the file is not looked at.
        load_format: `auto`: the directory's weights; `dummy`: random ones from config.json alone, the same for every
            number of devices.
        on_progress: called with the bytes of weights read so far and in all.

    Raises:
        ConfigError, CheckpointError: the directory is not a model we can run, or a setting has no such value.
        LayoutError: the model cannot be cut over `tp` devices.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        tp: int = 1,
        dtype: str = "bf16",
        max_sequences: int = 1,
        max_model_len: int | None = None,
        max_context: int | None = None,
        max_tokens_per_call: int = 256,
        generation_config: bool = True,
        load_format: str = "auto",
        on_progress: Callable[[int, int], object] | None = None,
    ) -> None:
        tp = _border.integer("generator", "tp", tp, 1, MAX_DEVICES)
        max_sequences = _border.integer("generator", "max_sequences", max_sequences, 1, _MOST)
        max_tokens = _border.integer("generator", "max_tokens_per_call", max_tokens_per_call, 1, _MOST)
        is_dummy = _border.choice("generator", "load_format", load_format, _LOAD_FORMATS) == "dummy"
        if on_progress is not None and not callable(on_progress):
            rule, advice = "on_progress must be a function", "pass one of two numbers"
            _border.refuse("generator", rule, shown(on_progress), advice)
        self.config: ModelConfig = models.open(model_dir)
        self.dtype = choose_dtype(dtype, self.config.dtype)
        self.tokenizer = load_tokenizer(model_dir, self.config.vocab_size)
        is_used = _border.truth("generator", "generation_config", generation_config)
        self.generation_config = load_generation_config(model_dir, self.config.vocab_size) if is_used else {}
        self._end_ids = _end_ids(self.generation_config, self.config)
        longest = models.max_context(self.config)
        wanted = models.default_context(self.config) if max_model_len is None else max_model_len
        limit = _border.integer("generator", "max_model_len", wanted, 1, longest)
        wanted = limit if max_context is None else max_context
        self.max_context = _border.integer("generator", "max_context", wanted, 1, limit)
        blocks_each = num_blocks_for(self.max_context)
        self._max_sequences = max_sequences
        self._chunk = max(max_tokens, max_sequences)
        self._num_blocks = max_sequences * blocks_each
        self._max_blocks = min(self._num_blocks, blocks_each)
        weights = {} if is_dummy else models.open_weights(model_dir, self.config)
        self.stored_dtypes = frozenset(str(tensor.dtype) for tensor in weights.values())
        graph = tw.ComputeGraph(self.config.model_type)
        sizes = (self._chunk, max_sequences, self._num_blocks)
        models.build_decoding_graph(
            graph, self.config, *sizes, self.dtype, context=limit, num_positions=self.max_context
        )
        strategy = tw.DistributionStrategy.tensor_parallel(tp) if tp > 1 else tw.DistributionStrategy.single()
        graph.set_distribution(strategy)
        self.instance: GraphInstance = graph.instantiate(graph.plan())
        try:
            if is_dummy:
                self.instance.initialize(0, self.config.initializer_range)
            else:
                self.instance.load_parameters(weights, on_progress=on_progress)
        except BaseException:
            self.instance.close()
            raise
        self._blocks = BlockTable(self._num_blocks)
        self._num_live = 0
        self._keys = itertools.count()
        self._lock = threading.RLock()  # an iterator may be dropped, and give its blocks back, within a call
        self._process = os.getpid()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the devices and free their memory, when no thread's call is under way any more."""
        if os.getpid() != self._process:  # in a forked child, which has none of the workers
            self.instance.close()
            return
        with self._lock:
            self.instance.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread at a time. A forked child has none: a thread that it lacks may hold the lock for ever."""
        if os.getpid() != self._process:
            raise PlanError(
                "[generate.generator] a generator belongs to the process that made it; got a call in a forked one; "
                "make one there"
            )
        with self._lock:
            yield

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> Iterator[Piece]:
        """Continue every prompt; yields a piece per new token, interleaved over the texts.

        The iterator holds its place in the KV cache from the first piece to the last, or until it is closed or dropped.

        Args:
            prompts: texts, or token ids, which are taken as they are.
            sampling: how to choose tokens, for all prompts or one for each. Equal prompts with equal sampling continue
                alike, whatever stands beside them.

        Raises:
            ConfigError: more texts than `max_sequences`, or a prompt too long for the context; at once.
            ResourceError: other iterators hold the places; at the first piece.
            NotFinite: the model's logits are no finite numbers.
            PlanError: the generator is closed, or another process's.
        """
        texts = _border.sequence("generator", "prompts", prompts, "texts")
        ways = [sampling] * len(texts) if isinstance(sampling, Sampling) else sampling
        ways = _border.sequence("generator", "sampling", ways, "Sampling, one per prompt")
        if len(ways) != len(texts):
            _border.refuse(
                "generator",
                "sampling is one for all or one per prompt",
                f"{len(ways)} for {len(texts)}",
                "correct it",
            )
        for way in ways:
            _border.instance("generator", "sampling", way, Sampling, "pass Sampling(...)")
        wanted = sum(way.n for way in ways)
        if wanted > self._max_sequences:
            raise ConfigError(
                f"[generate.generator] at most max_sequences={self._max_sequences} texts go together; "
                f"got {wanted}; make the generator with more"
            )
        return self._write(
            [s for i, (text, way) in enumerate(zip(texts, ways)) for s in self._start(i, text, way)]
        )

    def _write(self, sequences: list[_Sequence]) -> Iterator[Piece]:
        self._take_places(len(sequences))
        try:
            active = sequences
            while active:
                finished = []
                for sequence, logits_V in self._call(active):
                    piece = self._extend(sequence, logits_V)
                    if piece.finish_reason is not None:
                        finished.append(sequence)
                    yield piece
                active = [sequence for sequence in active if sequence not in finished]
        finally:
            if os.getpid() == self._process:  # a forked child's copy holds nothing
                with self._lock:
                    self._num_live -= len(sequences)
                    for sequence in sequences:
                        self._blocks.release(sequence.key)

    def _take_places(self, num_sequences: int) -> None:
        with self._turn():
            if self._num_live + num_sequences > self._max_sequences:
                raise ResourceError(
                    f"[generate.generator] at most max_sequences={self._max_sequences} prompts are written at a "
                    f"time; got {num_sequences} beside {self._num_live} of other iterators; finish or close those, or "
                    "make the generator with more"
                )
            self._num_live += num_sequences

    def _start(self, index: int, prompt: str | Sequence[int], sampling: Sampling) -> list[_Sequence]:
        ids = encode_prompt(self.tokenizer, prompt) if isinstance(prompt, str) else self._checked(prompt)
        if not ids:
            ids = [self.config.bos_token_id if self.config.bos_token_id is not None else 0]
        check_prompt(len(ids), self.max_context)
        bad = (*sampling.bad_words_ids, *(word_ids(self.tokenizer, sampling.bad_words)))
        sampling = replace(sampling, bad_words_ids=bad)
        return [
            _Sequence(
                index,
                choice,
                next(self._keys),
                History(ids),
                sampling,
                Detokenizer(self.tokenizer, ids),
                StopFinder(sampling.stop, sampling.include_stop),
            )
            for choice in range(sampling.n)
        ]

    def _checked(self, ids: Sequence[int]) -> list[int]:
        given = _border.sequence("generator", "a prompt", ids, "ids, or a text")
        last = self.config.vocab_size - 1
        return [_border.integer("generator", "an id of a prompt", id_, 0, last) for id_ in given]

    def _call(self, active: list[_Sequence]) -> list[tuple[_Sequence, NDArray[Any]]]:
        """Run the graph once, in turn with other threads' calls.

        Returns the sequences whose next token is due, with their logits. Those that decode go first, one token each;
        what room is left reads prompts.
        """
        call, members, room = _Call(), [], self._chunk
        with self._turn():
            for sequence in sorted(active, key=lambda s: s.left):
                count = min(sequence.left, room)
                if count == 0:
                    continue
                end = sequence.done + count
                blocks = self._blocks.grow(sequence.key, end)
                call.add(sequence.history.ids[sequence.done : end], sequence.done, blocks)
                sequence.done = end
                room -= count
                members.append(sequence)
            self.instance.forward(**call.inputs(self._max_blocks))
            logits_SV = self.instance.get_tensor("logits")
        return [(sequence, logits_SV[row]) for row, sequence in enumerate(members) if sequence.is_ready]

    def _extend(self, sequence: _Sequence, logits_V: NDArray[Any]) -> Piece:
        history, sampling = sequence.history, sequence.sampling
        ends = frozenset() if sampling.ignore_eos else self._end_ids
        token = pick_token(logits_V, sampling, history, ends, sequence.choice)
        reason = None
        if token in ends:
            text, reason = sequence.detokenizer.finish(), "stop"
        else:
            history.append(token)
            text = sequence.detokenizer.add(token)
            if history.num_new >= sampling.max_tokens or len(history) >= self.max_context:
                text, reason = text + sequence.detokenizer.finish(), "length"
        if history.num_new >= sampling.min_tokens:
            text, is_stopped = sequence.stops.add(text)
            reason = "stop" if is_stopped else reason
            text += "" if reason is None else sequence.stops.finish()
        return Piece(sequence.index, sequence.choice, token, text, reason)


def _end_ids(generation_config: dict[str, Any], config: ModelConfig) -> frozenset[int]:
    """End tokens: those of generation_config.json, else those of config.json."""
    eos = generation_config.get("eos_token_id")
    if eos is None:
        return frozenset(config.eos_token_ids)
    return frozenset([eos] if isinstance(eos, int) else eos)
