"""Measures forward and backward of one block of a large Llama, compared with PyTorch.

The block has hidden size 4,096, intermediate size 14,336, 32 heads (8 of keys and values) and reads
512 tokens. PyTorch runs `transformers`' LlamaForCausalLM with one layer, eager and compiled, in
bf16 autocast and in pure bf16 (whose gradients are bf16; ours are fp32). No optimizer runs. Modes
are processes that take turns, as in demo_step.py; the ceiling is multiply-adds on registers.

Run: python benchmarks/llama_block.py [--rounds 3] [--steps 2] [--threads 2] [--dtype bf16] [--without-compile]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from demo_step import Contestant, measure_peak, take_turns
from figures import Figure, show
from machine import machine

TOKENS, VOCABULARY = 512, 256
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": True,
}
TIMES, OF_PEAK = (1.2, 1.4), 90.0  # PyTorch's best mode; per cent


def batch_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of a step, `[1, TOKENS]`, the same for all."""
    ids = np.random.default_rng(step).integers(0, VOCABULARY, (1, TOKENS + 1), dtype=np.int32)
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def flops() -> float:
    """Multiplications and additions, forward and backward: weights three times, causal attention three times."""
    hidden, inner = MODEL["hidden_size"], MODEL["intermediate_size"]
    kv = hidden * MODEL["num_key_value_heads"] // MODEL["num_attention_heads"]
    weights = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + VOCABULARY * hidden
    return TOKENS * (6.0 * weights + 3.0 * 2.0 * TOKENS * hidden)


# ---- one mode, in a process of its own -------------------------------------------------------------------


def tilewise_pass(dtype: str, threads: int) -> Callable[[int], float]:
    """A function that goes forward and backward once with ours and returns the loss."""
    import tilewise as tw
    from tilewise import models
    from tilewise.models import llama

    graph = tw.ComputeGraph("block")
    models.build_training_graph(graph, llama.LlamaConfig(**MODEL), 1, TOKENS, dtype=dtype)
    model = graph.instantiate(graph.plan(workers_per_device=threads))
    model.initialize(seed=0)

    def once(number: int) -> float:
        tokens, labels = batch_of(number)
        model.forward(tokens=tokens, labels=labels)
        model.backward()
        return float(model.get_tensor("loss")[0])

    return once


def torch_pass(precision: str, is_compiled: bool, threads: int) -> Callable[[int], float]:
    """The same with PyTorch: `f32`, `bf16-autocast` or `bf16-pure`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, rms_norm_eps=1e-5, rope_theta=10000.0, use_cache=False)
    model = LlamaForCausalLM(config).train()
    if precision == "bf16-pure":
        model = model.to(torch.bfloat16)
    forward = torch.compile(model) if is_compiled else model

    def once(number: int) -> float:
        tokens, labels = (torch.from_numpy(a).long() for a in batch_of(number))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-autocast"):
            logits = forward(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    return once


def serve(mode: str, threads: int) -> None:
    """Be one mode: take turns until standard input ends."""
    side, precision, *variant = mode.split(":")
    if side == "tilewise":
        once = tilewise_pass(precision, threads)
    else:
        once = torch_pass(precision, variant == ["compile"], threads)
    take_turns(once)


# ---- all modes, turn by turn -----------------------------------------------------------------------------


def compete(options: argparse.Namespace) -> list[Contestant]:
    """Every mode in turns; those that work."""
    precisions = ["f32"] if options.dtype == "f32" else ["bf16-autocast", "bf16-pure"]
    variants = ["eager"] if options.without_compile else ["eager", "compile"]
    modes = [f"tilewise:{options.dtype}", *(f"torch:{p}:{v}" for p in precisions for v in variants)]
    running = []
    try:
        for mode in modes:
            one = Contestant(mode, options.threads, None, __file__)
            running.append(one)
            if one.take_turn(2, is_counted=False):
                print(f"ready: {mode:28} (loss {one.loss:.4f})", flush=True)
            else:
                one.close()
                running.remove(one)
        for number in range(options.rounds):
            for one in list(running):
                # the first pass wakes threads and caches up
                if one.take_turn(1, is_counted=False) and one.take_turn(options.steps, is_counted=True):
                    print(f"round {number + 1}: {one.mode:28} {one.last_s * 1e3:9.1f} ms", flush=True)
                else:
                    one.close()
                    running.remove(one)
    finally:
        for one in running:
            one.close()
    return running


def main() -> None:
    """Parse arguments; be a contestant or run the contest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--without-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--serve", metavar="MODE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.threads)
        return
    print(f"{machine('numpy', 'torch', 'transformers')}; {options.threads} threads")
    before = measure_peak(f"peak_{options.dtype}", options.threads)
    every = compete(options)
    peak = max(before, measure_peak(f"peak_{options.dtype}", options.threads))
    ours = [one for one in every if one.mode.startswith("tilewise")]
    theirs = {one.mode: one.step_s for one in every if one.mode.startswith("torch")}
    if not ours:
        sys.exit("ours did not run: see above")
    took = ours[0].step_s
    what = f"Llama block, {TOKENS} tokens, {options.dtype}"
    peers = {mode: seconds * 1e3 for mode, seconds in theirs.items()}
    show(Figure(what, took * 1e3, "ms", less_is_better=True, peers=peers, limit=flops() / peak * 1e3))
    show(Figure(f"{what}: of the peak", flops() / peak / took * 100, "%", goal=OF_PEAK, limit=100.0))
    if theirs:
        must, goal = TIMES
        ratio = min(theirs.values()) / took
        show(Figure(f"{what}: times PyTorch's best mode", ratio, "x", must=must, goal=goal))


if __name__ == "__main__":
    main()
