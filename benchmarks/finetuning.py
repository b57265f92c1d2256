"""Measures steps of fine-tuning: all weights, and adapters (LoRA) on frozen weights in bf16.

Models have the shapes of SmolLM2-135M and GPT-2 small. A step's bound is the time of its matrix
products alone, those of attention included, at the rate that products of weights reach in the full
step of the same run. A LoRA step has two thirds of the products of weights of a full step, because
frozen weights have no gradients, and those of the adapters. transformers trains all weights and PEFT the
adapters, in pure bf16; each mode is a process, rounds visit all modes in turn, and medians are
compared. The last figure is the planned memory of a LoRA step of a 1.1B model, without the
activations, relative to its weights.

Run: python benchmarks/finetuning.py [--shapes smollm2 gpt2] [--rounds 3] [--steps 2] [--threads 2] [--without-peers]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from demo_step import GPT2, Contestant, step_of_torch, take_turns
from figures import Figure, show
from load_weights import SHAPES as LARGER
from machine import machine
from step_profile import describe

import tilewise as tw
from tilewise import models
from tilewise.checkpoint.adapters import LoraConfig
from tilewise.core.sizes import format_bytes
from tilewise.models import llama
from tilewise.session import GraphInstance, Plan

BATCH, CONTEXT, RANK = 4, 256, 16
LORA = LoraConfig(r=RANK, alpha=32.0, target_modules="all-linear")
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
LARGE = {**LARGER["tinyllama"], "max_position_embeddings": 2048, "tie_word_embeddings": False}
SHAPES = {"smollm2": SMOLLM2, "gpt2": GPT2}
OF_BOUND, OF_WEIGHTS = 90.0, 1.25  # musts
WARM_UP = 2


def batch_of(step: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Tokens and labels of a step, the same for all."""
    ids = np.random.default_rng(step).integers(0, vocab_size, (BATCH, CONTEXT + 1), dtype=np.int32)
    return {"tokens": np.ascontiguousarray(ids[:, :-1]), "labels": np.ascontiguousarray(ids[:, 1:])}


# ---- ours ------------------------------------------------------------------------------------------------


def make_plan(
    shape: dict[str, Any], kind: str, threads: int, batch: int = BATCH, context: int = CONTEXT, **options: Any
) -> Plan:
    """The plan of a step: of all weights (`full`), or of adapters (`lora`)."""
    config = llama.LlamaConfig(**shape)
    layout = models.lora_layout(config, LORA) if kind == "lora" else None
    graph = tw.ComputeGraph("llama", adapters=None if layout is None else layout.adapters)
    models.build_training_graph(graph, config, batch, context, dtype="bf16")
    if layout is not None:
        layout.freeze_base(graph)
    graph.optimize(tw.optim.AdamW())
    return graph.plan(workers_per_device=threads, **options)


def make_model(shape: dict[str, Any], kind: str, threads: int) -> GraphInstance:
    """A model with random weights."""
    model = tw.GraphInstance(make_plan(shape, kind, threads))
    model.initialize(seed=0)
    return model


def tilewise_step(shape: dict[str, Any], kind: str, threads: int) -> Callable[[int], float]:
    """A function that does one step of ours, and returns the loss."""
    model = make_model(shape, kind, threads)
    return lambda step: float(model.step(batch_of(step, shape["vocab_size"]), lr=1e-4).loss)


def take_turns_of_products(shape: dict[str, Any], threads: int) -> None:
    """Like `take_turns` for full steps of ours, but the seconds are those that the workers spend in
    matrix products, divided by their number.
    """
    model = make_model(shape, "full", threads)
    labels = {label for label, row in describe(model.plan).items() if row.flops}
    model.trace(True)
    step = 0
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            model.step(batch_of(step, shape["vocab_size"]), lr=1e-4)
            own = [task for task in model.timeline().tasks if task.kernel in labels]
            seconds.append(sum(task.end_ns - task.start_ns for task in own) / 1e9 / threads)
            step += 1
        print(json.dumps({"seconds": seconds, "loss": 0.0}), flush=True)


def flops_of(shape: dict[str, Any], threads: int) -> float:
    """Operations of the products of a full step."""
    return sum(row.flops for row in describe(make_plan(shape, "full", threads)).values())


def attention_flops(shape: dict[str, Any]) -> float:
    """Operations of the products of causal attention in a step: two forward, four backward."""
    forward = 2.0 * BATCH * CONTEXT**2 * shape["hidden_size"] * shape["num_hidden_layers"]
    return 3.0 * forward


def adapter_flops(shape: dict[str, Any]) -> float:
    """Operations of the products of all adapters in a step: forward, input and weight gradients."""
    config = llama.LlamaConfig(**shape)
    shapes, layout = dict(models.parameter_shapes(config)), models.lora_layout(config, LORA)
    return sum(6.0 * BATCH * CONTEXT * RANK * sum(shapes[name]) for name in layout.adapters)


