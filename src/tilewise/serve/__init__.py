"""Serving: many requests at once over one model, each as if it were alone.

Owns the engine: blocks of the KV cache and who shares them, which tokens go into the next call of the model, the calls,
what their logits become. `LLM` answers lists of prompts, `Engine` callers that come and go.
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
