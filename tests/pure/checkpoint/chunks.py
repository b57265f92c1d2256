"""A distributed checkpoint of one tensor in chunks, as several PyTorch processes write it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

GENERATOR = torch.Generator().manual_seed(0)
WHOLE = torch.randn(7, 10, generator=GENERATOR)
BOXES = [((0, 0), (4, 6)), ((0, 6), (4, 4)), ((4, 0), (3, 10))]


def write_chunks(
    root: Path, boxes: Sequence[Any] = BOXES, size: tuple[int, ...] = (7, 10), **more: Any
) -> Metadata:
    """Each box of `model.w` in its own file; returns the content of `.metadata`."""
    root.mkdir(exist_ok=True)
    chunks, places = [], {}
    for number, (offsets, sizes) in enumerate(boxes):
        blob = io.BytesIO()
        piece = WHOLE[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))].clone()
        torch.save(piece, blob)
        name = f"__{number}_0.distcp"
        (root / name).write_bytes(b"before" + blob.getvalue() + b"after")
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        index = MetadataIndex("model.w", torch.Size(offsets), number)
        places[index] = _StorageInfo(name, len(b"before"), len(blob.getvalue()))
    properties = TensorProperties(dtype=torch.float32)
    tensors = {"model.w": TensorStorageMetadata(properties, torch.Size(size), chunks), **more}
    metadata = Metadata(tensors, None, places)
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    return metadata
