"""Readers of GGUF files: header, metadata, tokenizer and weights. Part of the table in readers.py."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

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
from tilewise.core import ConfigError
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


def read_gguf_metadata(folder: Path, data: bytes) -> None:
    """The same for changed values of keys, listed as JSON, before the tensors of a valid file."""
    try:
        values = json.loads(data)
        content = _with_values(values, valid_gguf()[values["seed"]])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, struct.error, AttributeError):
        raise ConfigError("not the key-values of a file") from None
    read_gguf(folder, content)


def valid_gguf_metadata() -> list[bytes]:
    """The key-values of the valid files."""
    with tempfile.TemporaryDirectory() as folder:
        path, texts = Path(folder) / "m.gguf", []
        for seed, content in enumerate(valid_gguf()):
            path.write_bytes(content)
            values = gguf_model(path).files.values
            plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
            texts.append(json.dumps({**plain, "seed": seed}).encode())
    return texts


def _with_values(values: dict[str, Any], content: bytes) -> bytes:
    """A valid file with other key-values."""
    count, _ = struct.unpack_from("<QQ", content, 8)
    tensors = gguf_tensors(content)
    head = b"GGUF" + struct.pack("<IQQ", 3, count, len(values))
    head += b"".join(_text(key) + _value(value) for key, value in values.items())
    infos, data = b"", b""
    for name, dims, kind, tensor in tensors:
        infos += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += tensor + bytes(-len(tensor) % 32)
    return head + infos + bytes(-len(head + infos) % 32) + data


@cache
def gguf_tensors(content: bytes) -> list[tuple[str, list[int], int, bytes]]:
    """Name, dims, type and bytes of the tensors of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(content)
        tensors = gguf.GGUFReader(path).tensors
        return [(t.name, t.shape.tolist(), int(t.tensor_type), t.data.tobytes()) for t in tensors]


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return (
            struct.pack("<Iq", 11, value) if value < 0 or value >= 1 << 32 else struct.pack("<II", 4, value)
        )
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    entries = [_value(entry) for entry in value]
    kind = entries[-1][:4] if entries else struct.pack("<I", 4)
    alike = [entry[4:] for entry in entries if entry[:4] == kind]  # an array has entries of one type
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(alike)) + b"".join(alike)


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
