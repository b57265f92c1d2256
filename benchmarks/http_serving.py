"""Measures `tilewise serve` over HTTP with a model of TinyLlama-1.1B's shape.

- one-stream: tokens per second of one stream, compared with the engine in a process without a
  server.
- throughput: output tokens per second of 16 clients (128 prompt tokens, 128 new ones), compared
  with llama.cpp's `llama-server -np 16` if `--llama-server` names one.
- long-prompt: time between tokens of running streams while a prompt of 2,000 tokens is read.
- start: time from the command to the first answer, weights in the page cache.

Servers take turns under the load of `tilewise bench serve`. A figure is the median over rounds, for
start the least. The model (2.2 GB, seeded weights) is made in a temporary folder, or kept in
`--folder`.

Build `llama-server` from the sources in llama-cpp-python:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF && cmake --build build --target llama-server

`--llama-python` names a Python that has llama-cpp-python; `peers/llama_cpp_turns.py` writes the
GGUF file with it.

Run: python benchmarks/http_serving.py [--only one-stream throughput long-prompt start] [--rounds 3] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
from decoding import MODELS
from demo_step import Contestant
from figures import Figure, show
from machine import machine

from tilewise import Engine, SamplingParams, models
from tilewise.checkpoint import LazyTensor, save_pretrained
from tilewise.data import load_standard_library, train_tokenizer
from tilewise.models.llama import LlamaConfig
from tilewise.serve.measure import measure, random_prompts
from tilewise.server.load import BadAnswer, Load, LoadRequest, Target, load_figures, play

SHAPE = MODELS["tinyllama"]
ONE_STREAM, THROUGHPUT, LONG_PROMPT, START = (0.97, 0.99), (1.2, 2.0), (2.0, 1.3), (4.0, 2.0)  # must and goal
FIRST_TOKEN = 2.0
TITLE = "tinyllama, bf16"
ASKED, PROMPT, NEW = "/v1/completions", 128, 128
CLIENTS = 16
LONG, BEFORE_S = 2000, 8.0
LOADS_S = 120.0
PEERS = Path(__file__).resolve().parent / "peers"


# ---- the model -------------------------------------------------------------------------------------------


def make_model(folder: Path) -> None:
    """A directory with seeded weights, unless it exists."""
    if (folder / "config.json").exists():
        return
    dtype = np.dtype(ml_dtypes.bfloat16)
    drawn = np.random.default_rng(0).standard_normal((1 << 20) + 7, np.float32) * np.float32(0.02)

    def values(name: str, size: tuple[int, ...]) -> np.ndarray:
        if len(size) == 1:
            return np.ones(size, dtype)
        return np.resize(np.roll(drawn, crc32(name.encode()) % len(drawn)).astype(dtype), size)

    config = LlamaConfig(**SHAPE)
    tensors = {
        name: LazyTensor(size, dtype, lambda name=name, size=size: values(name, size))
        for name, size in models.parameter_shapes(config)
    }
    tokenizer = train_tokenizer((file.text for file in load_standard_library().train), SHAPE["vocab_size"])
    described = {**config.to_dict(), "dtype": "bfloat16"}
    save_pretrained(folder, described, models.stored_tensors(config, tensors), tokenizer)


# ---- servers ---------------------------------------------------------------------------------------------


class Server:
    """A server's process, reached by `target`. Ends with `with`.

    Args:
        command: that starts it, without its port.
    """

    def __init__(self, command: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.target = Target(f"http://127.0.0.1:{port}")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(40)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def wait(self) -> Server:
        """Until the server has loaded its model."""
        asyncio.run(self._wait())
        return self

    async def _wait(self) -> None:
        until = time.monotonic() + LOADS_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                await self.target.look("/health")
                return
            except (BadAnswer, OSError):
                await asyncio.sleep(0.02)
        self._log.seek(0)
        raise SystemExit(
            f"a server must answer; got the end of {self._process.args}:\n{self._log.read()[-2000:]}"
        )


def ours(folder: Path) -> Server:
    """`tilewise serve` with its usual settings."""
    return Server([sys.executable, "-m", "tilewise", "serve", str(folder), "--served-model-name", "model"])


@contextmanager
def llama_server(options: argparse.Namespace, folder: Path) -> Iterator[Server]:
    """llama.cpp's, with a slot for each client."""
    file = folder / "model.gguf"
    if not file.exists():
        asked = json.dumps({"shape": SHAPE, "dtype": "bf16"})
        script = str(PEERS / "llama_cpp_turns.py")
        subprocess.run([options.llama_python, script, "--serve", asked, "--write", file], check=True)
    threads = str(len(os.sched_getaffinity(0)))
    command = [
        options.llama_server,
        "-m",
        file,
        "-np",
        CLIENTS,
        "-c",
        CLIENTS * 2 * (PROMPT + NEW),
        "-t",
        threads,
    ]
    with Server([str(part) for part in command]) as server:
        yield server.wait()


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    """Random prompts, different for each seed."""
    return random_prompts(count, length, SHAPE["vocab_size"], seed)


