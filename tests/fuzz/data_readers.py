"""Readers of training data: records of structured files, and the examples that they become.

Part of the table in readers.py. Templates are rendered in this process, which is faster; the reader
of chat templates has the process.
"""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from support.chat_model import MARKED, PLAIN, conversation, write_chat_model
from tilewise.checkpoint import load_tokenizer
from tilewise.data import IGNORED, load_corpus
from tilewise.generate import ChatTemplate, template_child
from tilewise.train.data_sections import DataSection
from tilewise.train.sources import Encoder, prepare_source

VOCABULARY, END = 300, 0


class _Inside:
    """Renders as a template process does."""

    def render_all(self, template: str, conversations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [template_child.problem_of(template, variables) for variables in conversations]


@cache
def _encoders() -> list[Encoder]:
    """A model with a template that marks answers, and one with a template that does not."""
    encoders = []
    for template in (MARKED, PLAIN):
        folder = write_chat_model(Path(tempfile.mkdtemp()), template)
        chat = ChatTemplate(folder)
        chat._processes = _Inside()  # type: ignore[assignment]
        tokenizer = load_tokenizer(folder, VOCABULARY)
        encoders.append(Encoder(tokenizer, END, VOCABULARY, lambda chat=chat: chat))  # type: ignore[misc]
    return encoders


def _read(kind: str, folder: Path, data: bytes) -> None:
    """Every example fits, has ids of the model, and a counted label; labels are ids or not counted."""
    (folder / "a.json").write_bytes(data)
    for encoder in _encoders():
        for documents in ("packed", "padded"):
            table = {"type": kind, "path": str(folder / "a.json"), "held_out_percent": 30.0}
            section = DataSection.model_validate({**table, "context": 32, "documents": documents})
            prepared = prepare_source(
                section.sources[0], section, None, encoder, lambda done, total: None, evaluates=True
            )
            for sequences in (prepared.train, prepared.held_out):
                for index in range(0 if sequences is None else len(sequences)):
                    tokens, labels = sequences.row(index)
                    assert len(tokens) == len(labels) <= 32 and (labels != IGNORED).any()
                    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
                    assert ((labels == IGNORED) | ((labels >= 0) & (labels < VOCABULARY))).all()


def read_conversations(folder: Path, data: bytes) -> None:
    """Messages of a chat."""
    _read("chat", folder, data)


def read_pairs(folder: Path, data: bytes) -> None:
    """Prompts and completions."""
    _read("prompt_completion", folder, data)


def read_ids(folder: Path, data: bytes) -> None:
    """Pre-tokenized data."""
    _read("pretokenized", folder, data)


def valid_conversations() -> list[bytes]:
    tools = [{"type": "function", "function": {"name": "f"}}]
    records = [{"messages": conversation(number)} for number in range(7)]
    return [_json([*records, {"messages": conversation(1), "tools": tools}]), _json(records[:1])]


def valid_pairs() -> list[bytes]:
    texts = [{"prompt": f"one {n}", "completion": " two ä€😀"} for n in range(5)]
    talks = [{"prompt": (talk := conversation(n))[:-1], "completion": talk[-1:]} for n in range(5)]
    return [_json(texts), _json(talks)]


def valid_ids() -> list[bytes]:
    ids = [{"input_ids": [*range(n + 2)]} for n in range(40)]
    return [_json(ids), _json([{**row, "labels": [IGNORED, *row["input_ids"][1:]]} for row in ids])]


def read_lines(folder: Path, data: bytes) -> None:
    """JSON lines, plain and compressed, have the same texts."""
    (folder / "a.jsonl").write_bytes(data)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(data, 0))
    (folder / "c.jsonl.gz").write_bytes(data)
    corpus = load_corpus(folder / "a.jsonl", 0.0)
    assert [f.text for f in load_corpus(folder / "b.jsonl.gz", 0.0).train] == [f.text for f in corpus.train]
    assert all(file.text.encode() for file in corpus.train)


def read_archive(folder: Path, data: bytes) -> None:
    """A compressed file."""
    (folder / "a.jsonl.gz").write_bytes(data)
    assert load_corpus(folder / "a.jsonl.gz", 0.0).train


def read_parquet(folder: Path, data: bytes) -> None:
    """A table with a column of texts."""
    (folder / "a.parquet").write_bytes(data)
    assert all(file.text.strip() for file in load_corpus(folder / "a.parquet", 0.0).train)


def _lines() -> bytes:
    return b"".join(_json({"text": f"text {n} ä€😀", "id": n, "more": [{}, None]}) + b"\n" for n in range(9))


def valid_lines() -> list[bytes]:
    return [_lines(), _lines().replace(b"\n", b"\r\n\r\n")]


def valid_archives() -> list[bytes]:
    return [gzip.compress(_lines(), mtime=0), gzip.compress(_lines(), 0, mtime=0)]


def valid_tables() -> list[bytes]:
    import pyarrow
    from pyarrow import parquet

    tables = []
    for compression in ("none", "snappy"):
        rows = {"text": [f"text {n}" for n in range(50)], "id": np.arange(50)}
        parquet.write_table(pyarrow.table(rows), buffer := io.BytesIO(), compression=compression)
        tables.append(buffer.getvalue())
    return tables


def _json(content: object) -> bytes:
    return json.dumps(content).encode()