# ---- peers -----------------------------------------------------------------------------------------------


def torch_step(shape: dict[str, Any], kind: str, threads: int) -> Callable[[int], float]:
    """A function that does one step of transformers, or of PEFT, and returns the loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    settings = LlamaConfig(**shape, rms_norm_eps=1e-5, rope_theta=10000.0, use_cache=False)
    model = LlamaForCausalLM(settings).train().to(torch.bfloat16)
    if kind == "lora":
        import peft

        adapters = peft.LoraConfig(
            r=RANK, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def batch(number: int) -> Iterable[np.ndarray]:
        return batch_of(number, shape["vocab_size"]).values()

    return step_of_torch(model, lambda: trained, optimizer, batch)


def serve(mode: str, threads: int) -> None:
    """Be one mode: take turns until standard input ends."""
    mode, _, name = mode.partition("@")
    who, _, kind = mode.partition(":")
    if kind == "products":
        take_turns_of_products(SHAPES[name], threads)
        return
    take_turns((tilewise_step if who == "tilewise" else torch_step)(SHAPES[name], kind, threads))


# ---- figures ---------------------------------------------------------------------------------------------


def measure(name: str, options: argparse.Namespace) -> None:
    """Steps of one shape."""
    modes = [f"{who}:{kind}@{name}" for kind in ("full", "lora") for who in ("tilewise", "torch")]
    modes = [mode for mode in modes if options.peers or mode.startswith("tilewise")]
    modes.insert(1, f"tilewise:products@{name}")
    contestants = [Contestant(mode, options.threads, None, script=__file__) for mode in modes]
    try:
        contestants = [c for c in contestants if c.take_turn(WARM_UP, False)]
        for _ in range(options.rounds):
            contestants = [c for c in contestants if c.take_turn(options.steps, True)]
        seconds = {c.mode.partition("@")[0]: c.step_s for c in contestants}
    finally:
        for contestant in contestants:
            contestant.close()
    flops, products_s = flops_of(SHAPES[name], options.threads), seconds["tilewise:products"]
    rate, attention = flops / products_s, attention_flops(SHAPES[name])
    lora = flops * 2 / 3 + attention + adapter_flops(SHAPES[name])
    bounds = {"full": (flops + attention) / rate, "lora": lora / rate}
    tokens = BATCH * CONTEXT
    for kind, who in (("full", "transformers"), ("lora", "PEFT")):
        own, peer = seconds[f"tilewise:{kind}"], seconds.get(f"torch:{kind}")
        title = f"{name}: a {'full' if kind == 'full' else 'LoRA'} step"
        peers = {} if peer is None else {who: tokens / peer}
        show(Figure(f"{title}, speed", tokens / own, "tokens/s", peers=peers, limit=tokens / bounds[kind]))
        share = 100 * bounds[kind] / own
        must = OF_BOUND if kind == "lora" else None
        note = f"{own:.3f} s, and its products alone {bounds[kind]:.3f} s at {rate / 1e9:.0f} GFLOP/s"
        show(Figure(f"{title}, of its bound", share, "%", must=must, limit=100, note=note))
    ratio = seconds["tilewise:lora"] / seconds["tilewise:full"]
    least = bounds["lora"] / bounds["full"]
    note = "the limit is the ratio of their products"
    show(Figure(f"{name}: LoRA, of a full step", ratio, "x", less_is_better=True, limit=least, note=note))


def measure_memory(threads: int) -> None:
    """The planned memory of a LoRA step of a 1.1B model."""
    weights = 2 * models.num_parameters(llama.LlamaConfig(**LARGE))
    plan = make_plan(LARGE, "lora", threads, 1, 512, recompute="full")
    (usage,) = plan.estimate_memory_usage()
    rest = usage["total"] - usage["activations"]
    full = make_plan(LARGE, "full", threads, 1, 512, recompute="full")
    note = (
        f"{format_bytes(rest)} and {format_bytes(usage['activations'])} of activations, weights "
        f"{format_bytes(weights)}; all weights trained need {format_bytes(full.estimate_memory_usage()[0]['total'])}"
    )
    show(
        Figure(
            "1.1B, LoRA: memory without activations, of weights",
            rest / weights,
            "x",
            less_is_better=True,
            must=OF_WEIGHTS,
            note=note,
        )
    )


def main() -> None:
    """Parse arguments, measure and show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without-peers", dest="peers", action="store_false")
    parser.add_argument("--serve", metavar="MODE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.threads)
        sys.exit()
    print(f"{machine('numpy', 'torch', 'transformers', 'peft')}; {options.threads} threads")
    for name in options.shapes:
        measure(name, options)
    measure_memory(options.threads)


if __name__ == "__main__":
    main()
