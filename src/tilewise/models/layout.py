"""How a family's files hold its parameters: a table, and what files may leave out or hold besides.

Files of one family differ: some leave out the prefix (`model.`), older ones hold buffers that follow from config.json
or spell a few names in another way, some hold a copy of a tied head. What is read is exactly the table.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from tilewise.checkpoint import FileTensor, StoredTensor, StoredWeights

__all__ = ["FileLayout"]


@dataclass(frozen=True)
class FileLayout:
    """How the files of one model hold its parameters.

    Attributes:
        table: every tensor that is needed, as files are written.
        prefix: of names, which files may leave out.
        derived: of tensors that follow from config.json or belong to other tasks: a regular expression for whole names
            without the prefix.
        copies: names that may hold a copy of another tensor: a head that is tied to the embedding.
        older: ends of names, and how older files spell them.
    """

    table: tuple[StoredTensor, ...]
    prefix: str = "model."
    derived: str = r"(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq"
    copies: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)

    def weights(self, files: Mapping[str, NDArray[Any] | FileTensor]) -> StoredWeights:
        """Files under the graph's names; nothing is read yet but copies, which must be some.

        Args:
            files: tensors by name, from `open_weights`.

        Raises:
            CheckpointError: they hold less or more than the table, or a tensor of another size or kind.
        """
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
