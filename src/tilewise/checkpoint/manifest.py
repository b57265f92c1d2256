"""The manifest of a training checkpoint, which is its file checkpoint.json. It is read and checked
before anything else of the checkpoint.

The manifest has the step, the configuration and the devices. For every tensor it has the dtype, the
shape and the parts. For every part it has the device whose file contains it, its place in the
tensor, and the SHA-256 of its bytes. `digest` covers all of this, so that an edited number is
detected. Parts that do not cover their tensor are rejected, with the tensor and the file in the
error. `checkpoint.training` reads the files.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator

from tilewise.checkpoint.boxes import Box, Misfit, misfit
from tilewise.checkpoint.header import MAX_DIMS, MAX_SIZE, dtype_of_name
from tilewise.core.dtypes import is_float
from tilewise.core.mesh import MAX_DEVICES
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable, parse_json, read_whole

__all__ = [
    "MANIFEST",
    "ConfigChange",
    "EvaluationRecord",
    "Manifest",
    "ModelRecord",
    "PartRecord",
    "TensorRecord",
    "device_file",
    "parse_manifest",
    "read_manifest",
]

MANIFEST = "checkpoint.json"
_VERSION = 4
_MAX_BYTES = 1 << 30  # of the file: a thousand devices with ten thousand tensors each fit

_Index = Annotated[int, Field(ge=0, lt=MAX_SIZE)]
_Indices = Annotated[list[_Index], Field(max_length=MAX_DIMS)]


def device_file(device: int) -> str:
    """The name of a device's file."""
    return f"device-{device:05d}.safetensors"


class PartRecord(BaseModel):
    """A part of a tensor. In its device's file it has the tensor's name.

    Attributes:
        device: number of the device whose file has the part.
        begin: index of the part's first element in the whole tensor, along each dim.
        shape: shape of the part.
        sha256: SHA-256 of the part's bytes.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    device: Annotated[int, Field(ge=0, lt=MAX_DEVICES)]
    begin: _Indices
    shape: _Indices
    sha256: str

    @property
    def box(self) -> Box:
        """The part's place in the whole tensor."""
        return Box(tuple(self.begin), tuple(self.shape))


class TensorRecord(BaseModel):
    """A tensor.

    Attributes:
        dtype: name of the dtype in safetensors.
        shape: shape of the whole tensor.
        parts: parts of the tensor; at most one per device.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: str
    shape: _Indices
    parts: Annotated[list[PartRecord], Field(min_length=1, max_length=MAX_DEVICES)]


class ConfigChange(BaseModel):
    """A setting that a resumed run changed.

    Attributes:
        step: number of optimizer steps done before the change.
        key: the setting, as `section.key`.
        old: value before the change.
        new: value after the change.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    step: Annotated[int, Field(ge=0)]
    key: str
    old: Any
    new: Any


class EvaluationRecord(BaseModel):
    """What the evaluations of a run say about its best model.

    Attributes:
        best_loss: lowest held-out loss, in nats per token.
        best_step: number of optimizer steps done at that evaluation.
        num_without_gain: evaluations since the last one that lowered the lowest loss by more than the
            threshold of early stopping.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    best_loss: FiniteFloat
    best_step: Annotated[int, Field(ge=0)]
    num_without_gain: Annotated[int, Field(ge=0)] = 0


class ModelRecord(BaseModel):
    """What a manifest says about the finished model: a model directory that can be made of the
    checkpoint's parameters and the files in its folder `model/`.

    Attributes:
        files: names of the files in `model/`, and the SHA-256 of each.
        dtypes: by parameter, the dtype of the directory's weights, as named in safetensors.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    files: dict[str, str]
    dtypes: dict[str, str]

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
                raise ValueError(f"names of files must lie in the checkpoint's model/; got {shown(name)}")
        return files

    @field_validator("dtypes")
    @classmethod
    def _can_be_stored(cls, dtypes: dict[str, str]) -> dict[str, str]:
        for dtype in dtypes.values():
            np_dtype = dtype_of_name(dtype)
            if np_dtype is None or not is_float(np_dtype):
                raise ValueError(
                    f"weights must have a floating-point type of safetensors; got {shown(dtype)}"
                )
        return dtypes


