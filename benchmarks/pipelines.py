"""Measures pipelines: speed, the time in which stages are idle, and PyTorch's pipeline next to ours.

    speed    a step over two stages with 16 microbatches, next to one device with two workers and the same
             microbatches. The bound is m / (m + p - 1) times the balance of the stages' busy times, which a
             trace of the same run shows.
    bubble   the idle time of zero bubble and of 1F1B with 4 microbatches: the step without the busy time of
             the stage that works longest.
    plan     planning time of 36 layers, 64 microbatches and 4 stages
    theory   a step whose layers only sleep, next to the walk of the plan's lists without a clock
    torch    losses of 20 steps and tokens per second next to `torch.distributed.pipelining`, in two processes
             over gloo, fp32, 1F1B
    before   steps over dp=2, tp=2, fsdp=2 and on one device, next to the Tilewise of another Python

The model of the first two parts is GPT-2 small, sequences of 256 tokens, one per microbatch. Modes
take turns; medians are compared.

Run: python benchmarks/pipelines.py [--only speed bubble plan theory torch] [--rounds 3] [--minutes 12]
     [--dtype f32 bf16] [--before PYTHON]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from demo_step import CONTEXT, batch_of
from figures import Figure, show
from machine import run_parts

if TYPE_CHECKING:
    import tilewise as tw

VOCABULARY, STAGES = 50257, 2
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": CONTEXT,
}
SPEED, BUBBLE, BEFORE, SLEEP, PLAN_S = (0.93, 0.97), (0.5, 0.8), (1.01, 1.0), 1.05, 2.0
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
STEPS, BATCH, SEQUENCE, MICROBATCHES, RATE = 20, 16, 64, 8, 3e-4  # of the comparison with PyTorch
UNIT_S = 0.02  # of a layer that sleeps

Modes = Mapping[str, Callable[[int], float]]


def median_of(modes: Modes, rounds: int, end: float) -> dict[str, float]:
    """The median time of each mode. Modes take turns; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in modes}
    for number in range(rounds + 1):
        for name, step in modes.items():
            seconds = step(number)
            if number:
                times[name].append(seconds)
        if number and time.monotonic() > end:
            break
    return {name: statistics.median(of) for name, of in times.items()}


class Model:
    """A training step of GPT-2 small, by default with one sequence per microbatch."""

    def __init__(
        self,
        dtype: str,
        strategy: tw.DistributionStrategy,
        workers: int,
        microbatches: int,
        batch: int | None = None,
    ) -> None:
        import tilewise as tw
        from tilewise import models

        batch = microbatches if batch is None else batch
        graph = tw.ComputeGraph("gpt2")
        models.build_training_graph(graph, models.config_from_dict(GPT2), batch, CONTEXT, dtype)
        graph.optimize(tw.optim.AdamW())
        graph.set_distribution(strategy)
        plan = graph.plan(accumulation=microbatches, batch_splits=batch, workers_per_device=workers)
        self.batch, self.running = batch, graph.instantiate(plan)
        self.running.initialize(seed=0)

    def step(self, number: int) -> float:
        """Seconds of one step."""
        tokens, labels = batch_of(number, VOCABULARY, self.batch)
        started = time.perf_counter()
        self.running.step({"tokens": tokens, "labels": labels}, lr=3e-4)
        return time.perf_counter() - started

    def traced(self) -> tuple[float, list[float]]:
        """Seconds of a step, and of each device's tasks in it."""
        self.running.trace(True)
        seconds = self.step(99)
        tasks = self.running.timeline().tasks
        self.running.trace(False)
        devices = range(self.running.plan.mesh.num_devices)
        return seconds, [sum(t.end_ns - t.start_ns for t in tasks if t.device == d) / 1e9 for d in devices]

    def close(self) -> None:
        """Free the memory."""
        self.running.close()


