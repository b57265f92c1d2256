"""Batches of sequences of different lengths, padded to any width, and results of steps on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from small_llama import change_where, config, training_graph

import tilewise as tw
from tilewise.models import llama
from tilewise.session import Plan

VOCAB, PAD = 96, 3


def small_model() -> llama.LlamaConfig:
    """One small layer: each kind of sum over rows occurs once."""
    return config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
    )


def graph_for(seq: int | tw.Dim, dtype: str = "f32", batch: int = 4) -> tw.ComputeGraph:
    """A training graph of one length, or of any up to a bound."""
    return training_graph(small_model(), dtype, batch, seq)


def padded(lengths: Sequence[int], width: int, seed: int = 0, pad: int = PAD) -> dict[str, np.ndarray]:
    """Random sequences of some lengths, each padded to `width` with a token whose label is not counted."""
    generator = np.random.default_rng(seed)
    tokens, labels = (
        np.full((len(lengths), width), pad, np.int32),
        np.full((len(lengths), width), -100, np.int32),
    )
    for row, length in enumerate(lengths):
        drawn = generator.integers(0, VOCAB, length + 1).astype(np.int32)
        tokens[row, :length], labels[row, :length] = drawn[:-1], drawn[1:]
    return {"tokens": tokens, "labels": labels}


def steps(
    graph: tw.ComputeGraph, plan: Plan, batches: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Losses and norms of all steps, the gradients of the last, and the state after it."""
    with graph.instantiate(plan) as running:
        running.initialize(0, 0.1)
        results = [running.step(batch, 1e-2) for batch in batches]
        gradients = {f"{n}.grad": running.get_tensor(f"{n}.grad") for n in running.parameter_names()}
        gradients |= running.state_dict()
    gradients["losses"] = np.array([(r.loss, r.grad_norm) for r in results], np.float32)
    return gradients


def differing(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[str]:
    """Names of what differs in a bit, signs of zero included."""
    assert a.keys() == b.keys()
    return [name for name in a if a[name].tobytes() != b[name].tobytes()]


def change_ints(plan: Plan, kernel: str, change: Callable[[list], list]) -> Plan:
    """A fault: other integers in every instruction of a kernel."""
    return change_where(
        lambda instruction: instruction.kernel.startswith(kernel),
        lambda instruction: replace(instruction, ints=tuple(change(list(instruction.ints)))),
    )(plan)
