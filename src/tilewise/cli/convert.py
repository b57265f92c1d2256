"""`tilewise checkpoint convert`: converts weights to a Hugging Face directory, or a safetensors or
GGUF file.

It combines readers (training checkpoints, state dicts of `torch.save`, distributed checkpoints,
GGUF files) with the writer of model directories. Everything is checked before anything is written. During
writing, one tensor at a time is in memory. An existing target is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.core import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tilewise.checkpoint import FinishedModel, OpenCheckpoint, Tensor
    from tilewise.models import ModelConfig

__all__ = ["convert_checkpoint", "find_checkpoints", "merge_adapter"]

_SAFETENSORS, _GGUF = ".safetensors", ".gguf"
_MOST_TOKENS = (1 << 31) - 1


@dataclass(frozen=True)
class _Source:
    """The source of a conversion.

    Attributes:
        tensors: tensors by their names in a model's files, perhaps with prefixes of PyTorch's
            wrappers.
        files: if the source is a training checkpoint, all files of its model directory except
            weights.
        model_dir: directory of config.json, tokenizer and related files, if the source is a model
            directory; or the GGUF file, whose metadata has them.
    """

    tensors: Mapping[str, Tensor]
    files: Mapping[str, bytes] | None = None
    model_dir: Path | None = None


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoints at a path: the path itself, or those in a directory or in a run's output,
    oldest first.

    Raises:
        CheckpointError: there is no checkpoint.
        ResourceError: a directory cannot be listed.
    """
    from tilewise.checkpoint import checkpoint_paths

    is_named_so = path.name.startswith("step-")  # do not list unrelated parent directories
    if os.path.lexists(path / "checkpoint.json") or (is_named_so and path in checkpoint_paths(path.parent)):
        return [path]
    paths = checkpoint_paths(path) or checkpoint_paths(path / "checkpoints")
    if not paths:
        raise CheckpointError(
            f"[cli.checkpoint] there must be a training checkpoint step-N; got none in {str(path)!r}; give a "
            "checkpoint, or a run's output directory"
        )
    return paths


def convert_checkpoint(
    source: Path,
    target: Path,
    model_dir: Path | None,
    part: str | None,
    console: Console,
    ignore: Sequence[str] = (),
    kind: str | None = None,
) -> None:
    """Write the content of `source` as `target`.

    Args:
        source: a training checkpoint or a run, a file of `torch.save` or safetensors, a distributed
            checkpoint, a model directory with pytorch_model.bin, or a GGUF file. Quantised tensors
            of GGUF files are dequantised and rounded to bf16; all others of such a file get its
            dtype (bf16 if a tensor is quantised).
        target: a Hugging Face directory, or a file if its name ends in `.safetensors` or `.gguf`.
        model_dir: a model directory. Those of its config.json, tokenizer, chat templates and
            generation_config.json are used that the source does not have.
        part: key of the state dict, if the source contains more than a state dict.
        console: shows progress and messages.
        ignore: fields of config.json to ignore.
        kind: type of the matrices in a GGUF file: `bf16`, `q8_0` or `q4_0`; None for other targets, or bf16.

    Raises:
        ConfigError: the target exists or lies among the checkpoints of its source, there is no
            config.json for a directory, or an option does not apply to this source or target.
        CheckpointError: the source is damaged, or differs from its configuration.
        ResourceError: the target cannot be written. No part of it remains.
    """
    from tilewise.checkpoint import check_writable
    from tilewise.train.progress import track_work

    if os.path.lexists(target):
        raise ConfigError(
            f"[cli.convert] the target must not exist; got {str(target)!r}; choose another name, or move it away"
        )
    check_writable(target.parent)
    if target.name.endswith(_GGUF):
        _write_gguf(source, target, model_dir or part, kind or "bf16", console, ignore)
        return
    if kind is not None:
        raise ConfigError(
            f"[cli.convert] --type is the type of matrices in a GGUF file; got {kind} for {str(target)!r}; remove it, "
            "or end the target's name in .gguf"
        )
    is_file = target.name.endswith(_SAFETENSORS)
    if model_dir is not None and (is_file or not model_dir.is_dir()):
        raise ConfigError(
            "[cli.convert] --model must be a model directory, and the target must be a directory; got "
            f"{str(model_dir)!r} for {str(target)!r}; {'remove --model' if is_file else 'name an existing directory'}"
        )
    with track_work(console, "checking") as progress:
        opened = _open(source, target, part, model_dir, progress.show)
    with track_work(console, "writing") as progress:
        if is_file:
            _write_file(target, opened, progress.show)
        else:
            _write_directory(target, opened, model_dir, console, progress.show, ignore)