def median_figure(
    name: str,
    values: Sequence[float],
    unit: str,
    bars: tuple[float, float | None] | None = None,
    note: str = "",
) -> None:
    """The median of rounds; less is better where the goal is below the must."""
    must, goal = bars or (None, None)
    is_less = unit in ("s", "ms") or (must is not None and goal is not None and goal < must)
    rounds = ", ".join(f"{value:.4g}" for value in values)
    note = f"{note}; rounds {rounds}" if note else f"rounds {rounds}"
    value = min(values) if bars is START else statistics.median(values)
    show(Figure(f"{TITLE}: {name}", value, unit, less_is_better=is_less, must=must, goal=goal, note=note))


# ---- one stream ------------------------------------------------------------------------------------------


def serve_engine(asked: dict[str, Any]) -> None:
    """The engine alone, as a process that takes turns: seconds per token of one text after its first token."""
    prompt, new = asked["prompt"], asked["new"]
    with Engine(asked["folder"]) as engine:
        for line in sys.stdin:
            params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
            seconds = []
            for _ in range(int(line)):
                (times,) = measure(engine, [prompt], params)
                (reported,) = times.texts
                seconds.append((reported[-1] - reported[0]) / (new - 1))
            print(json.dumps({"seconds": seconds, "loss": 0.0}), flush=True)


async def stream_times(target: Target, prompt: list[int], new: int, times: list[float]) -> None:
    """A greedy text over HTTP; the arrival times of its tokens."""
    load = Load(ASKED, "model", ignore_eos=True)
    body = load.body(LoadRequest(prompt, len(prompt), new))
    async with aclosing(target.events(ASKED, body)) as events:  # type: ignore[type-var]
        async for event in events:
            if event["choices"]:
                times.append(time.perf_counter())


def measure_one_stream(folder: Path, options: argparse.Namespace) -> None:
    """The server and the engine in turns."""
    (prompt,) = prompts_of(1, PROMPT, 0)
    asked = json.dumps({"folder": str(folder), "prompt": prompt, "new": NEW})
    rows = []
    with ours(folder) as server:
        engine = Contestant(asked, len(os.sched_getaffinity(0)), None, __file__)
        server.wait()
        for number in range(2 * options.rounds + 1):  # the first warms up
            if not engine.take_turn(1, is_counted=False):
                raise SystemExit("the engine must answer; got its end")
            times: list[float] = []
            asyncio.run(stream_times(server.target, prompt, NEW, times))
            if len(times) < NEW:
                raise SystemExit(f"a stream must have an event for each token; got {len(times)} for {NEW}")
            if number:
                rows.append((1 / engine.last_s, (NEW - 1) / (times[NEW - 1] - times[0])))
        engine.close()
    for what, column in (("engine alone", 0), ("over HTTP", 1)):
        median_figure(f"one stream, {what}", [row[column] for row in rows], "tokens/s")
    median_figure("one stream, over HTTP by engine", [http / alone for alone, http in rows], "x", ONE_STREAM)


# ---- many streams ----------------------------------------------------------------------------------------


def output_rate(target: Target, count: int, seed: int) -> float:
    """Output tokens a second of the whole load."""
    load = Load(ASKED, "model", max_concurrency=CLIENTS, ignore_eos=True)
    wanted = [LoadRequest(ids, PROMPT, NEW) for ids in prompts_of(count, PROMPT, seed)]
    figures = load_figures(asyncio.run(play(target, load, wanted)), [99])
    if figures["failed"] or figures["total_output_tokens"] != count * NEW:
        raise SystemExit(f"all requests must be answered in full; got {figures}")
    return float(figures["output_throughput"])


def measure_throughput(folder: Path, options: argparse.Namespace) -> None:
    """Both servers in turns."""
    note = f"{CLIENTS} clients, {options.requests} requests, {PROMPT} in, {NEW} out"
    rows: list[list[float]] = []
    with ours(folder) as server:
        server.wait()
        sides = [server.target]

        def take_turns() -> None:
            for side in sides:
                output_rate(side, 2, 0)  # warms up
            for number in range(1, options.rounds + 1):
                rows.append([output_rate(side, options.requests, number) for side in sides])

        if options.llama_server is None:
            take_turns()
            median_figure(
                "throughput", [row[0] for row in rows], "tokens/s", note=f"{note}; no llama-server given"
            )
            return
        with llama_server(options, folder) as peer:
            sides.append(peer.target)
            take_turns()
    for what, column in (("throughput", 0), ("throughput of llama-server", 1)):
        median_figure(what, [row[column] for row in rows], "tokens/s", note=note)
    median_figure("throughput, times llama-server", [own / peer for own, peer in rows], "x", THROUGHPUT)


# ---- a long prompt among streams -------------------------------------------------------------------------