def pipeline(microbatches: int, schedule: str) -> tw.DistributionStrategy:
    """Two stages, balanced by cost."""
    import tilewise as tw

    chunks = 2 if schedule == "interleaved" else 1
    return tw.DistributionStrategy.pipeline(STAGES, microbatches, schedule, chunks)


# ---- speed and bubble --------------------------------------------------------------------------------------


def measure_speed(options: argparse.Namespace, end: float) -> None:
    """A pipeline's step next to one device's."""
    import tilewise as tw

    microbatches = 16
    for number, dtype in enumerate(options.dtype):
        models = {"one device": Model(dtype, tw.DistributionStrategy.single(), STAGES, microbatches)}
        for schedule in ("1f1b", "interleaved"):
            models[schedule] = Model(dtype, pipeline(microbatches, schedule), 1, microbatches)
        part = end - (end - time.monotonic()) * (len(options.dtype) - 1 - number) / (
            len(options.dtype) - number
        )
        times = median_of({name: model.step for name, model in models.items()}, options.rounds, part)
        for schedule in ("1f1b", "interleaved"):
            _, busy = models[schedule].traced()
            balance = sum(busy) / len(busy) / max(busy)
            bound = microbatches / (microbatches + STAGES - 1) * balance
            speed = times["one device"] / times[schedule]
            show(
                Figure(
                    f"{dtype} {schedule}: speed, as a share of m/(m+p-1) x balance",
                    speed / bound,
                    "x",
                    must=SPEED[0],
                    goal=SPEED[1],
                    limit=1 / bound,
                    note=f"{speed:.3f} of one device's; balance {balance:.3f}; {times[schedule]:.2f} s a step",
                )
            )
        for model in models.values():
            model.close()


def measure_bubble(options: argparse.Namespace, end: float) -> None:
    """Idle time with few microbatches."""
    microbatches = 4
    for dtype in options.dtype:
        models = {
            name: Model(dtype, pipeline(microbatches, name), 1, microbatches)
            for name in ("1f1b", "zero_bubble")
        }
        idle: dict[str, list[float]] = {name: [] for name in models}
        for number in range(max(2 * options.rounds, 3) + 1):
            for name, model in models.items():
                seconds, busy = model.traced()
                if number:
                    idle[name].append(seconds - max(busy))
            if number > 1 and time.monotonic() > end:
                break
        medians = {name: statistics.median(of) for name, of in idle.items()}
        show(
            Figure(
                f"{dtype} zero bubble: part of 1F1B's idle time that is gone",
                1 - medians["zero_bubble"] / medians["1f1b"],
                "x",
                must=BUBBLE[0],
                goal=BUBBLE[1],
                limit=1 - planned_idle(models["zero_bubble"]) / planned_idle(models["1f1b"]),
                note=f"{medians['1f1b']:.3f} s and {medians['zero_bubble']:.3f} s; the limit is that of the plans by "
                "floating-point operations",
            )
        )
        for model in models.values():
            model.close()


def planned_idle(model: Model) -> float:
    """Idle time of the stage that works longest, in floating-point operations."""
    from tilewise.plan.passes import walk_by_flops

    passes = walk_by_flops(model.running.plan)
    length = max(of[-1].end for of in passes)
    return float(length - max(sum(p.end - p.begin for p in of) for of in passes))


def measure_plan(options: argparse.Namespace, end: float) -> None:
    """Seconds to plan a large pipeline."""
    import tilewise as tw
    from tilewise import models
    from tilewise.models import llama

    graph = tw.ComputeGraph("llama")
    config = llama.LlamaConfig(**{**SMALL, "num_hidden_layers": 36})
    models.build_training_graph(graph, config, 64, SEQUENCE, "bf16")
    graph.optimize(tw.optim.AdamW())
    times: dict[str, float] = {}
    for schedule in ("1f1b", "gpipe", "zero_bubble"):
        graph.set_distribution(tw.DistributionStrategy.pipeline(4, 64, schedule))
        taken = []
        for _ in range(options.rounds):
            started = time.perf_counter()
            graph.plan(batch_splits=64, workers_per_device=1)
            taken.append(time.perf_counter() - started)
        times[schedule] = statistics.median(taken)
    note = "64 microbatches, 36 layers, pp=4; " + ", ".join(f"{name} {s:.2f} s" for name, s in times.items())
    show(Figure("planning a pipeline", max(times.values()), "s", less_is_better=True, must=PLAN_S, note=note))


