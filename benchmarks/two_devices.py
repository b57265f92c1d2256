"""Measures a training step on two devices, compared with PyTorch on two processes.

The model is the Llama family with GPT-2 small's widths (124M parameters), 4 sequences of 256
tokens. PyTorch runs DDP, FSDP2 and tensor parallelism (DTensor) of `transformers`'
LlamaForCausalLM, eager, in fp32 and bf16 autocast, with and without a preloaded library that tells
MKL to use AVX-512. Our devices run in one process and in two.

A step is also compared with its bound: for the device that needs longest, the larger of its
kernels' time (from the trace of that step) and the bytes that it reads from its peer over the
measured copy bandwidth. Modes are processes that take turns; medians are compared. The first round
of a comparison is always complete.

Run: python benchmarks/two_devices.py [--rounds 3] [--steps 2] [--minutes 10] [--only f32:dp ...]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from demo_step import CONTEXT, GPT2, Contestant, Launch, batch_of, build_override, measure_peak
from figures import Figure, show
from machine import machine

if TYPE_CHECKING:
    from tilewise.observe import TaskSpan

BATCH, DEVICES, WORKERS = 4, 2, 1
MODEL = GPT2
COMPARISONS = ("f32:dp", "f32:tp", "f32:fsdp", "bf16:dp", "bf16:tp", "bf16:fsdp")
TIMES_PEERS = {"f32": (1.5, 1.9), "bf16": (2.3, 2.8)}  # must and goal
TIMES_SHARDED = {"f32": (1.6, 2.0), "bf16": (2.4, 3.0)}
SHARE_OF_BOUND, SHARE_SHARDED = (0.95, 0.98), (0.93, 0.97)
MEMORY_SHARDED = (0.7, 0.5)  # of a device, of what a process of PyTorch has
SPEED_OF_ONE = (0.95, 0.99)  # of two processes
COPIED_BYTES = 256 << 20

Step = Callable[[int], dict[str, float]]


# ---- one mode, in a process of its own -------------------------------------------------------------------


def tilewise_step(dtype: str, axis: str, microbatches: int, num_processes: int) -> Step:
    """A function that does one step of ours and returns its time and the devices' busy time."""
    import tilewise as tw
    from tilewise import models
    from tilewise.models import llama

    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, llama.LlamaConfig(**MODEL), BATCH, CONTEXT, dtype=dtype)
    graph.optimize(tw.optim.AdamW())
    plan = graph.plan({axis: DEVICES}, accumulation=microbatches, workers_per_device=WORKERS)
    tw.ProcessGroup(num_processes)  # open until this process ends
    model = graph.instantiate(plan)
    model.initialize(seed=0)
    model.trace(True)
    bandwidth = copy_bandwidth()

    def step(number: int) -> dict[str, float]:
        tokens, labels = batch_of(number, MODEL["vocab_size"], BATCH)
        model.reset_transfers()
        started = time.perf_counter()
        loss = float(model.step({"tokens": tokens, "labels": labels}, lr=3e-4).loss)
        seconds = time.perf_counter() - started
        # what moves is fp32 or smaller
        moved = max(sum(4 * of[d] for of in model.transfers().values()) for d in range(DEVICES))
        figures = figures_of(model.timeline().tasks, seconds)
        own = {"moving_s": moved / bandwidth, "moved": moved, "resident": peak_resident() / DEVICES}
        return {"seconds": seconds, "loss": loss, **own} | figures

    return step


def figures_of(tasks: Sequence[TaskSpan], seconds: float) -> dict[str, float]:
    """From the trace of a step: seconds of kernels on the busiest device, and shares of the step on the mean one."""
    records = sorted(tasks, key=lambda r: r.start_ns)
    kernels = [sum(r.end_ns - r.start_ns for r in records if r.device == d) for d in range(DEVICES)]
    collectives = sum(r.end_ns - r.start_ns for r in records if "/" in r.kernel)
    blocked = 0
    for device in range(DEVICES):
        own = [r for r in records if r.device == device]
        # a worker idle until its next task became ready had to wait; the remainder is between tasks
        blocked += sum(max(0, min(b.ready_ns, b.start_ns) - a.end_ns) for a, b in pairwise(own))
    whole = seconds * 1e9 * DEVICES * WORKERS
    return {
        "kernels_s": max(kernels) / 1e9 / WORKERS,
        "busy": sum(kernels) / whole,
        "collectives": collectives / whole,
        "blocked": blocked / whole,
    }