class Manifest(BaseModel):
    """The content of checkpoint.json.

    Attributes:
        version: version of the format.
        step: number of optimizer steps done.
        config: everything that must be equal when training resumes.
        devices: number of devices; each has a file.
        mesh: axes of the mesh, for people to read; training can resume on any other mesh.
        tensors: the tensors' records by name.
        model: the finished model; None if the checkpoint was saved without one.
        tokenizer: checksum of the tokenizer.json next to the manifest. Only checkpoints from before
            `model` existed have it.
        changes: changes of the configuration since the run began, in order. The file has this key
            only if there are changes, so that files of runs without changes equal those of earlier
            versions.
        evaluation: what the run needs for its best model and for early stopping. The file has this
            key only if the run uses one of the two.
        digest: SHA-256 of all other fields.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    version: int
    step: Annotated[int, Field(ge=0)]
    config: dict[str, Any]
    devices: Annotated[int, Field(ge=1, le=MAX_DEVICES)]
    mesh: dict[str, Annotated[int, Field(ge=1, le=MAX_DEVICES)]]
    tensors: dict[str, TensorRecord]
    model: ModelRecord | None = None
    tokenizer: str | None = None
    changes: list[ConfigChange] = []
    evaluation: EvaluationRecord | None = None
    digest: str = ""

    @field_validator("version", mode="before")
    @classmethod
    def _check_version(cls, version: object) -> object:
        if version != _VERSION or isinstance(version, bool):
            raise ValueError(
                f"a checkpoint must be of format {_VERSION}, which this version of Tilewise writes; got "
                f"{shown(version)}"
            )
        return version

    @staticmethod
    def of(
        step: int,
        config: Mapping[str, Any],
        mesh: Mapping[str, int],
        num_devices: int,
        tensors: Mapping[str, TensorRecord],
        model: ModelRecord | None,
        changes: Sequence[ConfigChange] = (),
        evaluation: EvaluationRecord | None = None,
    ) -> Manifest:
        """Make a manifest, with its digest.

        The arguments are the attributes of the same names; `num_devices` is the attribute
        `devices`.
        """
        return Manifest(
            version=_VERSION,
            step=step,
            config=dict(config),
            devices=num_devices,
            mesh=dict(mesh),
            tensors=dict(tensors),
            model=model,
            changes=list(changes),
            evaluation=evaluation,
        ).signed()

    def signed(self) -> Manifest:
        """The same manifest with its digest."""
        dumped = self._dump()
        del dumped["digest"]
        content = json.dumps(dumped, sort_keys=True, separators=(",", ":"))
        return self.model_copy(update={"digest": hashlib.sha256(content.encode("utf-8")).hexdigest()})

    def content(self) -> str:
        """The text of the file."""
        return json.dumps(self._dump()) + "\n"

    def _dump(self) -> dict[str, Any]:
        """The fields. `model`, `changes` and `evaluation` are left out if they are empty, as in older
        checkpoints.
        """
        absent = {name for name in ("model", "changes", "evaluation") if not getattr(self, name)}
        return self.model_dump(exclude=absent)

    def parts_by_device(self) -> dict[int, dict[str, PartRecord]]:
        """The content of each device's file, by the tensors' names."""
        by_device: dict[int, dict[str, PartRecord]] = defaultdict(dict)
        for name, tensor in self.tensors.items():
            for part in tensor.parts:
                by_device[part.device][name] = part
        return by_device

    def require_whole(self) -> None:
        """Check that each tensor's parts cover its shape.

        Raises:
            Unreadable: a tensor has missing parts, or parts that overlap, lie outside, or belong to
                no device. The message names the files.
        """
        misfits: dict[object, Misfit | None] = {}
        for name, tensor in self.tensors.items():
            devices = [part.device for part in tensor.parts]
            if max(devices) >= self.devices or len({*devices}) < len(devices):
                raise Unreadable(
                    f"the parts of tensor {shown(name)} must be of different devices among {self.devices}; got "
                    f"{shown(devices)}"
                )
            boxes = tuple(part.box for part in tensor.parts)
            key = tuple(tensor.shape), boxes  # many tensors have the same shape and boxes
            if key not in misfits:
                misfits[key] = misfit(tensor.shape, boxes)
            wrong = misfits[key]
            if wrong is not None:
                files = [device_file(devices[i]) for i in wrong.boxes] or [
                    device_file(d) for d in devices[:3]
                ]
                more = f" and {len(devices) - 3} more" if not wrong.boxes and len(devices) > 3 else ""
                raise Unreadable(
                    f"the parts of tensor {shown(name)} in {', '.join(files)}{more} must hold each element of "
                    f"{tensor.shape} once; got {wrong.words}"
                )


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check its digest and that its tensors are complete.

    Raises:
        Unreadable: the manifest is invalid, its digest is wrong, or a tensor's parts do not cover
            the tensor.
    """
    return parse_manifest(read_whole(directory / MANIFEST, _MAX_BYTES))


def parse_manifest(content: bytes) -> Manifest:
    """The manifest in a file's content. Raises the errors of `read_manifest`."""
    if len(content) > _MAX_BYTES:
        raise Unreadable(f"it is larger than {format_bytes(_MAX_BYTES)}")
    manifest = parse_json(content, Manifest)
    if manifest.signed().digest != manifest.digest:
        raise Unreadable("its digest is wrong: it was changed or is damaged")
    manifest.require_whole()
    return manifest
