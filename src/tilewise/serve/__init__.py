"""Serving: runs many requests on one model at once. Each request gets the text that it would get
alone.

The engine of this package manages the blocks of the KV cache and shares them between requests,
chooses the tokens of the next model call, calls the model, and samples from its logits. `LLM`
answers lists of prompts. `Engine` serves concurrent callers.
"""

from tilewise.serve.engine import Engine
from tilewise.serve.llm import LLM
from tilewise.serve.logprobs import Logprob
from tilewise.serve.outputs import (
    CompletionOutput,
    Delta,
    EngineStats,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
    StepTimes,
)
from tilewise.serve.sampling_params import SamplingParams
from tilewise.serve.structured import StructuredOutputsParams
from tilewise.settings import EngineSettings, SpeculativeConfig

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "Engine",
    "EngineSettings",
    "EngineStats",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpeculativeConfig",
    "StepTimes",
    "StructuredOutputsParams",
]
