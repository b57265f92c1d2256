"""Measures step time and activation memory with recomputation.

Compares `recompute="full"` with saving everything, and with PyTorch with and without
`torch.utils.checkpoint` (`transformers`' GPT2LMHeadModel without dropout, eager, fp32 or bf16
autocast). The model is GPT-2 small, 4 sequences of 256 tokens, one device. Activation memory is
what layers hold at the end of the forward pass: as the plan lists it, and in PyTorch what
`saved_tensors_hooks` receive. Modes are processes that take turns; ratios are medians over the
rounds.

Run: python benchmarks/recompute.py [--rounds 3] [--steps 1] [--minutes 8] [--threads 2] [--dtype f32 bf16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from demo_step import CONTEXT, Contestant, batch_of, build_override
from figures import Figure, show
from machine import machine

BATCH, VOCABULARY = 4, 50257
MODEL = {"vocab_size": VOCABULARY, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": CONTEXT}
TIME, MEMORY = (1.35, 1.33), (0.25, 0.2)  # must and goal of "full" against "none"

Step = Callable[[int], float]
Memory = dict[str, int]  # bytes: of layers, of all results, of temporaries where they are known


# ---- one mode, in a process of its own -------------------------------------------------------------------


def tilewise_mode(dtype: str, recompute: str, threads: int) -> tuple[Step, Callable[[], Memory]]:
    """A step of ours, and the activations of its plan."""
    import tilewise as tw
    from tilewise import models
    from tilewise.plan.memory import most_at_one_time

    graph = tw.ComputeGraph("gpt2")
    config = models.config_from_dict({"model_type": "gpt2", **MODEL})
    models.build_training_graph(graph, config, BATCH, CONTEXT, dtype)
    graph.optimize(tw.optim.AdamW())
    plan = graph.plan({}, recompute=recompute, workers_per_device=threads)
    model = graph.instantiate(plan)
    model.initialize(seed=0)

    def step(number: int) -> float:
        tokens, labels = batch_of(number, VOCABULARY, BATCH)
        return float(model.step({"tokens": tokens, "labels": labels}, lr=3e-4).loss)

    def memory() -> Memory:
        activations = [b for b in plan.placement(0).buffers if b.category == "activations"]
        return {
            "layers": layer_bytes(plan),
            "all": most_at_one_time(activations),
            "temporaries": plan.placement(0).regions["temporaries"],
        }

    return step, memory


def layer_bytes(plan: Any) -> int:
    """Of the inputs of all layers and of their saved tensors, tensors counted once."""
    graph = plan.graph
    tensors: set[int] = set()
    for op in graph.ops:
        if op.op == "call" and op.phase == "forward":
            tensors.update(i for i in op.inputs if graph.tensors[i].kind == "result")
            tensors.update(op.outputs[1:])
    return sum(prod(graph.spec(t).shape) * graph.spec(t).dtype.itemsize for t in tensors)


def torch_mode(precision: str, recompute: str, threads: int) -> tuple[Step, Callable[[], Memory]]:
    """A step of PyTorch, and the activations of its last one."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**MODEL, **dropouts, use_cache=False)).train()
    if recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[str, dict[int, int]] = {"layers": {}, "all": {}}
    is_inside = [False]
    model.transformer.h[0].register_forward_pre_hook(lambda *_: is_inside.__setitem__(0, True))
    model.transformer.h[-1].register_forward_hook(lambda *_: is_inside.__setitem__(0, False))

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            for name in ("layers", "all") if is_inside[0] else ("all",):
                storages[name][storage.data_ptr()] = storage.nbytes()
        return tensor

    def run(number: int, is_noted: bool) -> float:
        tokens, labels = (torch.from_numpy(a).long() for a in batch_of(number, VOCABULARY, BATCH))

        def forward() -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = model(input_ids=tokens).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

        if is_noted:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = forward()
        else:
            loss = forward()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def memory() -> Memory:
        run(0, True)
        return {name: sum(of.values()) for name, of in storages.items()}

    return lambda number: run(number, False), memory


