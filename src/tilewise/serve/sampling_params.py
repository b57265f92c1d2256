"""`SamplingParams`: settings of a request with vLLM's names and defaults, checked before any engine sees them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tilewise.core import Validator
from tilewise.core.validation import shown
from tilewise.serve.outputs import RequestOutputKind
from tilewise.serve.structured import StructuredOutputsParams
from tilewise.settings import OutputOptions, Sampling, SamplingSettings, documented, setting, settings_of

__all__ = ["SamplingParams"]

_NUM_SEEDS = 2**63  # a negative seed stands for one of the larger ones
_validate = Validator("serve")


@documented
@dataclass(frozen=True)
class SamplingParams(OutputOptions, SamplingSettings):
    """How tokens are chosen, when a text ends and what is reported about it.

    A text depends on the prompt, these settings, the seed and its index only, not on the engine's other requests.

    Args:

    Raises:
        ConfigError: a value outside its range, or two that contradict each other.
    """

    output_kind: RequestOutputKind = setting(
        RequestOutputKind.CUMULATIVE,
        "The content of each output of a stream: the text so far, the new part, or only the final output.",
        on_command_line=False,
        default_text="CUMULATIVE",
    )
    structured_outputs: StructuredOutputsParams | None = setting(
        None,
        "A JSON schema, an expression, choices or a grammar that the text follows.",
        on_command_line=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seed", "max_tokens"):
            if getattr(self, name) == -1:  # the same as None
                object.__setattr__(self, name, None)
        _validate.instance(
            "sampling_params", "output_kind", self.output_kind, RequestOutputKind, "pass one of its values"
        )
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            rule = "logit_bias must be a dictionary from ids to numbers"
            _validate.invalid("sampling_params", rule, shown(self.logit_bias), "pass a dict")
        if self.allowed_token_ids is not None and len(self._sequence("allowed_token_ids")) == 0:
            rule = "allowed_token_ids must not be empty"
            _validate.invalid("sampling_params", rule, "no ids", "pass None to allow all")
        if not self.detokenize and self.stop:
            rule, advice = "stop strings need detokenize=True", "set it, or remove stop"
            _validate.invalid("sampling_params", rule, "detokenize=False", advice)
        if self.structured_outputs is not None:
            advice = "pass StructuredOutputsParams(...)"
            kind = StructuredOutputsParams
            _validate.instance("sampling_params", "structured_outputs", self.structured_outputs, kind, advice)
            if self.ignore_eos:
                rule, advice = "structured_outputs end with their grammar", "remove ignore_eos"
                _validate.invalid("sampling_params", rule, "ignore_eos=True", advice)
        self.sampling(1)

    @classmethod
    def of(
        cls, sampling: Sampling, *, structured_outputs: StructuredOutputsParams | None = None
    ) -> SamplingParams:
        """Make the object from settings that were resolved from a command line and a model's files.

        Args:
            sampling: the resolved settings.
            structured_outputs: the grammar that the text follows.

        Raises:
            ConfigError: the two arguments contradict each other.
        """
        values = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
        values["logit_bias"] = dict(sampling.logit_bias)
        values["allowed_token_ids"] = sampling.allowed_token_ids or None
        return cls(**values, structured_outputs=structured_outputs)

    def sampling(self, room: int) -> Sampling:
        """The settings with every value decided; a missing seed is chosen here.

        Args:
            room: number of positions that the context has left. It replaces a `max_tokens` of None.

        Raises:
            ConfigError: a value outside its range.
        """
        values = {one.name: getattr(self, one.name) for one in fields(SamplingSettings)}
        for name, one in settings_of(Sampling).items():
            if one.is_list and not isinstance(values[name], (str, Mapping)):
                values[name] = self._sequence(name)
        if isinstance(self.stop, str):
            values["stop"] = (self.stop,)
        if self.logit_bias is None:
            values["logit_bias"] = ()
        if self.max_tokens is None:
            values["max_tokens"] = max(room, self.min_tokens, 1)
        values["seed"] = secrets.randbits(63) if self.seed is None else self.seed % _NUM_SEEDS
        return Sampling(**values)

    def output_options(self) -> OutputOptions:
        """What is reported about the texts."""
        return OutputOptions(**{one.name: getattr(self, one.name) for one in fields(OutputOptions)})

    def _sequence(self, name: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        return () if value is None else tuple(_validate.sequence("sampling_params", name, value, "values"))
