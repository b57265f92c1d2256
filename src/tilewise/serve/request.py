"""A request as the engine takes it: checked token ids, settings of sampling, and what is reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.generate import Sampling
from tilewise.serve.block_key import Scope
from tilewise.serve.structured import Grammar
from tilewise.settings import OutputOptions

__all__ = ["PRIORITIES", "Request"]

PRIORITIES = 1 << 20
"""Priorities lie within so many of 0."""


@dataclass(frozen=True)
class Request:
    """One prompt and the texts that shall follow it. Everything in it was checked at the border.

    Attributes:
        request_id: the caller's name for it.
        ids: of the prompt; at least one.
        sampling: how tokens are chosen, with its seed; `n` texts.
        output_options: what is reported about them.
        end_ids: tokens that end a text.
        priority: lower goes first.
        scope: with whose blocks its blocks may be shared.
        max_model_len: positions that prompt and text have together at most.
        is_pooled: the prompt's vector is wanted, and no text.
        index: the caller's number for it, which its deltas have.
        grammar: that each text follows, at its beginning.
        is_named: its name is a caller's choice, which another may make as well.
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

    @property
    def all_end_ids(self) -> frozenset[int]:
        """Tokens that end a text of this request, the model's own and the caller's."""
        own = frozenset() if self.sampling.ignore_eos else self.end_ids
        return own | frozenset(self.sampling.stop_token_ids)
