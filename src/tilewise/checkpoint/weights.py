"""`open_weights`: weights in files, opened lazily.

Opening reads only headers, and the few vectors of GGUF files that their converter changed.
`weights[name][a:b]` reads only these rows. bf16 tensors are `ml_dtypes.bfloat16`. `open_weights`
opens a Hugging Face directory or a single file, also a file of `torch.save`. Of a directory with
quantised weights it gives each weight as one `QuantisedTensor` (`checkpoint.quantised_files`). Its
result can be passed to `GraphInstance.load_parameters`. Rejected are files that break a rule of their
format (`checkpoint.header`, `checkpoint.gguf.header`), indexes that refer to files outside of the
directory, and directories of pickled weights. `checkpoint.shards` writes safetensors files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tilewise.checkpoint.gguf import gguf_model
from tilewise.checkpoint.quantised_files import quantisation_of_directory
from tilewise.checkpoint.stored import Stored
from tilewise.checkpoint.tensors import FileTensor, WeightsFile
from tilewise.checkpoint.torch_files import is_torch_file, open_state_dict
from tilewise.core import CheckpointError
from tilewise.core.validation import Validator, shown
from tilewise.files.reading import Unreadable, read_json

__all__ = ["AUTOGPTQ", "INDEX", "SINGLE", "files_of_index", "open_weights"]

_validate = Validator("checkpoint", CheckpointError)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AUTOGPTQ = "gptq_model-*.safetensors"
"""The name that AutoGPTQ gave the file of weights, with bits and group size."""
_PICKLED = re.compile(r".*\.(bin|pt|pth|pkl|ckpt)")


class _Index(BaseModel):
    """The used fields of `model.safetensors.index.json`. Its other content (a total size) is not
    used.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    weight_map: dict[str, str]


def open_weights(path: str | Path) -> Mapping[str, Stored]:
    """The tensors of a safetensors file, of a Hugging Face directory with one or several such
    files, of a file with a state dict that `torch.save` wrote, or of a model in GGUF files under the
    names of its family's Hugging Face files.

    Returns:
        A mapping from names to objects that NumPy accepts as arrays. Values are read when they are
        used. A quantised layer of a directory is one tensor, with the name of its weight.

    Raises:
        CheckpointError: there is no such file, a header is invalid, an index names missing tensors,
            tensors of a quantised layer contradict each other, or there are only pickled weights.
        ConfigError: a directory has several models in GGUF files, or config.json names a quantisation
            with settings that are not supported.
    """
    path = _validate.path("open_weights", "weights", path)
    if (model := gguf_model(path)) is not None:
        return model.weights()
    if not os.path.isdir(path):
        return open_state_dict(path) if is_torch_file(path) else WeightsFile(path)
    quantisation, files = quantisation_of_directory(path), _open_directory(path)
    return files if quantisation is None else quantisation.weights(files)


def _open_directory(path: Path) -> Mapping[str, FileTensor]:
    """The tensors of a directory's files, as they are."""
    if os.path.lexists(path / INDEX):
        return _open_indexed(path)
    if not os.path.lexists(path / SINGLE):
        names = sorted(entry.name for entry in path.glob(AUTOGPTQ))
        if len(names) == 1:
            return WeightsFile(path / names[0])
        _refuse_pickled(path)
    return WeightsFile(path / SINGLE)


def _refuse_pickled(directory: Path) -> None:
    """Reject a directory whose weights are pickled.

    Raises:
        CheckpointError: there are pickled weights.
    """
    names: list[str] = []
    with suppress(OSError):
        names = sorted(name for name in os.listdir(directory) if _PICKLED.fullmatch(name))
    if names:
        raise CheckpointError(
            f"[checkpoint.open_weights] weights of a model directory must be safetensors; got {names[0]!r} and no "
            f"{SINGLE} in {str(directory)!r}; download a revision that has safetensors, or convert them with `tilewise "
            "checkpoint convert`, which reads tensors and runs nothing"
        )


def _open_indexed(directory: Path) -> Mapping[str, FileTensor]:
    """The tensors of the files that an index names. Each tensor is taken from the file that the
    index says.
    """
    weight_map = _read_index(directory)
    names = sorted(set(weight_map.values()))
    if SINGLE not in names and os.path.lexists(directory / SINGLE):
        raise _index_error(directory, f"{SINGLE} exists too but is not one of its files")
    opened = {name: WeightsFile(directory / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in opened[name]:
            raise _index_error(
                directory, f"it lists {shown(tensor)} in {shown(name)}, which does not have it"
            )
    for name in names:
        for tensor in opened[name]:
            if weight_map.get(tensor) != name:
                raise _index_error(directory, f"it does not list {shown(tensor)}, which {shown(name)} has")
    return {tensor: opened[name][tensor] for tensor, name in weight_map.items()}


def _read_index(directory: Path) -> Mapping[str, str]:
    """The name of each tensor's file. The files are next to the index."""
    try:
        weight_map = read_json(directory / INDEX, _Index).weight_map
    except Unreadable as error:
        raise _index_error(directory, str(error)) from None
    for name in sorted(set(weight_map.values())):
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise _index_error(directory, f"{shown(name)} is not the name of a file next to it")
    return weight_map


def files_of_index(directory: Path) -> frozenset[str]:
    """Names of the files with weights that a directory's index lists.

    Raises:
        CheckpointError: the index is invalid. The message says what is wrong.
    """
    return frozenset(_read_index(directory).values())


def _index_error(directory: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"[checkpoint.open_weights] {INDEX} must map every tensor to its file; got {str(directory)!r}: {reason}; "
        "download it again"
    )