def merge_adapter(
    base: Path, adapter: Path, target: Path, console: Console, ignore: Sequence[str] = ()
) -> None:
    """Write a model with an adapter added to its weights.

    Args:
        base: a model directory, or a GGUF file.
        adapter: a PEFT directory of an adapter of the model.
        target: the Hugging Face directory to write.
        console: shows progress.
        ignore: fields of config.json to ignore.

    Raises:
        ConfigError: the target exists, or the adapter has an unsupported setting or belongs to another model.
        CheckpointError: a file is damaged.
        ResourceError: the target cannot be written. No part of it remains.
    """
    from tilewise import models
    from tilewise.checkpoint import check_writable, model_files, save_model_directory
    from tilewise.train.progress import track_work

    if os.path.lexists(target):
        raise ConfigError(
            f"[cli.merge] the target must not exist; got {str(target)!r}; choose another name, or move it away"
        )
    check_writable(target.parent)
    config = models.open(base, ignore=ignore)
    loaded = models.load_adapter(adapter, config)
    merged = models.merged_weights(models.open_weights(base, config), loaded)
    tensors = dict(models.stored_tensors(config, merged))
    with track_work(console, "writing") as progress:
        save_model_directory(target, model_files(copy_from=base), _counted(tensors.items(), progress.show))


def _open(
    source: Path, target: Path, part: str | None, model_dir: Path | None, show: Callable[[int, int], object]
) -> _Source:
    from tilewise.checkpoint import (
        gguf_model,
        is_distributed,
        open_distributed,
        open_state_dict,
        open_weights,
    )
    from tilewise.checkpoint.torch_files import has_torch_weights, is_torch_file, open_torch_directory

    if (model := gguf_model(source)) is not None:
        _require_no_part(source, part)
        return _Source(_in_one_dtype(model.weights(), model.config()["torch_dtype"]), model_dir=source)
    if not source.is_dir():
        if is_torch_file(source):
            return _Source(open_state_dict(source, part))
        _require_no_part(source, part)
        return _Source(open_weights(source))
    if is_distributed(source):
        return _Source(open_distributed(source, part))
    _require_no_part(source, part)
    if has_torch_weights(source):
        return _Source(open_torch_directory(source), model_dir=source)
    try:
        newest = find_checkpoints(source)[-1]
    except CheckpointError:
        raise CheckpointError(
            "[cli.convert] a source directory must be a training checkpoint, a run's output, a distributed "
            f"checkpoint of PyTorch, or have pytorch_model.bin or a GGUF file; got {str(source)!r}, which is not; if "
            "its weights are safetensors, name their file"
        ) from None
    _refuse_place_of_checkpoints(newest, target)
    return _open_training(newest, model_dir, show)


def _write_gguf(
    source: Path, target: Path, unused: object, kind: str, console: Console, ignore: Sequence[str]
) -> None:
    """Write a model directory as a GGUF file.

    Raises:
        ConfigError, CheckpointError: the source is not a model directory, or llama.cpp has no such
            model or tokenizer.
    """
    from tilewise import models
    from tilewise.checkpoint import load_generation_config
    from tilewise.checkpoint.gguf_vocabulary import vocabulary_values
    from tilewise.checkpoint.gguf_writer import write_gguf
    from tilewise.models.gguf import gguf_tensors, gguf_values
    from tilewise.train.progress import track_work

    if unused is not None or not os.path.lexists(source / "config.json"):
        raise ConfigError(
            "[cli.convert] a GGUF file is made from a model directory, without --model and --part; got "
            f"{str(source)!r}; convert it to a model directory first"
        )
    config = models.open(source, ignore=ignore)
    values = gguf_values(config, kind)
    weights = models.open_weights(source, config)
    stored = dict(models.stored_tensors(config, weights))
    tensors = list(gguf_tensors(config, stored, kind))
    own = load_generation_config(source, config.vocab_size).get("eos_token_id", config.eos_token_ids)
    ends = [own] if isinstance(own, int) else list(own or ())
    name = {"general.name": Path(os.path.abspath(source)).name}
    vocabulary = vocabulary_values(source, config.vocab_size, config.bos_token_id, ends)
    with track_work(console, "writing") as progress:
        write_gguf(target, {**values, **name, **vocabulary}, tensors, progress.show)


def _in_one_dtype(tensors: Mapping[str, Tensor], dtype: str) -> Mapping[str, Tensor]:
    """Tensors in the dtype that config.json names: files list norms as f32."""
    from tilewise.checkpoint import cast_tensors

    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    return cast_tensors(tensors, dict.fromkeys(tensors, names[dtype]))


