"""`tilewise checkpoint convert`: weights from other files into a Hugging Face directory, or into one safetensors file.

Composes readers (training checkpoints, state dicts of `torch.save`, distributed checkpoints) with the writer of model
directories. Everything is checked before anything is written; then one tensor at a time is in memory. Refuses a target
that is there already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.core import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tilewise.checkpoint import Tensor
    from tilewise.models import ModelConfig

__all__ = ["convert_checkpoint", "find_checkpoints"]

_SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class _Source:
    """What is converted.

    Attributes:
        tensors: as files of a model spell them.
        config: of the model, where the source says it.
        tokenizer_dir: where its tokenizer.json lies, if it has one.
        model_dir: where config.json, tokenizer and what else stands beside them lie, if it is a model directory.
    """

    tensors: Mapping[str, Tensor]
    config: ModelConfig | None = None
    tokenizer_dir: Path | None = None
    model_dir: Path | None = None


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoints that a path names: itself, or those in a directory or in a run's output, oldest first.

    Raises:
        CheckpointError: there is none.
        ResourceError: a directory cannot be listed.
    """
    from tilewise.checkpoint import checkpoint_paths

    is_named_so = path.name.startswith("step-")  # others' directories above need not be listed
    if os.path.lexists(path / "checkpoint.json") or (is_named_so and path in checkpoint_paths(path.parent)):
        return [path]
    found = checkpoint_paths(path) or checkpoint_paths(path / "checkpoints")
    if not found:
        raise CheckpointError(
            f"[cli.checkpoint] there must be a training checkpoint, step-N; got none in {str(path)!r}; give a "
            "checkpoint, or a run's output directory"
        )
    return found


def convert_checkpoint(
    source: Path, target: Path, model_dir: Path | None, part: str | None, console: Console
) -> None:
    """Write what `source` holds as `target`.

    Args:
        source: a training checkpoint or a run, a file of `torch.save` or safetensors, a distributed checkpoint, or a
            model directory with pytorch_model.bin.
        target: a Hugging Face directory, or a file if its name ends in `.safetensors`.
        model_dir: whose config.json, tokenizer, chat templates and generation_config.json the directory gets where the
            source has none.
        part: key of the state dict in a source that holds more.
        console: for progress and what is to be said.

    Raises:
        ConfigError: the target is there already or lies among the checkpoints of its source, no config.json is known
            for a directory, or an option is given that this source or target has no use for.
        CheckpointError: the source is damaged, or is not what the configuration describes.
        ResourceError: the target cannot be written; nothing is left of it then.
    """
    from tilewise.checkpoint import check_writable
    from tilewise.train.progress import track_work

    if os.path.lexists(target):
        raise ConfigError(
            f"[cli.convert] the target must not be there yet; got {str(target)!r}; choose another name, or move it away"
        )
    check_writable(target.parent)
    is_file = target.name.endswith(_SAFETENSORS)
    if model_dir is not None and (is_file or not model_dir.is_dir()):
        raise ConfigError(
            "[cli.convert] --model is a model directory, whose files a target that is a directory gets; got "
            f"{str(model_dir)!r} for {str(target)!r}; {'leave it out' if is_file else 'name one that is there'}"
        )
    with track_work(console, "checking") as progress:
        found = _open(source, target, part, progress.show)
    with track_work(console, "writing") as progress:
        if is_file:
            _write_file(target, found, progress.show)
        else:
            _write_directory(target, found, model_dir, console, progress.show)


def _open(source: Path, target: Path, part: str | None, show: Callable[[int, int], object]) -> _Source:
    from tilewise.checkpoint import is_distributed, open_distributed, open_state_dict, open_weights
    from tilewise.checkpoint.torch_files import has_torch_weights, is_torch_file, open_torch_directory

    if not source.is_dir():
        if is_torch_file(source):
            return _Source(open_state_dict(source, part))
        _refuse_part(source, part)
        return _Source(open_weights(source))
    if is_distributed(source):
        return _Source(open_distributed(source, part))
    _refuse_part(source, part)
    if has_torch_weights(source):
        return _Source(open_torch_directory(source), model_dir=source)
    try:
        newest = find_checkpoints(source)[-1]
    except CheckpointError:
        raise CheckpointError(
            "[cli.convert] a source that is a directory must be a training checkpoint, a run's output, a distributed "
            f"checkpoint of PyTorch, or hold pytorch_model.bin; got {str(source)!r}, which is none; where its weights "
            "are safetensors, name their file"
        ) from None
    _refuse_place_of_checkpoints(newest, target)
    return _open_training(newest, show)


def _refuse_place_of_checkpoints(checkpoint: Path, target: Path) -> None:
    """What lies among a run's checkpoints is the run's: it would take the target for one of them, and it removes them.
    Beside a checkpoint that was copied elsewhere every name that no checkpoint has is free."""
    from tilewise.checkpoint.training import STEP_NAME

    folder, place = (Path(os.path.realpath(path)) for path in (checkpoint.parent, target))
    if folder not in place.parents:
        return
    first = place.relative_to(folder).parts[0]
    if folder.name == "checkpoints" or STEP_NAME.fullmatch(first):
        raise ConfigError(
            "[cli.convert] the target must not lie among the checkpoints that it is made from; got "
            f"{str(target)!r} in {str(folder)!r}; choose another directory"
        )