# ---- layers that sleep -------------------------------------------------------------------------------------


def measure_theory(options: argparse.Namespace, end: float) -> None:
    """A step whose layers sleep next to the walk without a clock. Sleeping uses no core, so the schedule
    alone decides how long it takes."""
    import tilewise as tw
    from tilewise import models
    from tilewise.models import llama
    from tilewise.plan.passes import walk_passes

    stages, microbatches = 4, 8
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
        layers = stages * chunks
        graph = tw.ComputeGraph("sleeping")
        config = llama.LlamaConfig(**{**SMALL, "num_hidden_layers": layers})
        models.build_training_graph(graph, config, microbatches, 8, "f32")
        graph.optimize(tw.optim.AdamW())
        own = tw.PipelineStages(schedule=schedule, chunks=chunks, layers=(1,) * layers)
        graph.set_distribution(tw.DistributionStrategy.hybrid(pp=stages, stages=own))
        plan = graph.plan(accumulation=microbatches, batch_splits=microbatches, workers_per_device=1)
        is_split = own.splits_backward

        def cost(planned: Any, is_split: bool = is_split) -> float:
            return units_of(planned.segment.ops[0].label, is_split)

        walked = float(max(of[-1].end for of in walk_passes(plan, cost))) * UNIT_S
        with graph.instantiate(sleeping(plan, is_split)) as running:
            times = []
            for _ in range(options.rounds + 1):
                started = time.perf_counter()
                running._run("step")
                times.append(time.perf_counter() - started)
        show(
            Figure(
                f"{schedule}: a step whose layers sleep, next to the walk of its lists",
                statistics.median(times[1:]) / walked,
                "x",
                less_is_better=True,
                must=None if is_split else SLEEP,
                limit=1.0,
                note=f"{stages} stages, {microbatches} microbatches, {walked:.3f} s by the walk"
                + ("; W runs whenever a worker is free, not only at its place" if is_split else ""),
            )
        )


def units_of(name: str, is_split: bool) -> float:
    """How many units a call of a layer sleeps, from the name of its template or its label. Gradients of
    weights take less than the other parts: otherwise two tasks would often become ready at one time, and
    which of them ran first would be chance.
    """
    if "decoder_layer" not in name and not name.startswith("layers."):
        return 0
    return 0.8 if name.endswith(".weights") else 1 if is_split or "backward" not in name else 2


def sleeping(plan: tw.Plan, is_split: bool) -> tw.Plan:
    """The plan with tasks that do nothing, except for one of each layer's call, which sleeps."""
    import tilewise as tw

    for units in (0.8, 1, 2):
        address = kernel_that_sleeps(units * UNIT_S)
        tw.tile_kernel(address, name=f"sleep{int(10 * units)}", operands={"x": "in"})
    classes = []
    for of in plan.program.classes:
        templates = []
        for template in of.templates:
            idle = [replace(i, kernel="", ints=(), floats=()) for i in template.instructions]
            units = units_of(template.name, is_split)
            if units and idle:
                idle[0] = replace(
                    idle[0], kernel=f"sleep{int(10 * units)}", extent=type(idle[0].extent)(1), step=0
                )
            templates.append(replace(template, instructions=tuple(idle)))
        classes.append(replace(of, templates=tuple(templates)))
    return replace(plan, program=replace(plan.program, classes=tuple(classes)))


KERNELS: list[Any] = []


