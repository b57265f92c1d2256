"""Measures decoding and prefill speed of a model on the CPU.

Compares decoding with the memory bandwidth measured in the same run, with transformers (`--peers`)
and with llama.cpp (`--llama-python` names a Python that has it; `peers/llama_cpp_turns.py` says how
to make one). Models are TinyLlama-1.1B's shape in bf16, one of 100M parameters and, on demand,
Mistral-7B (14.5 GB; `--layers` cuts it), with seeded random weights. All sides take turns; a figure
is the best round, and a ratio to a peer is the median over the rounds.

Run: python benchmarks/decoding.py [--models tinyllama 100m] [--devices 1] [--rounds 5] [--peers] [--profile 1 32]
     python benchmarks/decoding.py --models mistral-7b --devices 2 --streams 1 --no-prefill
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from demo_step import Contestant, measure_peak
from figures import Figure, show
from llvmlite import ir as llvm
from load_weights import SHAPES
from machine import machine
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

import tilewise as tw
from tilewise import models
from tilewise.kernels.sampling import sample_tokens
from tilewise.models import BLOCK_SIZE, llama
from tilewise.observe import TaskSpan
from tilewise.session import GraphInstance

MODELS = {
    "tinyllama": {**SHAPES["tinyllama"], "max_position_embeddings": 2048},
    "100m": {
        "vocab_size": 32000,
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "max_position_embeddings": 1024,
    },
    "mistral-7b": {**SHAPES["mistral-7b"], "max_position_embeddings": 4096},
}
STREAMS, PROMPT, CONTEXT = (1, 8, 32), 512, 16
SHARE, TIMES_ONE, PREFILL, LLAMA = (0.85, 0.95), {8: (5.0, 7.0), 32: (10.0, 16.0)}, (1.1, 1.3), (0.97, 1.05)
LLAMA_ONE = "llama.cpp, one stream"
PROBE_BYTES = 1 << 29
ITEM_BYTES = {"bf16": 2, "f32": 4}


@intrinsic  # type: ignore[misc]
def _ask_for(_: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of an element."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, word = llvm.IntType(8).as_pointer(), llvm.IntType(32)
        kind = llvm.FunctionType(llvm.VoidType(), [byte, word, word, word])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(address, [arguments[1]]), byte)
        builder.call(prefetch, [place, *(llvm.Constant(word, flag) for flag in (0, 3, 1))])
        return context.get_dummy_value()

    return types.none(array, index), emit


@njit(nogil=True)  # type: ignore[misc]
def _read_ahead(words: np.ndarray, ahead: int) -> int:
    """All words combined; each line is prefetched so many words before it is read, as in the few-row kernels."""
    combined = 0
    for line in range(0, len(words) - 7, 8):
        _ask_for(words, line + ahead)
        for word in range(line, line + 8):
            combined ^= words[word]
    return combined


class ReadProbe:
    """Read bandwidth of memory with all cores: huge pages, a thread per core, the best of several ways to read."""

    WAYS: tuple[Callable[[np.ndarray], object], ...] = (
        lambda part: np.max(part.view(np.float32)),
        np.bitwise_or.reduce,
        *(partial(_read_ahead, ahead=size // 8) for size in (2048, 4096, 8192)),
    )

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PROBE_BYTES)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(self._memory, np.int64)
        array[:] = 1
        self._parts = [np.array_split(part, len(os.sched_getaffinity(0))) for part in np.split(array, 4)]
        self.best = 0.0
        for reads in self.WAYS:
            reads(array[:64])  # compiled now

    def run(self) -> None:
        """One round: bytes per second of each quarter, kept if it is the best so far."""
        for reads in self.WAYS:
            for parts in self._parts:
                self.best = max(self.best, PROBE_BYTES / 4 / self._seconds(reads, parts))

    @staticmethod
    def _seconds(reads: Callable[[np.ndarray], object], parts: list[np.ndarray]) -> float:
        """From the first thread's beginning to the last one's end."""
        times: list[float] = []

        def read(part: np.ndarray) -> None:
            times.append(time.perf_counter())
            reads(part)
            times.append(time.perf_counter())

        threads = [threading.Thread(target=read, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(times) - min(times)


def open_model(shape: dict[str, Any], dtype: str, devices: int, streams: list[int]) -> GraphInstance:
    """A model for so many sequences of a block each, or a prompt of 512 tokens."""
    graph = tw.ComputeGraph("llama")
    most = max(*streams, PROMPT // BLOCK_SIZE)
    models.build_decoding_graph(
        graph, llama.LlamaConfig(**shape), PROMPT, most, most, dtype, context=PROMPT, max_rows=most
    )
    model = graph.instantiate(graph.plan({"tp": devices} if devices > 1 else {}))
    model.initialize(0)
    return model


def inputs_of(streams: int, tokens: int, start: int, vocab: int) -> dict[str, np.ndarray]:
    """`tokens` tokens from position `start` on, of each of so many sequences; logits of each one's last token."""
    places = np.tile(np.arange(start, start + tokens, dtype=np.int32), streams)
    sequence = np.repeat(np.arange(streams, dtype=np.int32), tokens)
    per_sequence = -(-(start + tokens) // BLOCK_SIZE)
    table = np.zeros((streams, PROMPT // BLOCK_SIZE), np.int32)
    table[:, :per_sequence] = np.arange(streams * per_sequence, dtype=np.int32).reshape(streams, -1)
    return {
        "tokens": np.random.default_rng(0).integers(0, vocab, len(places)).astype(np.int32),
        "positions": places,
        "slots": (table[sequence, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE).astype(np.int32),
        "sequence": sequence,
        "block_table": table,
        "rows": (np.arange(1, streams + 1, dtype=np.int32) * tokens - 1).astype(np.int32),
    }


def step_of(model: GraphInstance, inputs: dict[str, np.ndarray]) -> Callable[[], None]:
    """A step: the call, and the likeliest token of every row, as the engine takes them."""
    count = len(inputs["rows"])
    rows, settings = np.arange(count), np.array([(0, 0, 1, 0, 1)] * count, np.float64)
    keys = np.zeros((count, 3), np.uint64)

    def step() -> None:
        model.forward(**inputs)
        logits = model.get_tensor("logits", copy=False)
        sample_tokens(logits if logits.dtype == np.float32 else logits.view(np.uint16), rows, settings, keys)

    return step


def peer_prefill(shape: dict[str, Any], dtype: str) -> Callable[[], None]:
    """A prompt read by transformers, logits of its last token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    torch.set_default_dtype({"bf16": torch.bfloat16, "f32": torch.float32}[dtype])
    peer = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, shape["vocab_size"], (1, PROMPT))

    def run() -> None:
        with torch.inference_mode():
            peer(ids, use_cache=True, logits_to_keep=1)

    return run


def seconds_of(run: Callable[[], None], least: float) -> float:
    """The fastest call of as many as fit in `least` seconds."""
    best, until = float("inf"), time.perf_counter() + least
    while True:
        started = time.perf_counter()
        run()
        ended = time.perf_counter()
        best = min(best, ended - started)
        if ended > until:
            return best


def weight_bytes(model: GraphInstance, shape: dict[str, Any], dtype: str) -> int:
    """Bytes of weights that a token reads."""
    num_bytes = sum(usage["parameters"] for usage in model.memory_usage())
    rows = shape["vocab_size"] * shape["hidden_size"] * ITEM_BYTES[dtype]
    return num_bytes - rows


def profile(model: GraphInstance, inputs: dict[str, np.ndarray], steps: int = 30) -> None:
    """Steps task by task: per label the number of tasks of a step and the sum of each one's fastest
    time; and the fastest step, with the workers' busy share.
    """
    model.trace(True)
    best: tuple[float, Sequence[TaskSpan]] = (float("inf"), ())
    fastest: dict[tuple[str, int], float] = {}
    for _ in range(steps):
        started = time.perf_counter()
        model.forward(**inputs)
        seconds = time.perf_counter() - started
        tasks, number = model.timeline().tasks, defaultdict[str, int](int)
        for task in sorted(tasks, key=lambda t: t.submit_ns):
            key = task.kernel, number[task.kernel]
            number[task.kernel] += 1
            fastest[key] = min(fastest.get(key, float("inf")), (task.end_ns - task.start_ns) / 1e3)
        if seconds < best[0]:
            best = seconds, tasks
    model.trace(False)
    seconds, tasks = best
    begin, end = min(t.start_ns for t in tasks), max(t.end_ns for t in tasks)
    workers = {(t.device, t.worker) for t in tasks}
    busy = sum(t.end_ns - t.start_ns for t in tasks)
    print(
        f"  a step {seconds * 1e3:.2f} ms, its tasks {(end - begin) / 1e6:.2f} ms; {len(tasks)} tasks on "
        f"{len(workers)} worker(s), busy {busy / (end - begin) / len(workers):.0%} of the time"
    )
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (label, _), micros in fastest.items():
        rows[label][0] += micros
        rows[label][1] += 1
    total = sum(micros for micros, _ in rows.values())
    print(f"  the fastest of each task: {total / 1e3 / len(workers):.2f} ms a worker")
    for label, (micros, count) in sorted(rows.items(), key=lambda item: -item[1][0])[:20]:
        print(f"  {label[-48:]:48} {count:5.0f} tasks {micros / count:9.1f} us each {micros / total:6.1%}")


class Rounds:
    """The fastest call of every side, round by round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def add(self, side: str, seconds: float) -> None:
        """Add the times of one round."""
        self.seconds[side].append(seconds)

    def best(self, side: str) -> float:
        """The fastest of all rounds."""
        return min(self.seconds[side])

    def times(self, side: str, peers: list[str]) -> float:
        """Speed relative to the fastest of these; the median over rounds."""
        theirs = [min(seconds) for seconds in zip(*(self.seconds[peer] for peer in peers))]
        return statistics.median(peer / own for peer, own in zip(theirs, self.seconds[side]))


def open_llama(shape: dict[str, Any], options: argparse.Namespace) -> Contestant | None:
    """llama.cpp with the same shape, warmed up."""
    if options.llama_python is None:
        return None
    asked = {"shape": shape, "dtype": options.dtype, "prompt": PROMPT, "context": CONTEXT}
    script = Path(__file__).parent / "peers" / "llama_cpp_turns.py"
    threads = len(os.sched_getaffinity(0))
    side = Contestant(json.dumps(asked), threads, None, str(script), str(options.llama_python))
    return side if side.take_turn(2, is_counted=False) else None


def llama_tokens(llama: Contestant, options: argparse.Namespace) -> int:
    """As many tokens as fit in a turn."""
    return max(2, int(options.seconds / llama.last_s))


def play(
    model: GraphInstance, shape: dict[str, Any], options: argparse.Namespace, probe: ReadProbe
) -> Rounds:
    """All rounds of all sides."""
    vocab, rounds = shape["vocab_size"], Rounds()
    runs = {f"{n} streams": step_of(model, inputs_of(n, 1, CONTEXT, vocab)) for n in options.streams}
    if options.prefill:
        runs["prefill"] = step_of(model, inputs_of(1, PROMPT, 0, vocab))
        if options.peers:
            runs["transformers"] = peer_prefill(shape, options.dtype)
    llama = open_llama(shape, options)
    for _ in range(options.rounds):
        for side, run in runs.items():
            rounds.add(side, seconds_of(run, options.seconds))
            seconds_of(probe.run, options.seconds / 2)
            is_beside = side == f"{min(options.streams)} streams"  # what it is compared with
            if llama is not None and is_beside and llama.take_turn(llama_tokens(llama, options), True):
                rounds.add(LLAMA_ONE, llama.last_s)
                rounds.add("llama.cpp", llama.answer["prefill"])
    if llama is not None:
        llama.close()
    return rounds


def measure(name: str, options: argparse.Namespace) -> None:
    """All figures of one shape."""
    shape, dtype = dict(MODELS[name]), options.dtype
    if options.layers is not None:
        shape["num_hidden_layers"] = options.layers
        name = f"{name} with {options.layers} layers"
    with open_model(shape, dtype, options.devices, options.streams) as model:
        read, probe = weight_bytes(model, shape, dtype), ReadProbe()
        rounds = play(model, shape, options, probe)
        title = f"{name}, {dtype}" if options.devices == 1 else f"{name}, {dtype}, {options.devices} devices"
        print(
            f"{title}: {read / 1e9:.3f} GB of weights a token; memory is read at {probe.best / 1e9:.1f} GB/s"
        )
        cores = len(os.sched_getaffinity(0))
        flops = 2 * read / ITEM_BYTES[dtype]  # of a token
        peak = max(measure_peak(f"peak_{dtype}", cores) for _ in range(2)) / flops
        limits = {n: min(n * probe.best / read, peak) for n in {1, *options.streams}}
        show_streams(title, rounds, options.streams, limits)
        if options.prefill:
            show_prefill(title, rounds)
        for n in options.profile or ():
            print(f"  {n} stream(s):")
            profile(model, inputs_of(n, 1, CONTEXT, shape["vocab_size"]))


def asked(name: str, value: float, bars: tuple[float, float]) -> Figure:
    """A ratio with its must and its goal."""
    must, goal = bars
    return Figure(name, value, "x", must=must, goal=goal)


def show_streams(title: str, rounds: Rounds, streams: list[int], limits: dict[int, float]) -> None:
    """Tokens a second of so many streams: one stream relative to reading and to llama.cpp, the
    others relative to one. Limits come from memory and multiply-adds together: they bound the ratio
    of many streams to one.
    """
    rates = {n: n / rounds.best(f"{n} streams") for n in streams}
    for n, rate in rates.items():
        name = f"{title}: {n} stream{'s' if n > 1 else ''}"
        if n > 1:
            show(Figure(name, rate, "tokens/s", limit=limits[n]))
            if 1 in rates:
                times = asked(f"{name}, times one", rate / rates[1], TIMES_ONE[n])
                show(replace(times, limit=limits[n] / limits[1]))
            continue
        peers = {"llama.cpp": 1 / rounds.best(LLAMA_ONE)} if LLAMA_ONE in rounds.seconds else {}
        show(Figure(name, rate, "tokens/s", peers=peers, limit=limits[1]))
        show(asked(f"{name}, share of the read bandwidth", rate / limits[1], SHARE))
        if peers:
            show(asked(f"{name}, times llama.cpp", rounds.times("1 streams", [LLAMA_ONE]), LLAMA))


def show_prefill(title: str, rounds: Rounds) -> None:
    """Speed of reading a prompt, and that of the peers."""
    name = f"{title}: prompt of {PROMPT}"
    peers = [peer for peer in ("transformers", "llama.cpp") if peer in rounds.seconds]
    rates = {peer: PROMPT / rounds.best(peer) for peer in peers}
    show(Figure(name, PROMPT / rounds.best("prefill"), "tokens/s", peers=rates))
    if peers:
        show(asked(f"{name}, times the better peer", rounds.times("prefill", peers), PREFILL))


def main() -> None:
    """Measure every requested shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["tinyllama", "100m"])
    parser.add_argument("--layers", type=int, help="of the model, where memory is short")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--devices", type=int, default=1, help="that share the model")
    parser.add_argument("--streams", type=int, nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--prefill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each figure in each round")
    parser.add_argument("--peers", action="store_true", help="compare prefill with transformers")
    parser.add_argument("--llama-python", type=Path, help="a Python that has llama.cpp: compare with it")
    parser.add_argument(
        "--profile", type=int, nargs="*", metavar="STREAMS", help="where such steps spend time"
    )
    options = parser.parse_args()
    print(f"{machine('numpy', 'torch', 'transformers')}; {options.devices} device(s)")
    print(f"load before the run: {os.getloadavg()[0]:.1f}")
    for name in options.models:
        measure(name, options)


if __name__ == "__main__":
    main()
