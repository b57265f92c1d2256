"""Decides which device writes which part into a checkpoint. Each part of the training state is
written by one device.

If one device stores a part, this device writes it. If several devices store a part, the device with
the least to write so far gets it, and the largest parts are assigned first. So devices write
similar amounts. The assignment is a pure function, so it has the same result in every process. It
is used to plan the memory for copies of the state, and to make the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewise.ir.graph import Graph, TensorSpec
from tilewise.ir.layout import GraphLayout, TensorLayout
from tilewise.plan.shapes import LocalShapes

__all__ = ["StoredPart", "assign_stored_parts"]

_STATES, _MASTERS = "optimizer.", "optimizer.master."
_PARAMETER_BYTES = 4  # checkpoints have parameters in fp32


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor, and the device that writes it.

    Attributes:
        device: the device that writes the part to its file.
        begin: position of the part's first element in the whole tensor, along each dim.
        sizes: sizes of the part.
        num_bytes: bytes of a copy of the part.
    """

    device: int
    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int


_Part = tuple[tuple[int, ...], tuple[int, ...], list[int]]
"""First elements, sizes, and all devices that store a part whose writer is not chosen yet."""


def assign_stored_parts(
    graph: Graph, layout: GraphLayout, shapes: LocalShapes
) -> dict[int, tuple[StoredPart, ...]]:
    """The parts of every stored tensor by its id, each part once.

    Args:
        graph: the graph, with the states of its optimizer, if any.
        layout: the layout of its tensors.
        shapes: the plan's local sizes.
    """
    parts: dict[int, list[StoredPart]] = {}
    bytes_of_device = [0] * shapes.mesh.num_devices
    shared: list[tuple[int, StoredPart, list[int]]] = []
    parts_of_form: dict[object, list[_Part]] = {}
    for tensor, spec, item_bytes in _stored_tensors(graph):
        stages = layout.stages_of(tensor)
        key = spec.shape, spec.labels, layout.storage[tensor], stages
        if key not in parts_of_form:
            parts_of_form[key] = list(_parts(spec, layout.storage[tensor], shapes, stages))
        parts[tensor] = []
        for begin, sizes, devices in parts_of_form[key]:
            part = StoredPart(devices[0], begin, sizes, prod(sizes) * item_bytes)
            if len(devices) > 1:
                shared.append((tensor, part, devices))
            else:
                parts[tensor].append(part)
                bytes_of_device[part.device] += part.num_bytes
    for tensor, part, devices in sorted(shared, key=lambda one: -one[1].num_bytes):
        device = min(devices, key=lambda d: (bytes_of_device[d], d))
        parts[tensor].append(replace(part, device=device))
        bytes_of_device[device] += part.num_bytes
    return {tensor: tuple(sorted(own, key=lambda part: part.begin)) for tensor, own in parts.items()}


def _stored_tensors(graph: Graph) -> Iterator[tuple[int, TensorSpec, int]]:
    """The tensors from which training resumes: trainable parameters (or their fp32 masters) and the
    optimizer's states. Each comes with the bytes per element in a checkpoint.
    """
    states = [t for t in graph.of_kind("state") if t.spec.name.startswith(_STATES)]
    masters = {t.spec.name for t in states}
    for node in graph.trainable():
        if _MASTERS + node.spec.name not in masters:
            yield node.id, node.spec, _PARAMETER_BYTES
    for node in states:
        yield node.id, node.spec, node.spec.dtype.itemsize


def _parts(
    spec: TensorSpec, layout: TensorLayout, shapes: LocalShapes, stages: Sequence[int]
) -> Iterator[_Part]:
    """The parts of a tensor, ordered by the first device that stores each part."""
    holders: dict[int, list[int]] = {}
    for device in range(shapes.mesh.num_devices):
        if shapes.on(device).stage in stages:
            holders.setdefault(shapes.holder(spec, layout, device, stages), []).append(device)
    for first, devices in holders.items():
        own = shapes.on(first)
        spans = [own.range(spec, layout, dim) for dim in range(len(spec.shape))]
        if all(b < e for b, e in spans):  # an empty storage shard is not written
            yield tuple(b for b, _ in spans), tuple(e - b for b, e in spans), devices
