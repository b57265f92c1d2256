"""The files of a training checkpoint, one per device: writes, opens and reads them concurrently.

A device's file has the format safetensors. It contains the device's parts of tensors, each under
the name of its whole tensor. The manifest (`checkpoint.manifest`) says where each part lies in its
tensor. Parts are hashed and written one at a time, so whole tensors are never assembled. Opening
compares a file's header with the manifest. `damages` checks every byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tilewise.checkpoint.concurrent_files import run_concurrently
from tilewise.checkpoint.header import dtype_name
from tilewise.checkpoint.manifest import Manifest, PartRecord, TensorRecord, device_file
from tilewise.checkpoint.shards import save_tensors
from tilewise.checkpoint.tensors import (
    FileTensor,
    LazyTensor,
    PartedTensor,
    TensorPart,
    WeightsFile,
    read_array,
)
from tilewise.core import CheckpointError
from tilewise.core.validation import shown
from tilewise.files.reading import Forbidden, Unreadable
from tilewise.files.writing import sync_file

__all__ = ["DeviceFile", "assemble", "damages", "describe", "open_device_files", "write_device_files"]

_CHUNK_BYTES = 4 << 20
Count = Callable[[int], object]


@dataclass(frozen=True)
class DeviceFile:
    """A device's file, whose header matches the manifest.

    Attributes:
        name: name of the file in the checkpoint.
        parts: the parts in the file, by the names of their tensors.
        records: the manifest's records of these parts.
    """

    name: str
    parts: Mapping[str, FileTensor]
    records: Mapping[str, PartRecord]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts in the file."""
        return sum(part.nbytes for part in self.parts.values())


def _by_device(tensors: Mapping[str, PartedTensor], num_devices: int) -> list[dict[str, TensorPart]]:
    """The parts of each device, by the tensors' names."""
    by_device: list[dict[str, TensorPart]] = [{} for _ in range(num_devices)]
    for name, tensor in tensors.items():
        for part in tensor.parts:
            by_device[part.device][name] = part
    return by_device


def describe(
    tensors: Mapping[str, PartedTensor], num_devices: int, count: Count
) -> Mapping[str, TensorRecord]:
    """Make the manifest's records of tensors. This reads every byte.

    Args:
        tensors: the tensors by name.
        num_devices: number of devices.
        count: called with the number of additional bytes read; an exception of it ends the work.
    """
    checksums: dict[tuple[str, int], str] = {}

    def hash_parts(device: int, parts: Mapping[str, TensorPart]) -> None:
        for name, part in parts.items():
            count(part.values.nbytes)
            array = np.ascontiguousarray(part.values)
            checksums[name, device] = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()

    run_concurrently([partial(hash_parts, *one) for one in enumerate(_by_device(tensors, num_devices))])
    return {
        name: TensorRecord(
            dtype=dtype_name(tensor.dtype),
            shape=[int(s) for s in tensor.shape],
            parts=[
                PartRecord(
                    device=int(part.device),
                    begin=[int(b) for b in part.box.begin],
                    shape=[int(s) for s in part.box.sizes],
                    sha256=checksums[name, part.device],
                )
                for part in tensor.parts
            ],
        )
        for name, tensor in tensors.items()
    }


def write_device_files(
    directory: Path, tensors: Mapping[str, PartedTensor], num_devices: int, count: Count
) -> None:
    """Write each device's file and flush it to the disk, several at a time.

    Args:
        directory: an existing directory.
        tensors: the tensors by name.
        num_devices: number of devices. A device without parts has a file without tensors.
        count: called with the number of additional bytes written. If it raises, the work ends.

    Raises:
        OSError: a file cannot be written.
    """

    def counted(part: TensorPart) -> LazyTensor:
        def fetch() -> np.ndarray:
            count(part.values.nbytes)
            return read_array(part.values)

        return LazyTensor(part.box.sizes, part.values.dtype, fetch)

    def write(device: int, parts: Mapping[str, TensorPart]) -> None:
        path = directory / device_file(device)
        save_tensors(path, {name: counted(part) for name, part in parts.items()})
        sync_file(path)

    run_concurrently([partial(write, *one) for one in enumerate(_by_device(tensors, num_devices))])


