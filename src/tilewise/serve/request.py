"""A request to the engine: checked token ids, sampling settings, and what to report."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.generate import Sampling
from tilewise.serve.blocks import Scope
from tilewise.serve.structured import Grammar
from tilewise.settings import OutputOptions

__all__ = ["PRIORITIES", "Request"]

PRIORITIES = 1 << 20
"""Largest absolute value of a priority."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. All values were checked when the request arrived.

    Attributes:
        request_id: the caller's name for it.
        ids: token ids of the prompt; at least one.
        sampling: settings of sampling, with `n` texts.
        output_options: what is reported about the texts.
        end_ids: tokens that end a text.
        priority: lower runs first.
        scope: blocks are shared only between requests of equal scope.
        max_model_len: largest number of positions of prompt and text together.
        is_pooled: whether the result is the prompt's vector instead of texts.
        index: number that the caller gave the request; its deltas have it as `sequence`.
        grammar: grammar that each text follows, in its initial state; None without a grammar.
        adapter: number of the adapter that the texts are written with; 0 for the model alone.
        is_named: whether the caller chose the name. Then the name may be taken already, which must
            be checked.
    """

    request_id: str
    ids: tuple[int, ...]
    sampling: Sampling
    output_options: OutputOptions = field(default_factory=OutputOptions)
    end_ids: frozenset[int] = frozenset()
    priority: int = 0
    scope: Scope = ()
    max_model_len: int = 1 << 31
    is_pooled: bool = False
    index: int = 0
    grammar: Grammar | None = field(default=None, compare=False)
    is_named: bool = False
    adapter: int = 0

    @property
    def all_end_ids(self) -> frozenset[int]:
        """Tokens that end a text: the model's end tokens and `stop_token_ids`."""
        model_ends = frozenset() if self.sampling.ignore_eos else self.end_ids
        return model_ends | frozenset(self.sampling.stop_token_ids)