def serve(mode: str, threads: int) -> None:
    """Each line of standard input is a number of steps; 0 asks for the memory."""
    kind, dtype, recompute, *_ = mode.split(":")
    step, memory = (tilewise_mode if kind == "tilewise" else torch_mode)(dtype, recompute, threads)
    number = 0
    for line in sys.stdin:
        if int(line) == 0:
            print(json.dumps({"seconds": [0.0], "loss": 0.0, "memory": memory()}), flush=True)
            continue
        seconds, loss = [], 0.0
        for _ in range(int(line)):
            started = time.perf_counter()
            loss = step(number)
            seconds.append(time.perf_counter() - started)
            number += 1
        print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)


# ---- all modes, turn by turn -----------------------------------------------------------------------------


def compete(
    dtype: str, options: argparse.Namespace, override: Path | None, ends_at: float
) -> list[Contestant]:
    """Let the modes of a type take turns; those that fail are left out."""
    entries = [(f"tilewise:{dtype}:{mode}", None) for mode in ("none", "selective", "full")]
    if find_spec("torch") is not None and find_spec("transformers") is not None:
        entries += [(f"torch:{dtype}:{mode}", override) for mode in ("none", "full")]
    sides = []
    for mode, preload in entries:
        side = Contestant(mode, options.threads, preload, __file__)
        if side.take_turn(0, False) and (memory := side.answer["memory"]) and side.take_turn(1, False):
            side.memory = memory  # type: ignore[attr-defined]
            sides.append(side)
            print(f"ready: {mode} (loss {side.loss:.4f})", flush=True)
    for number in range(options.rounds):
        for side in list(sides):
            if number and time.monotonic() > ends_at:
                continue
            if side.take_turn(1, False) and side.take_turn(options.steps, True):
                print(f"round {number + 1}: {side.mode:24} {side.last_s * 1e3:9.1f} ms", flush=True)
            else:
                sides.remove(side)
    for side in sides:
        side.close()
    return sides


def report(sides: list[Contestant]) -> None:
    """Every mode, and its ratio to the one of its kind that saves everything."""
    heads = f"{'mode':24} {'ms/step':>9} {'x none':>7} {'layers MiB':>11} {'x none':>7}"
    print(f"{heads} {'all results':>12} {'temporaries':>12}")
    medians = {side.mode: statistics.median(side.seconds) for side in sides}
    seconds_of = {side.mode: side.seconds for side in sides}

    def ratio(mode: str, other: str) -> float:
        """Of the times of steps in the same round."""
        return statistics.median(a / b for a, b in zip(seconds_of[mode], seconds_of[other]))

    memories = {side.mode: side.memory for side in sides}  # type: ignore[attr-defined]
    for mode, seconds in medians.items():
        none = mode.rpartition(":")[0] + ":none"
        if none not in medians:
            continue
        mine, base = memories[mode], memories[none]
        times, share = ratio(mode, none), mine["layers"] / base["layers"]
        temporaries = f"{mine['temporaries'] / 2**20:12.1f}" if "temporaries" in mine else f"{'-':>12}"
        print(
            f"{mode:24} {seconds * 1e3:9.1f} {times:7.3f} {mine['layers'] / 2**20:11.1f} {share:7.3f} "
            f"{mine['all'] / 2**20:12.1f} {temporaries}"
        )
        if mode.startswith("tilewise") and mode.endswith(":full"):
            both = sum(mine[k] for k in ("layers", "temporaries")) / sum(
                base[k] for k in ("layers", "temporaries")
            )
            dtype = mode.split(":")[1]
            show(Figure(f"{dtype}: time of a step", times, "x", True, *TIME))
            note = f"with what a layer needs while it runs {both:.3f}"
            show(Figure(f"{dtype}: activation memory of layers", share, "x", True, *MEMORY, note=note))
    for mode in medians:
        peer = mode.replace("tilewise", "torch")
        if peer != mode and peer in medians:
            show(Figure(f"{mode} against {peer}", ratio(peer, mode), "x"))


def main() -> None:
    """Parse arguments; be a mode or compare them all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=8.0, help="no further round begins after so long")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", nargs="+", choices=("f32", "bf16"), default=("f32", "bf16"))
    parser.add_argument("--serve", metavar="MODE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.threads)
        return
    print(f"{machine('torch', 'transformers')}; {options.threads} threads")
    print(f"load before the run: {os.getloadavg()[0]:.1f}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        override = build_override(Path(scratch))
        for number, dtype in enumerate(options.dtype, 1):
            report(
                compete(
                    dtype, options, override, started + options.minutes * 60 * number / len(options.dtype)
                )
            )


if __name__ == "__main__":
    main()