def _refuse_place_of_checkpoints(checkpoint: Path, target: Path) -> None:
    """Reject a target among a run's checkpoints, because the run would treat the target as a
    checkpoint and remove it. If a checkpoint was copied elsewhere, a target next to it may have any
    name that is not the name of a checkpoint.
    """
    from tilewise.checkpoint.training import STEP_NAME

    folder, place = (Path(os.path.realpath(path)) for path in (checkpoint.parent, target))
    if folder not in place.parents:
        return
    first = place.relative_to(folder).parts[0]
    if folder.name == "checkpoints" or STEP_NAME.fullmatch(first):
        raise ConfigError(
            "[cli.convert] the target must not lie among the source's checkpoints; got "
            f"{str(target)!r} in {str(folder)!r}; choose another directory"
        )


def _require_no_part(source: Path, part: str | None) -> None:
    if part is not None:
        raise ConfigError(
            "[cli.convert] --part names a state dict in a file of torch.save or in a distributed checkpoint; got "
            f"{part!r} for {str(source)!r}, which has only weights; remove --part"
        )


def _open_training(path: Path, model_dir: Path | None, show: Callable[[int, int], object]) -> _Source:
    """Open a training checkpoint and check every byte. Its parameters get the names of the model
    family's files and the dtypes of the run's finished model. Frozen parameters are those of
    `model_dir`. Of a run with adapters, only these are converted.
    """
    from tilewise import models
    from tilewise.checkpoint import cast_tensors, load_tokenizer, model_files, open_checkpoint
    from tilewise.checkpoint.adapters import ADAPTER_CONFIG

    opened = open_checkpoint(path)
    opened.verify(show)
    settings = opened.config.get("model")
    config = models.config_from_dict(settings if isinstance(settings, dict) else {})
    finished = opened.read_model()
    if finished is not None and ADAPTER_CONFIG in finished.files:
        return _adapter_of(opened, config, finished)
    names = [name for name, _ in models.parameter_shapes(config)]
    missing = [name for name in names if name not in opened.tensors]
    base: Mapping[str, Any] = {}
    if missing and "frozen" in opened.config:
        base = _frozen_of(opened.config["frozen"], missing, config, model_dir, path)
    elif missing:
        raise CheckpointError(
            f"[cli.convert] a checkpoint must have its model's parameters; got no {missing[0]!r} in "
            f"{str(path)!r}; convert one that `tilewise train` wrote"
        )
    parameters: Mapping[str, Tensor] = {
        name: opened.tensors[name] if name in opened.tensors else base[name] for name in names
    }
    if finished is not None:
        files, parameters = finished.files, cast_tensors(parameters, finished.dtypes)
    else:  # saved by an earlier version
        content = {**config.to_dict(), "torch_dtype": "float32"}
        tokenizer = None if opened.tokenizer is None else load_tokenizer(path, config.vocab_size)
        files = model_files(content, tokenizer, _tokens(content))
    return _Source(dict(models.stored_tensors(config, parameters)), files)


def _adapter_of(opened: OpenCheckpoint, config: ModelConfig, finished: FinishedModel) -> _Source:
    """The adapter of a training checkpoint, under the names of PEFT's files."""
    from tilewise import models
    from tilewise.checkpoint import cast_tensors
    from tilewise.checkpoint.adapters import LoraConfig

    settings = dict(opened.config.get("lora") or {})
    layout = models.lora_layout(config, LoraConfig(**settings))
    missing = next((name for name in layout.shapes if name not in opened.tensors), None)
    if missing is not None:
        raise CheckpointError(
            f"[cli.convert] a checkpoint must have its adapter's parameters; got no {missing!r} in "
            f"{str(opened.path)!r}; convert one that `tilewise train` wrote"
        )
    own = {name: opened.tensors[name] for name in layout.shapes}
    return _Source(dict(layout.stored(cast_tensors(own, finished.dtypes))), finished.files)


def _frozen_of(
    digest: object, names: list[str], config: ModelConfig, model_dir: Path | None, path: Path
) -> Mapping[str, Tensor]:
    """The frozen parameters of a training checkpoint, from the model that the run started from."""
    from tilewise import models
    from tilewise.train import frozen_digest

    if model_dir is None:
        raise ConfigError(
            f"[cli.convert] a checkpoint with frozen parameters has only the others; got no --model for {str(path)!r}; "
            "give the model directory that training started from"
        )
    weights = models.open_weights(model_dir, config)
    if frozen_digest(weights, names) != digest:
        raise CheckpointError(
            f"[cli.convert] --model must be the model that training started from; got {str(model_dir)!r}, whose frozen "
            "weights differ; give the same model"
        )
    return weights


