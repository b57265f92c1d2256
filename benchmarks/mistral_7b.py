"""Measures memory of Mistral-7B in bf16 on one and two devices, whose tokens must be equal.

The peak of resident memory is compared with the size of the weights, and logits by a digest of all
bits. The weights are seeded; `load_weights.py` makes them in `--folder`. A prompt of 32 tokens is
read and 12 tokens are written, each the most likely token that the text does not have yet.
`decoding.py --models mistral-7b` measures speed in rounds.

Run: python benchmarks/mistral_7b.py [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from load_weights import files_of, make_weights, resident_peak, verdict
from machine import machine

SHAPE = "mistral-7b"
PROMPT, WRITTEN = 32, 12
MUST_RESIDENT, MUST_HALF = 1.10, 0.02


def write(folder: Path, devices: int) -> dict[str, object]:
    """Greedy tokens over so many devices, with times and memory."""
    import tilewise as tw
    from tilewise import models

    config = models.open(folder)
    context = PROMPT + WRITTEN
    graph = tw.ComputeGraph(config.model_type)
    models.build_decoding_graph(graph, config, PROMPT, 1, 1, "bf16", context=context)
    ids = [int(i) for i in np.random.default_rng(0).integers(0, config.vocab_size, PROMPT)]
    with graph.instantiate(graph.plan({"tp": devices} if devices > 1 else {})) as model:
        report = model.load_parameters(models.open_weights(folder, config))
        parameter_bytes = [usage["parameters"] for usage in model.memory_usage()]
        done, seconds, digest = 0, [], hashlib.sha256()
        while len(ids) < context:
            places = np.arange(done, len(ids), dtype=np.int32)
            started = time.perf_counter()
            model.forward(
                tokens=np.array(ids[done:], np.int32),
                positions=places,
                slots=places,
                sequence=np.zeros(len(places), np.int32),
                block_table=np.zeros((1, 1), np.int32),
                rows=np.array([len(places) - 1], np.int32),
            )
            seconds.append(time.perf_counter() - started)
            done = len(ids)
            logits = np.array(model.get_tensor("logits")[0], np.float32)
            digest.update(logits.tobytes())
            logits[ids] = -np.inf
            ids.append(int(logits.argmax()))
    return {
        "tokens": ids[PROMPT:],
        "logits": digest.hexdigest(),
        "held": parameter_bytes,
        "bytes_read": list(report.bytes_read),
        "prompt_s": seconds[0],
        "token_s": float(np.median(seconds[1:])),
        "resident_peak": resident_peak(),
    }


def memory_rate() -> float:
    """Bytes per second that all cores read together."""
    from tilewise.machine import measure_bandwidth

    return measure_bandwidth()


def main() -> None:
    """Both numbers of devices, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tilewise-weights")
    parser.add_argument("--devices", type=int)
    options = parser.parse_args()
    folder = options.folder / SHAPE
    if not files_of(folder):
        make_weights(folder, SHAPE)
    if options.devices:
        print(json.dumps(write(folder, options.devices)))
        return
    num_bytes, rate = sum(path.stat().st_size for path in files_of(folder)), memory_rate()
    print(f"{machine()}; {num_bytes / 1e9:.2f} GB of bf16")
    results = {}
    for devices in (1, 2):
        command = [sys.executable, __file__, "--folder", str(options.folder), "--devices", str(devices)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[devices] = of = json.loads(done.stdout.splitlines()[-1])
        peak = of["resident_peak"] / num_bytes
        print(
            f"{devices} device(s): peak {peak:.3f} of the weights ({verdict(peak <= MUST_RESIDENT)}: {MUST_RESIDENT}); "
            f"prompt {of['prompt_s']:.2f} s; a token {of['token_s'] * 1e3:.0f} ms, "
            f"{num_bytes / rate / of['token_s']:.2f} of the speed of memory"
        )
    half = sum(results[2]["held"]) / 2
    off = max(abs(device_bytes - half) / half for device_bytes in results[2]["held"])
    print(f"each of two devices holds half within {off:.4f} ({verdict(off <= MUST_HALF)}: {MUST_HALF})")
    print(f"bytes read per device {results[2]['bytes_read']}")
    print(f"{verdict(results[1]['tokens'] == results[2]['tokens'])}: the same tokens, {results[1]['tokens']}")
    print(f"{verdict(results[1]['logits'] == results[2]['logits'])}: the same bits in all logits")


if __name__ == "__main__":
    main()