def _refuse_part(source: Path, part: str | None) -> None:
    if part is not None:
        raise ConfigError(
            "[cli.convert] --part names a state dict in a file of torch.save or in a distributed checkpoint; got "
            f"{part!r} for {str(source)!r}, which has weights alone; leave it out"
        )


def _open_training(path: Path, show: Callable[[int, int], object]) -> _Source:
    """A training checkpoint, every byte of which was read; its parameters as the family's files spell them."""
    from tilewise import models
    from tilewise.checkpoint import open_checkpoint

    opened = open_checkpoint(path)
    opened.verify(show)
    settings = opened.config.get("model")
    config = models.config_from_dict(settings if isinstance(settings, dict) else {})
    names = [name for name, _ in models.parameter_shapes(config)]
    missing = [name for name in names if name not in opened.tensors]
    if missing:
        raise CheckpointError(
            f"[cli.convert] a checkpoint must hold its model's parameters; got none called {missing[0]!r} in "
            f"{str(path)!r}; convert one that `tilewise train` wrote"
        )
    parameters = {name: opened.tensors[name] for name in names}
    tokenizer_dir = None if opened.tokenizer is None else path
    return _Source(dict(models.stored_tensors(config, parameters)), config, tokenizer_dir)


def _write_file(target: Path, source: _Source, show: Callable[[int, int], object]) -> None:
    from tilewise.checkpoint.shards import save_tensors
    from tilewise.core.writing import replace_file

    tensors = dict(_counted(source.tensors.items(), show))
    replace_file(target, lambda path: save_tensors(path, tensors, {"format": "pt"}))


def _write_directory(
    target: Path,
    source: _Source,
    model_dir: Path | None,
    console: Console,
    show: Callable[[int, int], object],
) -> None:
    from tilewise import models
    from tilewise.checkpoint import load_generation_config, load_tokenizer, save_pretrained

    config, content = source.config, {}
    model_dir = source.model_dir if model_dir is None else model_dir
    if config is not None:
        content = {**config.to_dict(), "torch_dtype": "float32"}
    elif model_dir is not None:
        config, content = models.open(model_dir), models.config_content(model_dir)
        layout = models.file_layout(config, with_head=not models.is_encoder(config))
        layout.weights({name: _outline(tensor) for name, tensor in source.tensors.items()})
    else:
        raise ConfigError(
            "[cli.convert] a model directory needs a config.json, which this source has not; got no --model; give a "
            "directory of the same model, or a target that ends in .safetensors"
        )
    tokenizer, generation = None, {key: content[key] for key in _TOKENS if content.get(key) is not None}
    if source.tokenizer_dir is not None:
        tokenizer = load_tokenizer(source.tokenizer_dir, config.vocab_size)
    elif model_dir is not None and _has(model_dir, "tokenizer.json", "vocab.json"):
        load_tokenizer(model_dir, config.vocab_size)  # its files are copied, when they fit the model
    elif model_dir is None or not _has(model_dir, "tokenizer.model", "vocab.txt"):
        console.print(
            "no tokenizer is written: the source has none, and neither has --model", highlight=False
        )
    if model_dir is not None:
        found = load_generation_config(model_dir, config.vocab_size)
        is_copied = source.config is None and _has(model_dir, "generation_config.json")
        generation = {} if is_copied else generation | found
    tensors = _counted(source.tensors.items(), show)
    save_pretrained(target, content, tensors, tokenizer, generation or None, copy_from=model_dir)


def _has(directory: Path, *names: str) -> bool:
    return any(os.path.lexists(directory / name) for name in names)


_TOKENS = ("bos_token_id", "eos_token_id")


def _outline(tensor: Tensor) -> Any:
    """What a table of weights needs to be held to: a tensor that is not read, or one of its shape and type."""
    from tilewise.checkpoint import LazyTensor, PartedTensor

    if isinstance(tensor, (LazyTensor, PartedTensor)):
        return np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)
    return tensor


def _counted(
    tensors: Iterable[tuple[str, Tensor]], show: Callable[[int, int], object]
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors; each tells when it is fetched how far the writing is."""
    from tilewise.checkpoint import LazyTensor

    given = list(tensors)
    total, done = sum(tensor.nbytes for _, tensor in given), 0

    def fetch_of(tensor: Tensor) -> Callable[[], Any]:
        def fetch() -> Any:
            nonlocal done
            done += tensor.nbytes
            show(done, total)
            return np.asarray(tensor)

        return fetch

    for name, tensor in given:
        yield name, LazyTensor(tuple(tensor.shape), tensor.dtype, fetch_of(tensor))