def _write_file(target: Path, source: _Source, show: Callable[[int, int], object]) -> None:
    from tilewise.checkpoint.shards import save_tensors
    from tilewise.files.writing import replace_file
    from tilewise.models.layout import without_wrappers

    tensors = dict(_counted(without_wrappers(source.tensors).items(), show))
    replace_file(target, lambda path: save_tensors(path, tensors, {"format": "pt"}))


def _write_directory(
    target: Path,
    source: _Source,
    model_dir: Path | None,
    console: Console,
    show: Callable[[int, int], object],
    ignore: Sequence[str],
) -> None:
    from tilewise.checkpoint import save_model_directory
    from tilewise.checkpoint.adapters import ADAPTER_CONFIG, save_adapter

    model_dir = source.model_dir if model_dir is None else model_dir
    if source.files is not None:
        files, tensors = _with_files_of(source.files, model_dir), source.tensors
        if ADAPTER_CONFIG in files:
            save_adapter(target, source.files, _counted(tensors.items(), show))
            return
    elif model_dir is not None:
        files, tensors = _as_model(source.tensors, model_dir, ignore)
    else:
        raise ConfigError(
            "[cli.convert] a model directory needs a config.json, which this source does not have; got no --model; "
            "give a directory of the same model, or a target that ends in .safetensors"
        )
    if not any(name in files for name in ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")):
        console.print("no tokenizer is written: neither the source nor --model has one", highlight=False)
    save_model_directory(target, files, _counted(tensors.items(), show))


def _as_model(
    tensors: Mapping[str, Tensor], model_dir: Path, ignore: Sequence[str]
) -> tuple[Mapping[str, bytes], Mapping[str, Tensor]]:
    """The files of a model directory, and tensors under the names of its weights.

    Raises:
        ConfigError, CheckpointError: the tensors differ from its config.json, or a file cannot be
            read.
    """
    from tilewise import models
    from tilewise.checkpoint import load_generation_config, load_tokenizer, model_files, open_companions

    config, content = models.open(model_dir, ignore=ignore), models.config_content(model_dir)
    layout = models.file_layout(config, with_head=not models.is_encoder(config))
    layout.weights({name: _outline(tensor) for name, tensor in tensors.items()})
    has = open_companions(model_dir).has
    if has("tokenizer.json") or has("vocab.json"):
        load_tokenizer(model_dir, config.vocab_size)
    load_generation_config(model_dir, config.vocab_size)
    tokens = None if has("generation_config.json") else _tokens(content) or None
    return model_files(generation_config=tokens, copy_from=model_dir), layout.unwrapped(tensors)


def _with_files_of(files: Mapping[str, bytes], model_dir: Path | None) -> Mapping[str, bytes]:
    """The files of a training checkpoint. If it has no chat templates or settings of generation or
    pooling, those of a model directory are added.

    Raises:
        CheckpointError: a file of the directory cannot be read.
    """
    from tilewise.checkpoint import load_generation_config
    from tilewise.checkpoint.companions import GENERATION, MODULES, TEMPLATES, read_companions

    if model_dir is None:
        return files
    more = read_companions(model_dir, (GENERATION, *TEMPLATES, *MODULES))
    merged = {**more, **files}
    if GENERATION in more and GENERATION in files:
        load_generation_config(model_dir, _MOST_TOKENS)  # rejects invalid files
        settings = {**json.loads(more[GENERATION]), **json.loads(files[GENERATION])}
        merged[GENERATION] = (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
    return merged


def _tokens(content: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of generation that follow from a config.json."""
    return {key: content[key] for key in ("bos_token_id", "eos_token_id") if content.get(key) is not None}


def _outline(tensor: Tensor) -> Any:
    """A stand-in for a tensor, with shape and dtype. With it, a table of weights is checked without
    reading the tensor.
    """
    from tilewise.checkpoint import LazyTensor, PartedTensor

    if isinstance(tensor, (LazyTensor, PartedTensor)):
        return np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)
    return tensor


def _counted(
    tensors: Iterable[tuple[str, Tensor]], show: Callable[[int, int], object]
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors. Each reports progress when it is fetched."""
    from tilewise.checkpoint import LazyTensor
    from tilewise.checkpoint.tensors import read_array

    tensor_list = list(tensors)
    total, done = sum(tensor.nbytes for _, tensor in tensor_list), 0

    def fetch_of(tensor: Tensor) -> Callable[[], Any]:
        def fetch() -> Any:
            nonlocal done
            done += tensor.nbytes
            show(done, total)
            return read_array(tensor)

        return fetch

    for name, tensor in tensor_list:
        yield name, LazyTensor(tuple(tensor.shape), tensor.dtype, fetch_of(tensor))
