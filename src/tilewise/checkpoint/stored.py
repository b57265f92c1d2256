"""Maps a graph's parameters to the tensors in a model family's files, and the reverse, by one
table.

A file may store several parameters in one tensor, or a parameter transposed. `StoredWeights` gives
the tensors of files the names of the graph. `store_parameters` gives a graph's parameters the names
of the files. Both are lazy. `models` provides the tables. Files that lack a tensor of the table,
have additional tensors, or have wrong shapes or integer dtypes, are rejected before an element is
read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.checkpoint.tensors import FileTensor, LazyTensor, PartedTensor, Tensor, read_array
from tilewise.core import CheckpointError
from tilewise.core.dtypes import is_float
from tilewise.core.validation import shown

__all__ = ["Stored", "StoredTensor", "StoredWeights", "store_parameters"]

_BYTES_COMPARED = 8 << 20

Stored = NDArray[Any] | FileTensor | PartedTensor | QuantisedTensor
_IN_FILES = FileTensor, QuantisedTensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file and the parameters in it.

    Attributes:
        name: name of the tensor in files.
        parameters: the parameters in the tensor, in order of the rows. Each is its name in the
            graph and its number of rows (output features; for a vector, elements).
        is_transposed: whether the file has input features as rows and output features as columns.
    """

    name: str
    parameters: tuple[tuple[str, int], ...]
    is_transposed: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of all parameters together."""
        return sum(rows for _, rows in self.parameters)


class StoredWeights(Mapping[str, Stored]):
    """Tensors of files under the graph's names. A value is read when it is indexed or converted to
    an array.

    Args:
        files: tensors by their names in files, from `open_weights`, or arrays.
        table: the required tensors.
        prefix: prefix of the table's names (`model.`) that some or all names in files may lack.
        copies: names of additional tensors, each with the name of the table's tensor that it must
            equal. An example is the head in the files of a model that ties the head to the
            embedding.
        is_ignored: whether an additional tensor may be ignored, because its values follow from the
            configuration.

    Raises:
        CheckpointError: the files have fewer or more tensors than the table, a tensor has a wrong
            number of rows or an integer dtype, or a copy differs. The message names the tensor.
    """

    def __init__(
        self,
        files: Mapping[str, Stored],
        table: Sequence[StoredTensor],
        *,
        prefix: str = "",
        copies: Mapping[str, str] | None = None,
        is_ignored: re.Pattern[str] | None = None,
    ) -> None:
        self._parameters: dict[str, Stored] = {}
        used: dict[str, str] = {}
        for entry in table:
            file_name = _spelling(files, entry.name, prefix)
            if file_name is None:
                raise _error(
                    "hold every parameter",
                    f"no {entry.name!r}{_place(*files.values())}",
                    "check that they are complete",
                )
            used[entry.name] = file_name
            self._add(entry, files[file_name])
        rest = set(files) - set(used.values())
        for copy, original in (copies or {}).items():
            extra = _spelling(files, copy, prefix)
            if extra in rest:
                _require_copy(files[extra], files[used[original]], extra, used[original])
                rest.remove(extra)
        unknown = sorted(name for name in rest if is_ignored is None or not is_ignored.fullmatch(name))
        if unknown:
            raise _error(
                "hold only tensors that the configuration describes",
                f"{shown(unknown[0])} and {len(unknown) - 1} more tensors that are not the model's"
                f"{_place(files[unknown[0]])}",
                "check num_hidden_layers and the other sizes",
            )

    def _add(self, entry: StoredTensor, tensor: Stored) -> None:
        """Divide a file's tensor into its parameters."""
        out_dim = 1 if entry.is_transposed else 0
        is_shape = tensor.ndim == 2 or (tensor.ndim == 1 and not entry.is_transposed)
        if not is_shape or tensor.shape[out_dim] != entry.num_rows:
            rows = f"{entry.num_rows} {'columns' if entry.is_transposed else 'rows'}"
            raise _error(
                f"hold {entry.name!r} with the {rows} that the configuration asks for",
                f"the shape {list(tensor.shape)}{_place(tensor)}",
                "check its sizes",
            )
        if not is_float(tensor.dtype):
            raise _error(
                f"hold {entry.name!r} as floating-point numbers",
                f"{tensor.dtype}{_place(tensor)}",
                "quantized weights are not supported: give the original ones",
            )
        if entry.is_transposed and isinstance(tensor, (PartedTensor, QuantisedTensor)):
            tensor = np.asarray(tensor)
        oriented = tensor.transpose() if entry.is_transposed else tensor  # type: ignore[union-attr]
        first = 0
        for name, count in entry.parameters:
            assert name not in self._parameters, name  # a mistake in the table
            self._parameters[name] = _rows(oriented, first, count)
            first += count

    def require_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check every parameter's whole shape. (The table has only numbers of rows.)

        Args:
            shapes: shapes by name in the graph.

        Raises:
            CheckpointError: a shape differs. The message names the tensor and its file.
        """
        for name, tensor in self._parameters.items():
            if tuple(tensor.shape) != tuple(shapes[name]):
                called = f"{tensor.name!r} with " if isinstance(tensor, _IN_FILES) else ""
                raise _error(
                    f"hold {called}{name!r} in the shape {list(shapes[name])} that the configuration asks for",
                    f"{list(tensor.shape)}{_place(tensor)}",
                    "check its sizes",
                )

    def __getitem__(self, name: str) -> Stored:
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _rows(tensor: Stored, first: int, count: int) -> Stored:
    """Some rows of a tensor, without reading it; of a tensor in parts, all rows."""
    if isinstance(tensor, _IN_FILES):
        return tensor.rows(first, count)
    if isinstance(tensor, PartedTensor):
        return tensor if count == tensor.shape[0] else np.asarray(tensor)[first : first + count]
    return tensor[first : first + count]


def _spelling(files: Mapping[str, Stored], name: str, prefix: str) -> str | None:
    """The name that a tensor has in files: the table's name, or this name without the prefix. None
    if the files have neither.
    """
    return next((key for key in (name, name.removeprefix(prefix)) if key in files), None)


def _require_copy(copy: Stored, original: Stored, name: str, of: str) -> None:
    """Check that two tensors have the same bits, because readers of such files differ in which of
    the two they use.
    """
    same = copy.shape == original.shape and copy.dtype == original.dtype
    count = copy.shape[0] if copy.ndim else 0
    step = max(1, _BYTES_COMPARED // max(1, copy.nbytes // max(1, count)))
    for first in range(0, count if same else 0, step):
        rows = [_rows(t, first, min(step, count - first)) for t in (copy, original)]
        mine, other = (np.ascontiguousarray(r).view(np.uint8) for r in rows)
        same = same and np.array_equal(mine, other)
    if not same:
        raise _error(
            f"hold {name!r} equal to {of!r}, which the configuration ties it to",
            f"another{_place(copy)}",
            "correct the configuration, or remove it from the file",
        )


def _place(*tensors: Stored) -> str:
    """The file of a tensor, or of the first of several tensors, in words for a message. Empty for
    arrays.
    """
    paths = sorted({str(tensor.file.path) for tensor in tensors if isinstance(tensor, _IN_FILES)})
    more = f" and {len(paths) - 1} more files" if len(paths) > 1 else ""
    return f" in {paths[0]!r}{more}" if paths else ""


def _error(rule: str, got: str, advice: str) -> CheckpointError:
    return CheckpointError(
        f"[checkpoint.stored] files must {rule}; got {got}; {advice}, and that config.json and the weights belong "
        "together"
    )


def store_parameters(
    table: Sequence[StoredTensor], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, LazyTensor]]:
    """A graph's parameters under the files' names, in the table's order. Each is fetched when it is
    written.
    """
    for entry in table:
        parts = [parameters[name] for name, _ in entry.parameters]
        shape = (entry.num_rows, *parts[0].shape[1:])
        yield (
            entry.name,
            LazyTensor(shape[::-1] if entry.is_transposed else shape, parts[0].dtype, _joiner(entry, parts)),
        )


def _joiner(entry: StoredTensor, parts: Sequence[Tensor]) -> Callable[[], NDArray[Any]]:
    def join() -> NDArray[Any]:
        arrays = [read_array(part) for part in parts]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return whole.T if entry.is_transposed else whole

    return join