def kernel_that_sleeps(seconds: float) -> int:
    """The address of a kernel that sleeps. Python's sleep gives up the interpreter's lock."""

    def sleep(_: int) -> int:
        time.sleep(seconds)
        return 0

    KERNELS.append(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(sleep))  # stays callable
    return ctypes.cast(KERNELS[-1], ctypes.c_void_p).value or 0


# ---- PyTorch -----------------------------------------------------------------------------------------------


def measure_torch(options: argparse.Namespace, end: float) -> None:
    """Losses of 20 steps and speed, in two processes each."""
    import tilewise as tw
    from tilewise import models
    from tilewise.models import llama

    config = llama.LlamaConfig(**SMALL)
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, config, BATCH, SEQUENCE, "f32")
    graph.optimize(tw.optim.AdamW(max_grad_norm=0.0))
    graph.set_distribution(tw.DistributionStrategy.pipeline(STAGES, MICROBATCHES, layers=[2, 2]))
    with tw.ProcessGroup(STAGES), graph.instantiate(graph.plan(workers_per_device=1)) as running:
        running.initialize(3, scale=0.1)
        weights = {name: running.get_tensor(name).copy() for name in running.parameter_names()}
        ours, started = [], 0.0
        for number in range(STEPS):
            if number == 1:
                started = time.perf_counter()
            tokens, labels = torch_batch(number)
            ours.append(running.step({"tokens": tokens, "labels": labels}, RATE).loss)
        seconds = (time.perf_counter() - started) / (STEPS - 1)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, "weights.npz"), **weights)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--folder", folder], env=environment
            )
            for rank in range(STAGES)
        ]
        codes = [rank.wait(timeout=600) for rank in ranks]
        if any(codes):
            raise RuntimeError(f"the processes of PyTorch ended with {codes}")
        theirs = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs["losses"], strict=True))
    show(
        Figure(
            "losses of 20 steps: largest difference from PyTorch's",
            worst,
            "x",
            less_is_better=True,
            must=1e-4,
            note=f"from {ours[0]:.4f} to {ours[-1]:.4f}",
        )
    )
    rate = BATCH * SEQUENCE / seconds
    peer = {"torch.distributed.pipelining": BATCH * SEQUENCE / theirs["seconds"]}
    show(Figure("1F1B in two processes", rate, "tokens/s", peers=peer, note="4 layers of 128, fp32"))


def torch_batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of a step."""
    size = (BATCH, SEQUENCE + 1)
    ids = np.random.default_rng(number).integers(0, SMALL["vocab_size"], size, dtype=np.int32)
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def torch_rank(rank: int, folder: Path) -> None:
    """One process of PyTorch: half of the layers of `transformers`' Llama, 1F1B over gloo."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES)
    config = LlamaConfig(**SMALL, rms_norm_eps=1e-5, rope_theta=10000.0, attn_implementation="eager")
    model = LlamaForCausalLM(config).float()
    stored = np.load(folder / "weights.npz")
    state = {n if n.startswith("lm_head") else f"model.{n}": torch.tensor(stored[n]) for n in stored.files}
    model.load_state_dict(state)
    half = SMALL["num_hidden_layers"] // STAGES

    class Part(torch.nn.Module):
        """A run of layers, with the embedding or the head."""

        def __init__(self) -> None:
            super().__init__()
            own = model.model.layers[rank * half : (rank + 1) * half]
            self.layers = torch.nn.ModuleList(own)
            self.embed = model.model.embed_tokens if rank == 0 else None
            self.head = None if rank == 0 else torch.nn.Sequential(model.model.norm, model.lm_head)
            self.rotary = model.model.rotary_emb

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if self.embed is None else self.embed(x)
            positions = torch.arange(SEQUENCE)[None]
            tables = self.rotary(x, positions)
            mask = torch.full((SEQUENCE, SEQUENCE), -torch.inf).triu(1)[None, None]
            for layer in self.layers:
                made = layer(x, attention_mask=mask, position_embeddings=tables, position_ids=positions)
                x = made[0] if isinstance(made, tuple) else made
            return x if self.head is None else self.head(x)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    part = Part()
    schedule = Schedule1F1B(
        PipelineStage(part, rank, STAGES, torch.device("cpu")), MICROBATCHES, loss_fn=loss_of
    )
    decayed = [p for p in part.parameters() if p.dim() > 1]
    others = [p for p in part.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses, started = [], 0.0
    for number in range(STEPS):
        if number == 1:
            started = time.perf_counter()
        tokens, labels = (torch.from_numpy(a).long() for a in torch_batch(number))
        optimizer.zero_grad()
        losses_of_step: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses_of_step)
            losses.append(float(torch.stack(losses_of_step).detach().mean()))
        optimizer.step()
    seconds = (time.perf_counter() - started) / (STEPS - 1)
    if rank == STAGES - 1:
        result = json.dumps({"losses": losses, "seconds": seconds})
        (folder / "result.json").write_text(result, encoding="utf-8")
    dist.destroy_process_group()


