"""Reads and writes a tensor's parts in the arenas of devices: slices, panels, microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint import QuantisedTensor
from tilewise.comm.group_executor import GroupExecutor
from tilewise.core.dims import Dim
from tilewise.core.errors import ShapeError
from tilewise.ir.graph import TensorSpec
from tilewise.kernels.loading import Part, store_weight
from tilewise.kernels.packing import packed_elements, unpack_weight
from tilewise.kernels.quantised import pack_blocks, quantised_bytes, unpack_blocks
from tilewise.plan import PlanTables
from tilewise.plan.shapes import LocalShapes
from tilewise.plan.stored_parts import StoredPart
from tilewise.runtime import Executor

__all__ = ["Place", "TensorStore"]

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Place:
    """A part of a tensor on a device.

    Attributes:
        device: the device that holds the part.
        sizes: the part's sizes.
        slices: its place in the whole tensor.
        memory: all its bytes; None if they are in the device's file or on another host, and are
            written through the store only.
        spec: the tensor's spec.
    """

    device: int
    sizes: list[int]
    slices: Slices
    memory: NDArray[np.uint8] | None
    spec: TensorSpec


class TensorStore:
    """Whole tensors as NumPy arrays, assembled from the parts that devices hold.

    Args:
        plan: says which device holds which part.
        executor: its memory.
    """

    def __init__(self, plan: PlanTables, executor: Executor | GroupExecutor) -> None:
        self.plan, self.executor = plan, executor
        self._in_files = frozenset(plan.layout.files)
        self.symbols = [s.max for s in plan.shapes.symbols]
        self._assembled: dict[int, np.ndarray] = {}  # memory in which `view` assembles several parts
        self._direct: dict[int, list[np.ndarray] | None] = {}  # see _whole_on_each

    def _parts(self, tensor: int) -> range:
        return range(len(self.plan.outside[tensor]))

    def _devices(self, tensor: int) -> list[int]:
        """The devices that have a part of a tensor."""
        return [device for device in range(self.plan.mesh.num_devices) if self.plan.has(device, tensor)]

    def _local(
        self, shapes: LocalShapes, spec: TensorSpec, tensor: int, part: int
    ) -> tuple[list[int], Slices]:
        """The current local sizes, and the place of a device's part in the whole."""
        layout = self.plan.layout.compute[tensor]
        sizes, slices = [], []
        for dim, size in enumerate(spec.shape):
            if isinstance(size, Dim):
                begin, end = 0, self.symbols[self.plan.shapes.symbols.index(size)]
            else:
                begin, end = shapes.range(spec, layout, dim, part)
            sizes.append(end - begin)
            slices.append(slice(begin, end))
        return sizes, tuple(slices)

    def _extent(
        self, device: int, tensor: int, part: int, sizes: list[int], spec: TensorSpec
    ) -> tuple[int, int]:
        """The address and the size in bytes of a device's part."""
        entry = self.plan.entry(device, tensor, part)
        if spec.format is not None:
            return entry.offset, quantised_bytes(spec.format, *sizes)
        count = packed_elements(*sizes) if spec.storage == "packed" else prod(sizes)
        return entry.offset, count * spec.dtype.itemsize

    def _is_moved(self, tensor: int, device: int) -> bool:
        """Whether a device's part is read and written by copies, because it is in a file or on
        another host.
        """
        return tensor in self._in_files or not self.executor.reaches(device)

    def _bytes(
        self, device: int, tensor: int, part: int, sizes: list[int], spec: TensorSpec
    ) -> NDArray[np.uint8]:
        """The bytes of a device's part in memory."""
        return np.asarray(self.executor.buffer(device, *self._extent(device, tensor, part, sizes, spec)))

    def _array(self, device: int, tensor: int, part: int, sizes: list[int], spec: TensorSpec) -> np.ndarray:
        """The flat elements of a device's part; a copy if they are in a file."""
        if self._is_moved(tensor, device):
            offset, num_bytes = self._extent(device, tensor, part, sizes, spec)
            memory = np.empty(num_bytes, np.uint8)
            self.executor.move("read", device, offset, memory)
        else:
            memory = self._bytes(device, tensor, part, sizes, spec)
        return memory if spec.format is not None else memory.view(spec.dtype.numpy)

    @contextmanager
    def _writing(
        self, device: int, tensor: int, part: int, sizes: list[int], spec: TensorSpec
    ) -> Iterator[NDArray[np.uint8]]:
        """The bytes of a device's part, to be written whole; at the end they are written to the
        file if there is one.
        """
        if not self._is_moved(tensor, device):
            yield self._bytes(device, tensor, part, sizes, spec)
            return
        offset, num_bytes = self._extent(device, tensor, part, sizes, spec)
        memory = np.zeros(num_bytes, np.uint8)
        yield memory
        self.executor.move("write", device, offset, memory)

    def places(self, tensor: int) -> Iterator[Place]:
        """Every non-empty part, once, on the first device that holds it. Parts in files are listed
        on each device.
        """
        spec = self.plan.graph.spec(tensor)
        for device in self._devices(tensor):
            for part in self._parts(tensor) if self._is_first(tensor, device) else ():
                sizes, slices = self._local(self.plan.shapes.on(device), spec, tensor, part)
                if not all(sizes):
                    continue
                is_moved = self._is_moved(tensor, device)
                memory = None if is_moved else self._bytes(device, tensor, part, sizes, spec)
                yield Place(device, sizes, slices, memory, spec)

    def memory(self, tensor: int) -> list[NDArray[np.uint8]]:
        """The memory of every device's part, of the devices in this process."""
        spec = self.plan.graph.spec(tensor)
        return [
            self._bytes(
                device, tensor, part, self._local(self.plan.shapes.on(device), spec, tensor, part)[0], spec
            )
            for device in self._devices(tensor)
            if not self._is_moved(tensor, device)
            for part in self._parts(tensor)
        ]

    def write(self, tensor: int, value: np.ndarray, *, once: bool = False) -> None:
        """Write every device's part from the whole; with `once`, only on the first device that
        holds a part.
        """
        direct = None if once else self._whole_on_each(tensor)
        if direct is not None:
            for memory in direct:
                memory[: value.size] = value.reshape(-1)
            return
        spec = self.plan.graph.spec(tensor)
        for device in self._devices(tensor):
            if once and not self._is_first(tensor, device):
                continue
            for part in self._parts(tensor):
                sizes, slices = self._local(self.plan.shapes.on(device), spec, tensor, part)
                with self._writing(device, tensor, part, sizes, spec) as memory:
                    if isinstance(value, QuantisedTensor):
                        store_blocks(value, spec, memory, slices)
                    elif spec.format is not None:
                        raise ShapeError(
                            f"[session.write] a weight planned in {spec.format} must be loaded from blocks of that "
                            f"format; got an array for {spec.name!r}; plan the graph without formats"
                        )
                    elif spec.storage == "packed":
                        store_weight(value[slices], Part(memory, spec.dtype.name, True, sizes[0], sizes[1]))
                    else:
                        memory.view(spec.dtype.numpy)[:] = value[slices].reshape(-1)

    def _is_first(self, tensor: int, device: int) -> bool:
        """Whether no earlier device holds the same part."""
        return tensor in self._in_files or self.plan.holder(tensor, device) == device

    def read(self, tensor: int) -> np.ndarray:
        """The whole, from the devices' parts; of replicas, the first device's."""
        spec = self.plan.graph.spec(tensor)
        whole = np.zeros(self._shape(spec), spec.dtype.numpy)
        self._read_into(whole, spec, tensor)
        return whole

    def view(self, tensor: int) -> np.ndarray:
        """The whole without a copy if the first device holds it contiguously; otherwise in memory
        that is reused.
        """
        spec = self.plan.graph.spec(tensor)
        shape = self._shape(spec)
        direct = self._whole_on_each(tensor)
        if direct is not None:
            flat = direct[0][: prod(shape)].reshape(shape)
            flat.flags.writeable = False
            return flat
        memory = self._assembled.get(tensor)
        if memory is None or memory.size < prod(shape):
            memory = self._assembled[tensor] = np.zeros(prod(shape), spec.dtype.numpy)
        whole = memory[: prod(shape)].reshape(shape)
        self._read_into(whole, spec, tensor)
        return whole

    def _whole_on_each(self, tensor: int) -> list[np.ndarray] | None:
        """The flat elements of a tensor that every device holds whole, for its maximum size; None
        for others. Cached, because inputs and outputs are accessed in every run.
        """
        if tensor not in self._direct:
            spec, devices = self.plan.graph.spec(tensor), self._devices(tensor)
            now, self.symbols = self.symbols, [s.max for s in self.plan.shapes.symbols]
            arrays: list[np.ndarray] | None = None
            is_mapped = not any(self._is_moved(tensor, device) for device in devices)
            if is_mapped and len(self._parts(tensor)) == 1 and not spec.is_packed:
                sizes = [self._local(self.plan.shapes.on(device), spec, tensor, 0)[0] for device in devices]
                if all(local == self._shape(spec) for local in sizes):
                    arrays = [self._array(d, tensor, 0, local, spec) for d, local in zip(devices, sizes)]
            self._direct[tensor], self.symbols = arrays, now
        return self._direct[tensor]

    def _shape(self, spec: TensorSpec) -> list[int]:
        """The current sizes of a whole tensor."""
        return [
            self.symbols[self.plan.shapes.symbols.index(s)] if isinstance(s, Dim) else s for s in spec.shape
        ]

    def _read_into(self, whole: np.ndarray, spec: TensorSpec, tensor: int) -> None:
        for device in reversed(self._devices(tensor)):
            for part in self._parts(tensor):
                sizes, slices = self._local(self.plan.shapes.on(device), spec, tensor, part)
                flat = self._array(device, tensor, part, sizes, spec)
                whole[slices] = _elements(flat, spec, sizes)

    def copy_stored_part(self, tensor: int, part: StoredPart) -> np.ndarray:
        """A copy of the part of a tensor that a device writes."""
        spec = self.plan.graph.spec(tensor)
        flat = self._array(part.device, tensor, 0, [*part.sizes], spec)
        copy = np.empty(part.sizes, spec.dtype.numpy)
        copy[...] = _elements(flat, spec, part.sizes)
        return copy

    def differing_replicas(self, tensor: int) -> tuple[int, int] | None:
        """Two devices that should hold the same part but differ in a bit; None if all agree."""
        spec = self.plan.graph.spec(tensor)
        for device in self._devices(tensor):
            holder = self.plan.holder(tensor, device)
            for part in self._parts(tensor) if holder != device else ():
                copies = []
                for d in (holder, device):
                    sizes, _ = self._local(self.plan.shapes.on(d), spec, tensor, part)
                    copies.append(self._array(d, tensor, part, sizes, spec).view(np.uint8))
                if not np.array_equal(copies[0], copies[1]):
                    return holder, device
        return None


def store_blocks(
    value: QuantisedTensor,
    spec: TensorSpec,
    memory: NDArray[np.uint8],
    slices: Slices,
    row: int = 0,
    count: int = 0,
) -> bool:
    """Store rows of a quantised weight in a device's part: `count` rows from row `row` of the part
    on, or all. Returns whether all scales are finite.
    """
    rows, cols = slices
    assert spec.format == value.format
    blocks = value.blocks(rows.start + row, count or rows.stop - rows.start)
    sizes, first = (rows.stop - rows.start, cols.stop - cols.start), cols.start // value.format.block
    return pack_blocks(blocks, value.format, memory, *sizes, row=row, first_block=first)


def _elements(flat: np.ndarray, spec: TensorSpec, sizes: Sequence[int]) -> np.ndarray:
    """The elements of a part from its memory."""
    if spec.format is not None:
        return unpack_blocks(flat, spec.format, *sizes)
    return unpack_weight(flat, *sizes) if spec.storage == "packed" else flat.reshape(sizes)
