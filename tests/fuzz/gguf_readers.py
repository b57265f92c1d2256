"""Readers of GGUF files: header, metadata, tokenizer and weights. Part of the table in readers.py."""

from __future__ import annotations

import random
import struct
import tempfile
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from fuzz.mutate import mutate
from support.gguf_models import (
    byte_level_vocabulary,
    piece_vocabulary,
    short_pieces,
    small_model,
    write_model,
)
from tilewise import models
from tilewise.checkpoint import gguf_model, load_generation_config, load_tokenizer, load_tokenizer_config
from tilewise.checkpoint.tensors import FileTensor
from tilewise.data import END_OF_TEXT, train_tokenizer
from tilewise.generate.prompts import encode_prompt

_ODD_INTEGERS = (
    0,
    1,
    2,
    3,
    8,
    9,
    31,
    32,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 62) - 1,
)
_ODD_INTEGERS += ((1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def read_gguf(folder: Path, data: bytes) -> None:
    """An accepted file has the tensors that the gguf package reads, and a tokenizer that encodes."""
    file = folder / "model.gguf"
    file.write_bytes(data)
    model = gguf_model(file)
    assert model is not None
    plain = {n: np.array(t) for n, t in model.files.tensors().items() if isinstance(t, FileTensor)}
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert {*theirs} == {*model.files.infos}
    for name, array in plain.items():
        assert theirs[name].data.tobytes() == array.tobytes(), name
    config = models.open(file)
    for name, tensor in models.open_weights(file, config).items():
        assert np.asarray(tensor).shape == tuple(tensor.shape), name
    load_tokenizer_config(file)
    load_generation_config(file, config.vocab_size)
    encode_prompt(load_tokenizer(file, config.vocab_size), "hello, 12 wörlds \U0001f600")


@cache
def valid_gguf() -> list[bytes]:
    """A Llama with byte-level BPE, a Gemma and a Phi with SentencePiece, in types of several kinds."""
    tokenizer = train_tokenizer(["hello world\n"] * 9, vocab_size=270)
    tokens = byte_level_vocabulary(tokenizer, "llama-bpe", [END_OF_TEXT])
    tokens |= {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
        "general.name": "n",
    }
    factors = {"long_factor": [2.0] * 16, "short_factor": [1.0] * 16}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    pieces = piece_vocabulary(short_pieces())
    sizes = {"vocab_size": len(pieces["tokenizer.ggml.tokens"])}
    rope = {"rope_parameters": longrope, "original_max_position_embeddings": 32}
    cases = (
        ("llama", {"vocab_size": len(tokens["tokenizer.ggml.tokens"])}, tokens, Kind.Q8_0),
        ("gemma3_text", sizes, pieces, Kind.Q4_0),
        ("phi3", {**sizes, **rope}, pieces, Kind.Q5_1),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        files = []
        for kind, changes, vocabulary, of in cases:
            plain = Kind.F16 if kind == "phi3" else Kind.BF16
            write_model(
                path,
                small_model(kind, **changes),
                lambda name, values, of=of, plain=plain: plain if "down" in name else of,
                vocabulary=vocabulary,
            )
            files.append(path.read_bytes())
    return files


def mutate_gguf(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Mostly numbers of the header are replaced, which move nothing; sometimes any bytes are."""
    if rng.random() < 0.3:
        return mutate(rng, data, others)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        width = rng.choice((1, 4, 8))
        at = rng.randrange(min(len(changed) - 8, rng.choice((64, 1 << 10, 1 << 15))))
        number = rng.choice((*_ODD_INTEGERS, rng.randrange(64))) & ((1 << 8 * width) - 1)
        changed[at : at + width] = struct.pack("<Q", number)[:width]
    return bytes(changed)