# ---- before ------------------------------------------------------------------------------------------------

OTHERS = ({}, {"dp": 2}, {"tp": 2}, {"fsdp": 2})


class Contestant:
    """A process that does steps over a mesh with the Tilewise of some Python."""

    def __init__(self, python: str, axes: Mapping[str, int], dtype: str) -> None:
        command = [python, __file__, "--serve", json.dumps(axes), "--dtype", dtype]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self, number: int) -> float:
        """Seconds of one step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(number, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def serve(axes: Mapping[str, int], dtype: str) -> None:
    """Do a step per line of standard input."""
    import tilewise as tw

    model = Model(dtype, tw.DistributionStrategy.for_mesh(tw.DeviceMesh(axes)), 2 if not axes else 1, 1, 4)
    for line in sys.stdin:
        print(model.step(int(line)), flush=True)


def measure_before(options: argparse.Namespace, end: float) -> None:
    """Step times of other meshes, next to those of an earlier Tilewise."""
    if options.before is None:
        print("without --before there is nothing to compare with")
        return
    for axes in OTHERS:
        for dtype in options.dtype:
            both = {
                "now": Contestant(sys.executable, axes, dtype),
                "before": Contestant(options.before, axes, dtype),
            }
            times = median_of({name: of.step for name, of in both.items()}, 2 * options.rounds, end)
            for of in both.values():
                of.close()
            name = ", ".join(f"{axis}={size}" for axis, size in axes.items()) or "one device"
            show(
                Figure(
                    f"{dtype} {name}: step time, as a multiple of that before",
                    times["now"] / times["before"],
                    "x",
                    less_is_better=True,
                    must=BEFORE[0],
                    goal=BEFORE[1],
                    note=f"{times['now']:.3f} s",
                )
            )


PARTS: Mapping[str, Callable[[argparse.Namespace, float], None]] = {
    "speed": measure_speed,
    "bubble": measure_bubble,
    "plan": measure_plan,
    "theory": measure_theory,
    "torch": measure_torch,
    "before": measure_before,
}
SHARES = {"speed": 5.0, "bubble": 3.0, "plan": 0.5, "theory": 1.0, "torch": 1.0, "before": 4.0}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run some or all parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=[*PARTS], default=["speed", "bubble", "plan", "theory", "torch"]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--dtype", nargs="+", choices=["f32", "bf16"], default=["f32", "bf16"])
    parser.add_argument("--before", metavar="PYTHON", help="a Python that has an earlier Tilewise")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        torch_rank(options.rank, options.folder)
    elif options.serve is not None:
        serve(options.serve, options.dtype[0])
    else:
        run_parts(PARTS, SHARES, options, "torch", "transformers")


if __name__ == "__main__":
    main()
