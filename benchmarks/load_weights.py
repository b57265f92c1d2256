"""Measures time and peak memory of loading weights from the page cache.

Compares `load_parameters` with a plain read of the files by one thread, with
`safetensors.torch.load_file` and with transformers' `from_pretrained`, both copied out of the
memory map. The weights are seeded and made once in `--folder`. Each contestant is a process; they
take turns, and the least time counts.

Run: python benchmarks/load_weights.py [--folder FOLDER] [--shape tinyllama|mistral-7b] [--rounds 4]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import ml_dtypes
import numpy as np
from figures import Figure, show
from machine import machine

SHAPES = {
    "tinyllama": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "mistral-7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
MUST_S = {"tinyllama": (1.5, 0.7)}  # must and goal
MUST_SHARE_OF_READ, MUST_RESIDENT = 0.8, 1.1
CONTEXT, BLOCKS = 256, 16


def resident_peak() -> int:
    """Peak resident memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def files_of(folder: Path) -> list[Path]:
    """The files with weights."""
    return sorted(folder.glob("*.safetensors"))


def make_weights(folder: Path, shape: str) -> None:
    """Write a model of that shape with seeded weights, one tensor in memory at a time."""
    from tilewise import models
    from tilewise.checkpoint import LazyTensor, save_pretrained
    from tilewise.models.llama import LlamaConfig
    from tilewise.models.mistral import MistralConfig

    def random(name: str, size: tuple[int, ...]) -> np.ndarray:
        bits = np.random.default_rng(crc32(name.encode())).integers(0, 1 << 16, size, np.uint16)
        return ((bits & 0x81FF) | 0x3C00).view(ml_dtypes.bfloat16)  # of both signs, 2**-7 to 2**-3

    family, context = (MistralConfig, 32768) if shape == "mistral-7b" else (LlamaConfig, 2048)
    config = family(**SHAPES[shape], max_position_embeddings=context)
    dtype = np.dtype(ml_dtypes.bfloat16)
    tensors = {
        name: LazyTensor(size, dtype, lambda name=name, size=size: random(name, size))
        for name, size in models.parameter_shapes(config)
    }
    stored = models.stored_tensors(config, tensors)
    save_pretrained(folder, {**config.to_dict(), "torch_dtype": "bfloat16"}, stored)


# ---- contestants, each in a process of its own -------------------------------------------------------------


def plain_read(folder: Path) -> dict[str, object]:
    """`readinto` of the files."""
    started = time.perf_counter()
    buffers = []
    for path in files_of(folder):
        with path.open("rb", buffering=0) as file:
            buffer = np.empty(path.stat().st_size, np.uint8)
            filled = 0
            while filled < buffer.size:
                filled += file.readinto(buffer[filled:].data)
            buffers.append(buffer)
    return {"load_s": time.perf_counter() - started}


def safetensors_load(folder: Path) -> dict[str, object]:
    """safetensors' own reader for PyTorch."""
    from safetensors.torch import load_file

    started = time.perf_counter()
    loads = [{name: tensor.clone() for name, tensor in load_file(path).items()} for path in files_of(folder)]
    return {"load_s": time.perf_counter() - started, "tensors": sum(len(k) for k in loads)}


def transformers_load(folder: Path) -> dict[str, object]:
    """`from_pretrained`."""
    import torch
    from transformers import LlamaForCausalLM

    started = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for parameter in model.parameters():  # which lie in the mapped files until then
        parameter.data = parameter.data.clone()
    return {"load_s": time.perf_counter() - started, "parameters": model.num_parameters()}