def peak_resident() -> float:
    """Peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def copy_bandwidth() -> float:
    """Bytes per second that a thread copies from memory while one thread per other device does so too."""
    pairs = [(np.ones(COPIED_BYTES, np.uint8), np.zeros(COPIED_BYTES, np.uint8)) for _ in range(DEVICES)]
    rates = []
    with ThreadPoolExecutor(DEVICES) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
            rates.append(COPIED_BYTES / (time.perf_counter() - started))
    return max(rates)


def torch_step(precision: str, axis: str, head: str, rank: int) -> Step:
    """A function that does one process's part of a step of PyTorch."""
    import torch
    from torch.distributed.tensor.parallel import loss_parallel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(WORKERS)
    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, rms_norm_eps=1e-5, rope_theta=10000.0, use_cache=False)
    model = LlamaForCausalLM(config).train()
    if axis == "dp":
        forward = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        own = slice(rank * BATCH // DEVICES, (rank + 1) * BATCH // DEVICES)
    elif axis == "fsdp":
        forward, own = model, slice(rank * BATCH // DEVICES, (rank + 1) * BATCH // DEVICES)
        shard_states(model, precision)
    else:
        forward, own = model, slice(None)
        shard_model(model, head)
    groups = parameter_groups(model)
    optimizers = [torch.optim.AdamW(g, lr=3e-4, weight_decay=0.1, fused=True) for g in groups]

    def train(tokens: Any, labels: Any) -> Any:
        # with sharded state its own policy casts weights, once, before they are gathered
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16" and axis != "fsdp"):
            logits = forward(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        return loss

    def step(number: int) -> dict[str, float]:
        tokens, labels = (
            torch.from_numpy(a[own]).long() for a in batch_of(number, MODEL["vocab_size"], BATCH)
        )
        started = time.perf_counter()
        if head == "vocab":
            with loss_parallel():
                loss = train(tokens, labels).full_tensor()
        else:
            loss = train(tokens, labels)
        clip(groups)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "loss": float(loss.detach()), "resident": peak_resident()}

    return step


def shard_states(model: Any, precision: str) -> None:
    """FSDP2: a unit per layer, one for embedding, norm and head; stored in fp32, gathered in the compute type."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (DEVICES,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None, reduce_dtype=torch.float32
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def shard_model(model: Any, head: str) -> None:
    """Megatron's plan by DTensor; embedding and head replicated, or both by vocabulary and still tied."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (DEVICES,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh, plan)
    if head == "vocab":
        by_vocabulary = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(use_local_output=False),
        }
        parallelize_module(model, mesh, by_vocabulary)
        model.lm_head.weight = model.model.embed_tokens.weight


def parameter_groups(model: Any) -> list[list[Any]]:
    """Parameters that are sharded and those that are not: fused updates and norms take one kind at a time."""
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) == is_sharded] for is_sharded in (True, False)]
    return [kind for kind in kinds if kind]


def clip(groups: list[list[Any]]) -> None:
    """Scale all gradients so that their norm is at most 1."""
    import torch
    from torch.distributed.tensor import DTensor

    norms = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    factor = float((1.0 / (total + 1e-6)).clamp(max=1.0))
    for group in groups:
        torch._foreach_mul_([p.grad for p in group], factor)