def open_device_files(directory: Path, manifest: Manifest) -> tuple[DeviceFile, ...]:
    """Open the files of a checkpoint, in order of devices. Only their headers are read.

    Raises:
        Unreadable: files are missing, are not complete safetensors, or have other parts than the
            manifest says. The message names the files.
        Forbidden: this process may not read a file, so the file cannot be checked. The message
            names the file.
    """
    all_records = manifest.parts_by_device()
    files: list[DeviceFile] = []
    wrong: list[str] = []
    for device in range(manifest.devices):
        name, records = device_file(device), all_records.get(device, {})
        try:
            file = WeightsFile(directory / name)
        except CheckpointError as error:
            if isinstance(error.__cause__, Forbidden):
                raise Forbidden(f"{name}: {error.__cause__}") from None
            wrong.append(f"{name}: {error}")
            continue
        odd = _first_odd(file, records, manifest)
        if odd is not None:
            wrong.append(f"{name} differs from the manifest: {odd}")
            continue
        files.append(DeviceFile(name, {tensor: file[tensor] for tensor in records}, records))
    if wrong:
        raise Unreadable(_joined(wrong))
    return tuple(files)


def _first_odd(file: WeightsFile, records: Mapping[str, PartRecord], manifest: Manifest) -> str | None:
    """The first difference between a file and the manifest; None if they agree."""
    for name in {**records, **file.entries}:
        entry = file.entries.get(name)
        if entry is None:
            return f"tensor {shown(name)} is missing"
        if name not in records:
            return f"tensor {shown(name)} is not in the manifest"
        expected = manifest.tensors[name].dtype, records[name].shape
        got = dtype_name(entry.dtype), list(entry.shape)
        if got != expected:
            return f"tensor {shown(name)} is {got[0]} {got[1]} instead of {expected[0]} {expected[1]}"
    return None


def assemble(files: Sequence[DeviceFile], manifest: Manifest) -> dict[str, FileTensor | PartedTensor]:
    """The whole tensors by name, in the manifest's order. A tensor is read when it is used.

    Args:
        files: the files of all devices, in order.
        manifest: the manifest of the same checkpoint. Its parts must cover their tensors.
    """
    tensors: dict[str, FileTensor | PartedTensor] = {}
    for name, tensor in manifest.tensors.items():
        parts = tuple(
            TensorPart(record.box, files[record.device].parts[name], record.device) for record in tensor.parts
        )
        first = files[tensor.parts[0].device].parts[name]
        tensors[name] = first if len(parts) == 1 else PartedTensor(tuple(tensor.shape), first.dtype, parts)
    return tensors


def damages(files: Sequence[DeviceFile], count: Count) -> str | None:
    """Describe damage in the bytes of files: for each damaged file, its first wrong tensor. None if
    no file is damaged.

    Args:
        files: the files. Every byte is read, several files at a time.
        count: called with the number of additional bytes read. If it raises, the work ends.
    """
    wrong: dict[str, str] = {}

    def look(file: DeviceFile) -> None:
        for name, part in file.parts.items():
            place = f"tensor {shown(name)} in {file.name}"
            try:
                checksum = _checksum(part)
            except CheckpointError as error:
                wrong[file.name] = f"{place}: {error}"
                return
            if checksum != file.records[name].sha256:
                wrong[file.name] = f"{place} has a wrong checksum"
                return
            count(part.nbytes)

    run_concurrently([partial(look, file) for file in files])
    return _joined([wrong[file.name] for file in files if file.name in wrong]) if wrong else None


def _checksum(part: FileTensor) -> str:
    """The checksum of a tensor that is contiguous in its file."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(part.nbytes, _CHUNK_BYTES)))
    for first in range(0, part.nbytes, _CHUNK_BYTES):
        chunk = buffer[: min(_CHUNK_BYTES, part.nbytes - first)]
        part.file.read_into(chunk, part.begin + first)
        digest.update(chunk)
    return digest.hexdigest()


def _joined(texts: Sequence[str]) -> str:
    """The first few of some strings."""
    more = f"; and {len(texts) - 3} more files" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