def ours(folder: Path, devices: int) -> dict[str, object]:
    """Ours over so many devices by tensor parallelism."""
    import tilewise as tw
    from tilewise import models

    started = time.perf_counter()
    config = models.open(folder)
    graph = tw.ComputeGraph("load")
    models.build_decoding_graph(graph, config, CONTEXT, 1, BLOCKS, "bf16")
    plan = graph.plan({"tp": devices} if devices > 1 else {})
    with graph.instantiate(plan) as model:
        loading = time.perf_counter()
        report = model.load_parameters(models.open_weights(folder, config))
        done = time.perf_counter()
        parameters = [usage["parameters"] for usage in model.memory_usage()]
    return {
        "load_s": done - loading,
        "plan_s": loading - started,
        "bytes_read": report.bytes_read,
        "parameter_bytes": parameters,
    }


CONTESTANTS = {
    "plain read": plain_read,
    "ours, 1 device": lambda folder: ours(folder, 1),
    "ours, 2 devices": lambda folder: ours(folder, 2),
    "safetensors": safetensors_load,
    "transformers": transformers_load,
}


def run(name: str, folder: Path) -> dict[str, object]:
    """One contestant's figures, from a new process."""
    command = [sys.executable, __file__, "--folder", str(folder), "--as", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def verdict(holds: bool) -> str:
    """A figure compared with its claim."""
    return "holds" if holds else "DOES NOT HOLD"


def compare(folder: Path, shape: str, rounds: int, only: list[str]) -> None:
    """Let the contestants take turns, and print."""
    num_bytes = sum(path.stat().st_size for path in files_of(folder))
    missing = {"safetensors": "torch", "transformers": "transformers"}
    names = [
        n for n in CONTESTANTS if (n not in missing or find_spec(missing[n])) and (not only or n in only)
    ]
    print(f"{machine('torch', 'safetensors', 'transformers')}; {shape}, {num_bytes / 1e9:.2f} GB of bf16")
    plain_read(folder)
    figures: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            figures[name].append(run(name, folder))
    best = {name: min(f["load_s"] for f in runs) for name, runs in figures.items()}
    for name, runs in figures.items():
        first = runs[0]
        peak = min(f["resident_peak"] for f in runs) / num_bytes
        speed = num_bytes / best[name] / 1e9
        line = f"{name:16} {best[name]:6.2f} s  {speed:5.2f} GB/s  peak {peak:.3f} of the weights"
        if "plain read" in best:
            line += f"  {best['plain read'] / best[name]:5.2f} times a plain read"
        print(line)
        if "bytes_read" in first:
            read, parameter_bytes = first["bytes_read"], first["parameter_bytes"]
            print(
                f"{'':16} plan and memory {min(f['plan_s'] for f in runs):.2f} s; "
                f"bytes read {read}, held {parameter_bytes}"
            )
            what = f"{shape}, {name}"
            show(
                Figure(
                    f"{what}: resident, of the weights", peak, "x", less_is_better=True, must=MUST_RESIDENT
                )
            )
            must, goal = MUST_S.get(shape, (None, None))
            peers = {
                n: s
                for n, s in best.items()
                if n not in (name, "plain read") and "bytes_read" not in figures[n][0]
            }
            limit = best.get("plain read")
            seconds = Figure(f"{what}: seconds", best[name], "s", less_is_better=True, must=must, goal=goal)
            show(replace(seconds, peers=peers, limit=limit))
            if limit is not None:
                share = Figure(
                    f"{what}: of a plain read's speed", limit / best[name], "x", must=MUST_SHARE_OF_READ
                )
                show(share)


def main() -> None:
    """Make the weights if they do not exist, then compare; or be one contestant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tilewise-weights")
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", action="append", default=[], choices=CONTESTANTS)
    parser.add_argument("--as", dest="contestant", choices=CONTESTANTS)
    options = parser.parse_args()
    if options.contestant:
        figures = CONTESTANTS[options.contestant](options.folder)
        print(json.dumps({**figures, "resident_peak": resident_peak()}))
        return
    folder = options.folder / options.shape
    if not files_of(folder):
        make_weights(folder, options.shape)
    compare(folder, options.shape, options.rounds, options.only)


if __name__ == "__main__":
    main()