def serve_torch(mode: str, rank: int, port: int) -> None:
    """Be one of the two processes; the first starts the other, and sends it the number of steps."""
    import torch
    import torch.distributed as dist

    _, precision, axis, head, *_ = mode.split(":")
    store = dist.TCPStore("127.0.0.1", port, DEVICES, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        subprocess.Popen(
            [sys.executable, __file__, "--serve", mode, "--rank", "1", "--port", str(store.port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=DEVICES)
    step, number = torch_step(precision, axis, head, rank), 0
    for line in sys.stdin if rank == 0 else iter(lambda: "0", None):
        count = torch.tensor(int(line))
        try:
            dist.broadcast(count, 0)
        except RuntimeError:  # the first has ended, and with it the comparison
            return
        rows = [step(number + i) for i in range(int(count))]
        number += int(count)
        if rank == 0:
            answer(rows)


def serve_tilewise(mode: str) -> None:
    """Each line of standard input is a number of steps."""
    _, dtype, axis, microbatches, *processes = mode.split(":")
    step, number = tilewise_step(dtype, axis, int(microbatches), DEVICES if processes else 1), 0
    for line in sys.stdin:
        answer([step(number + i) for i in range(int(line))])
        number += int(line)


def answer(rows: list[dict[str, float]]) -> None:
    """All steps of a turn as a JSON line."""
    seconds = [row["seconds"] for row in rows]
    print(json.dumps({"seconds": seconds, "loss": rows[-1]["loss"], "rows": rows}), flush=True)


# ---- all modes, turn by turn -----------------------------------------------------------------------------


class Side(Contestant):
    """A mode that takes turns; it keeps the figures of every counted step."""

    def __init__(self, mode: str, preload: Path | None, launch: Launch = list) -> None:
        super().__init__(mode, WORKERS, preload, __file__, launch=launch)
        self.rows: list[dict[str, float]] = []

    def play(self, num_steps: int) -> bool:
        """A turn: a step that warms up threads and caches, then those that count."""
        if not (self.take_turn(1, is_counted=False) and self.take_turn(num_steps, is_counted=True)):
            return False
        self.rows += self.answer["rows"]
        return True

    def median(self, what: str = "seconds") -> float:
        """Of a figure over all counted steps."""
        return statistics.median(row[what] for row in self.rows)


def modes(comparison: str, has_torch: bool, override: Path | None) -> Iterator[tuple[str, Path | None]]:
    """Ours and every mode of the peer, with what it preloads."""
    dtype, axis = comparison.split(":")
    yield f"tilewise:{dtype}:{axis}:1", None
    yield f"tilewise:{dtype}:{axis}:1:processes", None
    for head in ("whole", "vocab") if axis == "tp" else ("whole",):
        for name, preload in (("stock", None), ("override", override)) if has_torch else ():
            if name == "stock" or preload is not None:
                yield f"torch:{dtype}:{axis}:{head}:{name}", preload


def compete(
    entries: list[tuple[str, Path | None]],
    options: argparse.Namespace,
    ends_at: float,
    launches: Mapping[str, Launch] | None = None,
) -> list[Side]:
    """Start and warm up modes, here or with `launches`, let them take turns, end them; those that
    fail are left out.
    """
    sides = []
    for mode, preload in entries:
        side, started = Side(mode, preload, (launches or {}).get(mode, list)), time.monotonic()
        if side.take_turn(1, is_counted=False):
            sides.append(side)
            print(
                f"ready: {mode:32} after {time.monotonic() - started:.1f} s (loss {side.loss:.4f})",
                flush=True,
            )
    for number in range(options.rounds):
        for side in list(sides):
            if number and time.monotonic() > ends_at:
                continue
            if side.play(options.steps):
                print(f"round {number + 1}: {side.mode:32} {side.last_s * 1e3:9.1f} ms", flush=True)
            else:
                sides.remove(side)
    for side in sides:
        side.close()
    return sides


def least_seconds(dtype: str) -> float:
    """Time of a step's matmuls alone if they never left the registers, measured now."""
    hidden, layers = MODEL["hidden_size"], MODEL["num_hidden_layers"]
    weights = layers * (4 * hidden * hidden + 3 * hidden * MODEL["intermediate_size"])
    weights += MODEL["vocab_size"] * hidden
    return 6.0 * weights * BATCH * CONTEXT / measure_peak(f"peak_{dtype}", DEVICES * WORKERS)


def show_sides(sides: list[Side], comparison: str, microbatches: int, least: float) -> None:
    """Every mode, its ratio to the best peer and to `least` seconds, which the processor permits; shares of bounds."""
    for side in sides:
        rate = BATCH * CONTEXT / side.median()
        print(f"  {side.mode:32} {side.median() * 1e3:9.1f} ms/step {rate:8,.0f} tokens/s")
    ours = [side for side in sides if side.mode.startswith("tilewise") and not is_spread(side)]
    peers = [side for side in sides if side.mode.startswith("torch")]
    if ours and peers:
        best, is_sharded = min(peers, key=lambda side: side.median()), ":fsdp" in ours[0].mode
        must, goal = (TIMES_SHARDED if is_sharded else TIMES_PEERS)[comparison.split(":")[0]]
        ratio = best.median() / ours[0].median()
        what, limit = f"{comparison}: times PyTorch's best", best.median() / least
        show(Figure(what, ratio, "x", must=must, goal=goal, limit=limit, note=best.mode))
        seconds, theirs_ms = ours[0].median() * 1e3, {best.mode: best.median() * 1e3}
        show(
            Figure(
                f"{comparison}: a step",
                seconds,
                "ms",
                less_is_better=True,
                peers=theirs_ms,
                limit=least * 1e3,
            )
        )
        if is_sharded:
            theirs = min(side.median("resident") for side in peers)
            share, (must, goal) = ours[0].median("resident") / theirs, MEMORY_SHARDED
            note = f"{ours[0].median('resident') / 1e6:,.0f} MB a device, {theirs / 1e6:,.0f} MB a process of PyTorch"
            what = f"{comparison}: peak resident memory"
            show(Figure(what, share, "x", less_is_better=True, must=must, goal=goal, note=note))
        print(
            f"  multiply-adds of the weights' products alone, at the peak of both cores measured at the start: "
            f"{least * 1e3:.1f} ms, {best.median() / least:.2f} times the best of PyTorch; ours take "
            f"{ours[0].median() / least:.2f} times as long",
            flush=True,
        )
    for side in ours:
        show_share(side, f"{comparison}, {microbatches} microbatches")
    show_processes(sides, comparison)


def is_spread(side: Side) -> bool:
    """Whether its devices are in two processes."""
    return side.mode.endswith(":processes")


def show_processes(sides: list[Side], comparison: str) -> None:
    """Two processes of ours compared with one, and with PyTorch's best."""
    own = {is_spread(side): side for side in sides if side.mode.startswith("tilewise")}
    if True not in own:
        return
    seconds = own[True].median()
    if False in own:
        must, goal = SPEED_OF_ONE
        one = own[False].median()
        note = f"{seconds * 1e3:.1f} and {one * 1e3:.1f} ms"
        what = f"{comparison}, two processes: speed of one's"
        show(Figure(what, one / seconds, "x", must=must, goal=goal, note=note))
        for name, key, scale, unit in (("kernels", "kernels_s", 1e3, "ms"), ("waiting", "blocked", 100, "%")):
            first, second = (own[is_two].median(key) * scale for is_two in (False, True))
            print(f"  {name}: one process {first:.1f}, two {second:.1f} {unit}")
    peers = [side for side in sides if side.mode.startswith("torch")]
    if peers:
        best = min(peers, key=lambda side: side.median())
        must, goal = TIMES_PEERS[comparison.split(":")[0]]
        what = f"{comparison}, two processes: times PyTorch's best"
        show(Figure(what, best.median() / seconds, "x", must=must, goal=goal, note=best.mode))


def show_share(side: Side, what: str) -> None:
    """The bound of a step compared with its time, and the parts of the rest."""
    must, goal = SHARE_SHARDED if ":fsdp" in side.mode else SHARE_OF_BOUND
    for row in side.rows:
        row["share"] = max(row["kernels_s"], row["moving_s"]) / row["seconds"]
    rest = 1 - side.median("busy") - side.median("blocked")
    share = 100 * side.median("share")
    show(Figure(f"{what}: share of its bound", share, "%", must=100 * must, goal=100 * goal, limit=100))
    print(
        f"  batch {BATCH}; kernels of the busiest device {side.median('kernels_s') * 1e3:.1f} ms, reading at most "
        f"{side.median('moved') / 1e6:.1f} MB from the peer {side.median('moving_s') * 1e3:.1f} ms\n"
        f"  the mean device: kernels {side.median('busy'):.1%} (collectives {side.median('collectives'):.1%}), "
        f"waiting for tasks {side.median('blocked'):.1%}, between tasks, before and after them {rest:.1%}",
        flush=True,
    )


def compare_all(options: argparse.Namespace) -> None:
    """All comparisons, then accumulation, as far as time permits."""
    ends_at = time.monotonic() + options.minutes * 60
    has_torch = find_spec("torch") is not None and find_spec("transformers") is not None
    if not has_torch:
        print("peers are left out: PyTorch or transformers is not installed")
    # before any process of a peer that may not have ended yet
    least = {dtype: least_seconds(dtype) for dtype in TIMES_PEERS}
    with tempfile.TemporaryDirectory() as scratch:
        override = build_override(Path(scratch)) if has_torch else None
        for number, comparison in enumerate(options.only):
            if time.monotonic() > ends_at:
                print(f"{comparison} is left out: it would take too long; raise --minutes")
                continue
            # what is left is shared evenly by what is to come
            left = ends_at - time.monotonic()
            until = time.monotonic() + left / (len(options.only) - number)
            bound = least[comparison.split(":")[0]]
            print(f"{comparison}, batch {BATCH}, 1 microbatch")
            entries = list(modes(comparison, has_torch, override))
            show_sides(compete(entries, options, until), comparison, 1, bound)
            mode = f"tilewise:{comparison}:2"
            print(f"{comparison}, batch {BATCH}, 2 microbatches")
            show_sides(compete([(mode, None)], options, until), comparison, 2, bound)


def main() -> None:
    """Parse arguments; be a mode or compare them all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=10.0, help="no further round begins after so long")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=COMPARISONS)
    parser.add_argument("--serve", metavar="MODE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--threads", type=int, help=argparse.SUPPRESS
    )  # as other benchmarks are asked to serve
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve and options.serve.startswith("tilewise"):
        serve_tilewise(options.serve)
    elif options.serve:
        serve_torch(options.serve, options.rank, options.port)
    else:
        print(f"{machine('numpy', 'torch', 'transformers')}; {DEVICES} x {WORKERS} threads")
        print(f"load before the run: {os.getloadavg()[0]:.1f}")
        compare_all(options)


if __name__ == "__main__":
    main()
