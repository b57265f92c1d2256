"""llama.cpp decoding one stream and reading a prompt, as a process that takes turns (`demo_step.Contestant`).

Runs with a Python of its own that has `llama-cpp-python`, `gguf` and `numpy`, and nothing of Tilewise:

    python -m venv llama
    CMAKE_ARGS="-DGGML_NATIVE=ON" llama/bin/pip install llama-cpp-python gguf numpy

The model is the GGUF file that --serve names in JSON, or one of the shape that it gives, with random weights, made in a
temporary folder. Each
line of standard input is a number N; the answer is a line of JSON: seconds of N tokens, each decoded alone behind a
short context, and of one prompt, from an empty cache. With --write it only writes that file, for llama.cpp's server.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

NUM_SPECIAL, NUM_BYTES = 3, 256


def write_tokens(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A vocabulary of meaningless tokens."""
    named = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(NUM_BYTES))]
    rest = vocab_size - len(named)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(named + [f"t{number}".encode() for number in range(rest)])
    writer.add_token_scores([0.0] * len(named) + [-float(number) for number in range(rest)])
    writer.add_token_types([2] + [3] * (NUM_SPECIAL - 1) + [6] * NUM_BYTES + [1] * rest)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def random_blocks(drawn: np.ndarray, kind: gguf.GGMLQuantizationType, *sizes: int) -> np.ndarray:
    """Q4_K, which the package cannot quantise: random codes, with the scales of small weights."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    codes = np.resize(drawn.view(np.uint8), (sizes[0], sizes[1] // elements, num_bytes)).copy()
    codes[..., :4] = np.array([2e-5, 2e-4], np.float16).view(np.uint8)  # scale and minimum of a block
    return codes.reshape(sizes[0], -1)


def write_model(path: Path, shape: dict[str, Any], dtype: str) -> None:
    """A Llama of this shape with random weights."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head, vocab = hidden // heads, shape["vocab_size"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(vocab)
    write_tokens(writer, vocab)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    drawn = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * np.float32(0.02)

    def add(name: str, *sizes: int) -> None:
        if len(sizes) == 1:
            writer.add_tensor(name, np.ones(sizes, np.float32))
        elif kind == gguf.GGMLQuantizationType.Q4_K:
            writer.add_tensor(name, random_blocks(drawn, kind, *sizes), raw_dtype=kind)
        else:
            values = np.resize(drawn, sizes)
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", vocab, hidden)
    add("output_norm.weight", hidden)
    add("output.weight", vocab, hidden)
    for layer in range(shape["num_hidden_layers"]):
        place = f"blk.{layer}."
        add(place + "attn_norm.weight", hidden)
        add(place + "ffn_norm.weight", hidden)
        add(place + "attn_q.weight", hidden, hidden)
        add(place + "attn_k.weight", kv_heads * head, hidden)
        add(place + "attn_v.weight", kv_heads * head, hidden)
        add(place + "attn_output.weight", hidden, hidden)
        add(place + "ffn_gate.weight", inner, hidden)
        add(place + "ffn_up.weight", inner, hidden)
        add(place + "ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def seconds_of(model: llama_cpp.Llama, ids: list[int]) -> float:
    """Of one call with these tokens after the earlier ones."""
    started = time.perf_counter()
    model.eval(ids)
    return time.perf_counter() - started


def serve(settings: dict[str, Any], threads: int) -> None:
    """Turns, until standard input ends."""
    prompt, context = settings["prompt"], settings["context"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(settings.get("file", Path(folder) / "model.gguf"))
        if "file" not in settings:
            write_model(path, settings["shape"], settings["dtype"])
        model = llama_cpp.Llama(
            str(path),
            n_ctx=2 * prompt,
            n_batch=prompt,
            n_ubatch=prompt,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
    ids = [int(id_) for id_ in np.random.default_rng(0).integers(300, model.n_vocab(), prompt)]
    for line in sys.stdin:
        model.reset()
        prefill = seconds_of(model, ids)
        model.reset()
        model.eval(ids[:context])
        seconds = [seconds_of(model, [ids[number % prompt]]) for number in range(int(line))]
        print(json.dumps({"seconds": seconds, "prefill": prefill, "loss": 0.0}), flush=True)


def main() -> None:
    """Parse arguments, serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", type=json.loads, required=True, metavar="JSON")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the model is written, and no more")
    options = parser.parse_args()
    if options.write is not None:
        write_model(options.write, options.serve["shape"], options.serve["dtype"])
        return
    serve(options.serve, options.threads)


if __name__ == "__main__":
    main()