async def first_token_s(target: Target, prompt: list[int]) -> float:
    """Seconds from the request to the first token."""
    times: list[float] = []
    asked = time.perf_counter()
    await stream_times(target, prompt, 1, times)
    return times[0] - asked


def gaps_between(streams: Sequence[Sequence[float]], begin: float, end: float) -> np.ndarray:
    """Milliseconds between consecutive tokens of a text within that time."""
    within = [np.array(times)[(np.array(times) >= begin) & (np.array(times) <= end)] for times in streams]
    return np.concatenate([np.diff(times) for times in within]) * 1e3


async def long_prompt_round(target: Target, count: int, seed: int) -> dict[str, float]:
    """The prompt alone; then streams, and the prompt among them."""
    alone_ids, among_ids = prompts_of(2, LONG, 2 * seed)
    alone_s = await first_token_s(target, alone_ids)
    streams: list[list[float]] = [[] for _ in range(count)]
    room = SHAPE["max_position_embeddings"] - 2 * CLIENTS
    tasks = [
        asyncio.ensure_future(stream_times(target, ids, room, times))
        for ids, times in zip(prompts_of(count, CLIENTS, 2 * seed + 1), streams)
    ]
    try:
        while not all(times for times in streams):
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        begin = time.perf_counter()
        await asyncio.sleep(BEFORE_S)
        middle = time.perf_counter()
        among_s = await first_token_s(target, among_ids)
        end = time.perf_counter()
        if any(task.done() for task in tasks):
            raise SystemExit("streams must go on while a prompt is read; got the end of one")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    before, during = gaps_between(streams, begin, middle), gaps_between(streams, middle, end)
    return {
        "alone": alone_s,
        "among": among_s,
        "before": float(np.percentile(before, 99)),
        "during": float(np.percentile(during, 99)),
    }


def measure_long_prompt(folder: Path, options: argparse.Namespace) -> None:
    """Rounds of one server of ours."""
    with ours(folder) as server:
        server.wait()
        rows = [
            asyncio.run(long_prompt_round(server.target, options.streams, number))
            for number in range(options.rounds + 1)
        ][1:]
    note = f"{options.streams} streams, a prompt of {LONG}"
    median_figure("inter-token p99, streams alone", [row["before"] for row in rows], "ms", note=note)
    median_figure("inter-token p99, a prompt is read", [row["during"] for row in rows], "ms", note=note)
    ratios = [row["during"] / row["before"] for row in rows]
    median_figure("inter-token p99, with a prompt by without", ratios, "x", LONG_PROMPT, note)
    first = [row["among"] / row["alone"] for row in rows]
    title, value = f"{TITLE}: first token of a long prompt, among streams by alone", statistics.median(first)
    alone = statistics.median(row["alone"] for row in rows)
    show(
        Figure(title, value, "x", less_is_better=True, must=FIRST_TOKEN, note=f"{note}; alone {alone:.2f} s")
    )


# ---- a start ---------------------------------------------------------------------------------------------


def measure_start(folder: Path, options: argparse.Namespace) -> None:
    """Starts, one after the other."""
    ready, answered = [], []
    for _ in range(options.rounds + 1):
        for path in folder.glob("*.safetensors"):  # into the page cache
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass
        began = time.perf_counter()
        with ours(folder) as server:
            server.wait()
            ready.append(time.perf_counter() - began)
            load = Load(ASKED, "model")
            (played,) = asyncio.run(play(server.target, load, [LoadRequest("Say something.", 0, 1)]))
            if played.error:
                raise SystemExit(f"a server must answer; got {played.error}")
            answered.append(played.delta_times[0] - began)
    median_figure("start, until it is ready", ready[1:], "s")
    median_figure("start, until the first answer", answered[1:], "s", START)


# ---- all -------------------------------------------------------------------------------------------------

MEASURED: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "one-stream": measure_one_stream,
    "throughput": measure_throughput,
    "long-prompt": measure_long_prompt,
    "start": measure_start,
}


def main() -> None:
    """Parse arguments; be the engine alone, or run the requested measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MEASURED, default=[*MEASURED])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the model is kept; default: for this run alone")
    parser.add_argument("--requests", type=int, default=2 * CLIENTS, help="of a turn of throughput")
    parser.add_argument("--streams", type=int, default=4, help="next to the long prompt")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--llama-python", type=Path, help="a Python that peers/llama_cpp_turns.py runs with")
    parser.add_argument("--serve", type=json.loads, metavar="JSON", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_engine(options.serve)
        return
    if (options.llama_server is None) != (options.llama_python is None):
        parser.error("--llama-server and --llama-python go together")
    print(machine("numpy", "uvicorn", "starlette"))
    print(f"load before the run: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as own:
        folder = (options.folder or Path(own)) / "tinyllama"
        make_model(folder)
        for name in options.only:
            MEASURED[name](folder, options)


if __name__ == "__main__":
    main()
