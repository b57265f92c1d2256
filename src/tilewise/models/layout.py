"""The table of a family's parameters in files, with the tensors that files may omit or may have in
addition.

Files of one family differ: some omit the prefix (`model.`), older ones have buffers that follow
from config.json or other spellings of a few names, some have a copy of a tied head. Prefixes of
PyTorch's wrappers (`_orig_mod.`, `module.`) are removed. Exactly the tensors of the table are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tilewise.checkpoint import Stored, StoredTensor, StoredWeights
from tilewise.core.log import warn_once

__all__ = ["FileLayout", "without_wrappers"]

T = TypeVar("T")
# Parts of names that torch.compile, FSDP and activation checkpointing add. DataParallel, DistributedDataParallel and
# AveragedModel add `module`.
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_NUM_AVERAGED = "n_averaged"  # a counter in state dicts of AveragedModel


def without_wrappers(files: Mapping[str, T]) -> Mapping[str, T]:
    """A state dict under the names of the model without PyTorch's wrappers.

    Args:
        files: tensors by name. `module` belongs to a wrapper if every name begins with it, also
            nested with others.
    """
    names = {name: _parts(name, _WRAPPERS) for name in files if name != _NUM_AVERAGED}
    while names and all(len(parts) > 1 and parts[0] == "module" for parts in names.values()):
        names = {name: parts[1:] for name, parts in names.items()}
    return _renamed(files, names)


def _parts(name: str, wrappers: Collection[str]) -> list[str]:
    return [part for part in name.split(".") if part not in wrappers]


def _renamed(files: Mapping[str, T], names: Mapping[str, list[str]]) -> Mapping[str, T]:
    """Tensors under new names; unchanged if two would have the same name."""
    renamed = {".".join(parts): files[name] for name, parts in names.items()}
    return renamed if len(renamed) == len(names) else files


@dataclass(frozen=True)
class FileLayout:
    """How the files of one model store its parameters.

    Attributes:
        table: every required tensor, in the order in which files are written.
        prefix: of names, which files may omit.
        derived: tensors that follow from config.json or belong to other tasks: a regular expression
            for whole names without the prefix.
        copies: names that may be a copy of another tensor: a head that is tied to the embedding.
        older: suffixes of names, and their spelling in older files.
        inside: prefixes of this model's tensors in files of a larger model that contains it, and
            what stands for each in its own files.
        others: the larger model's other tensors, which are not read: a regular expression for whole
            names.
    """

    table: tuple[StoredTensor, ...]
    prefix: str = "model."
    derived: str = r"(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq"
    copies: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, str] = field(default_factory=dict)
    others: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Every tensor of the table."""
        return frozenset(tensor.name for tensor in self.table)

    @property
    def names_without_prefix(self) -> frozenset[str]:
        """The names of files that omit the prefix."""
        return frozenset(name.removeprefix(self.prefix) for name in self.names)

    def unwrapped(self, files: Mapping[str, T]) -> Mapping[str, T]:
        """Files under the names of this layout, if they have names of a compiled or wrapped model.

        Removes the parts of names that PyTorch's wrappers added (`_orig_mod.`, `module.`), and then
        leading parts that every name has, until the table's first tensor is found. A model inside
        of another has `model.model.` or the name of any attribute before its own names.

        Args:
            files: tensors by name.

        Returns:
            The same tensors, without those of a larger model around this one; the same mapping if no
            name is wrapped, or nothing fits.
        """
        files = self._taken_out(files)
        wrappers = {*_WRAPPERS, "module"}
        is_wrapped = any(not wrappers.isdisjoint(name.split(".")) for name in files)
        if not is_wrapped and self._has_first(files):
            return files
        names = {name: _parts(name, wrappers) for name in files if not is_wrapped or name != _NUM_AVERAGED}
        while names and not self._has_first({".".join(parts) for parts in names.values()}):
            leading = {parts[0] for parts in names.values() if len(parts) > 1}
            if len(leading) != 1 or any(len(parts) < 2 for parts in names.values()):
                return files
            names = {name: parts[1:] for name, parts in names.items()}
        return _renamed(files, names)

    def _taken_out(self, files: Mapping[str, T]) -> Mapping[str, T]:
        """The tensors of this model in files of a larger one, under the names of its own files."""
        if not any(name.startswith(tuple(self.inside)) for name in files):
            return files
        names = [name for name in files if self.others is None or not re.fullmatch(self.others, name)]
        if left := len(files) - len(names):
            rule = "only the text model of these files is used"
            warn_once(
                "models", f"[models.open_weights] {rule}; {left} tensors of the vision model are not read"
            )
        own = {}
        for name in names:
            prefix = next(filter(name.startswith, self.inside), "")
            own[self.inside.get(prefix, "") + name.removeprefix(prefix)] = files[name]
        return own if len(own) == len(names) else files

    def _has_first(self, names: Collection[str]) -> bool:
        """Whether files have the table's first tensor, with its prefix or without."""
        first = self._spelled(self.table[0].name, names)
        return first in names or first.removeprefix(self.prefix) in names

    def weights(self, files: Mapping[str, Stored]) -> StoredWeights:
        """Files under the graph's names. Only tied copies are read at once, because they must equal
        their original.

        Args:
            files: tensors by name, from `open_weights`.

        Raises:
            CheckpointError: they have fewer or more tensors than the table, or a tensor of another
                size or dtype.
        """
        files = self.unwrapped(files)
        names = {t.name: self._spelled(t.name, files) for t in self.table}
        table = tuple(replace(t, name=names[t.name]) for t in self.table)
        copies = {copy: names[original] for copy, original in self.copies.items()}
        ignored = re.compile(f"({re.escape(self.prefix)})?({self.derived})")
        return StoredWeights(files, table, prefix=self.prefix, copies=copies, is_ignored=ignored)

    def _spelled(self, name: str, files: Collection[str]) -> str:
        for new, old in self.older.items():
            older = name.removesuffix(new) + old
            if name.endswith(new) and (older in files or older.removeprefix(self.prefix) in files):
                return older
        return name
