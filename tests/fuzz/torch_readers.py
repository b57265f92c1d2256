"""Readers of PyTorch's file formats: state dicts of torch.save, metadata of distributed checkpoints."""

from __future__ import annotations

import io
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import numpy as np

from tilewise.checkpoint import open_distributed, open_state_dict


def read_torch_archive(folder: Path, data: bytes) -> None:
    """A whole file of torch.save."""
    (folder / "model.pt").write_bytes(data)
    for tensor in open_state_dict(folder / "model.pt").values():
        assert tensor.read().shape == tensor.shape


def read_torch_pickle(folder: Path, data: bytes) -> None:
    """The pickle of a torch.save file, next to matching storages."""
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", data)
        for number, size in enumerate(_STORAGE_BYTES):
            archive.writestr(f"model/data/{number}", bytes(size))
    for tensor in open_state_dict(folder / "model.pt").values():
        assert tensor.read().shape == tensor.shape


_STORAGE_BYTES = (24, 10, 8)


def _torch_state() -> dict[str, object]:
    import torch

    matrix = torch.zeros(2, 3)
    tensors = {"model.w": matrix, "t": matrix.T, "v": matrix[1:], "b": torch.zeros(5, dtype=torch.bfloat16)}
    return {**tensors, "p": torch.nn.Parameter(matrix), "step": torch.tensor(7)}


def torch_archives() -> list[bytes]:
    import torch

    archives = []
    for protocol in (2, 4):
        torch.save(_torch_state(), file := io.BytesIO(), pickle_protocol=protocol)
        archives.append(file.getvalue())
    return archives


def torch_pickles() -> list[bytes]:
    pickles = []
    for archive in torch_archives():
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            pickles += [file.read(name) for name in file.namelist() if name.endswith("data.pkl")]
    return pickles


def read_distributed_metadata(folder: Path, data: bytes) -> None:
    """`.metadata` of a distributed checkpoint, next to matching files."""
    if not (folder / "__0_0.distcp").exists():
        for name, content in _distributed().items():
            (folder / name).write_bytes(content)
    (folder / ".metadata").write_bytes(data)
    for tensor in open_distributed(folder).values():
        assert np.array(tensor).shape == tensor.shape


@cache
def _distributed() -> dict[str, bytes]:
    """The files of a distributed checkpoint by name."""
    from pure.checkpoint.chunks import write_chunks

    with tempfile.TemporaryDirectory() as folder:
        write_chunks(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def distributed_metadata() -> list[bytes]:
    return [_distributed()[".metadata"]]
