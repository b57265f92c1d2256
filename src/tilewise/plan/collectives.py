"""Collectives as tile tasks: reduce-scatter, all-gather, their product all-reduce, gather and broadcast.

Devices read each other's tiles in place. For every tile of a team of n devices:

    producer     writes its partial tile, then raises `ready` on every peer
    reduce       waits for `ready` of every peer; combines the n partials of ITS part of the rows along the fixed tree,
                 adds the residual, rounds once; then raises `done` and `ack partial` on every peer
    gather       waits for `done` of every peer; copies their parts; then raises `ack result` on them
    ack tasks    hold the partial and the result as readers until all peers have read them, so that reusing the memory
                 waits for peers as for any other reader

A gather brings shards together on one device under the same signals; a broadcast (`broadcast_instructions`) copies what
the host has written on one device of a team to the others, and needs none: no device writes what others read.

Elements read per device: (n-1)/n of the tile in reduce and as much in gather, 2(n-1)/n in all. Signals count up and
are never reset; one device raises each, and its tasks do so in the order of submission (native/programs/run/expand.cc).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewise.ir.graph import OpNode
from tilewise.ir.program import (
    Access,
    Instruction,
    LoweredTemplate,
    Mode,
    Notify,
    Number,
    Operand,
    Wait,
    upper,
)

if TYPE_CHECKING:
    from tilewise.core.mesh import DeviceMesh
    from tilewise.plan.lower import Ref
    from tilewise.plan.shapes import LocalShapes

__all__ = ["Collectives", "broadcast_instructions", "gather_label", "place_signals", "reduce_label"]

_SITE_SHIFT = 24
_TREE = {"sum": "tree_add", "max": "tree_max", "or": "tree_or"}


def reduce_label(label: str) -> str:
    """Label of the reduce-scatter half of a collective of the op with that label."""
    return f"{label}/reduce_scatter"


def broadcast_instructions(tensors: Sequence[tuple[str, Ref, int]]) -> tuple[Instruction, ...]:
    """Copies of whole tensors from other devices: (name, view with its slot, source device)."""
    return tuple(
        Instruction(
            f"copy_pairs_{ref.dtype}",
            f"broadcast:{name}",
            ref.extent,
            ref.tile_rows,
            [Operand(ref.slot, Mode.ROW, Access.OUT), Operand(ref.slot, Mode.ROW, Access.NONE, 0, source)],
        )
        for name, ref, source in tensors
    )


def gather_label(label: str) -> str:
    """Label of the all-gather half."""
    return f"{label}/all_gather"


def place_signals(templates: Sequence[LoweredTemplate]) -> list[LoweredTemplate]:
    """Number the signals of one template alike on all devices, though shards of unequal size need unequal counts."""
    sizes: list[int] = [max(column) for column in zip(*(t.signal_sites for t in templates))]
    first = [sum(sizes[:i]) for i in range(len(sizes))]

    def number(signal: int) -> int:
        return first[signal >> _SITE_SHIFT] + (signal & ((1 << _SITE_SHIFT) - 1))

    for template in templates:
        for i in template.instructions:
            i.waits = [w._replace(signal_base=number(upper(w.signal_base))) for w in i.waits]
            i.notifies = [n._replace(signal_base=number(upper(n.signal_base))) for n in i.notifies]
    return [replace(t, signal_sites=tuple(sizes)) for t in templates]


class Collectives:
    """The part of a lowering that makes devices exchange tiles. Mixed into `TemplateLowering`."""

    mesh: DeviceMesh
    device: int
    shapes: LocalShapes
    signal_sites: list[int]
    instructions: list[Instruction]
    one: Number
    completed_axes: set[str]

    def _signals(self, count: int) -> int:
        """Reserve signals; numbered within their site until `place_signals` knows every device's need."""
        self.signal_sites.append(count)
        return (len(self.signal_sites) - 1) << _SITE_SHIFT

    def replicas(self, kv: int, dim: int) -> list[int]:
        """Devices that hold the same KV heads of tensor `kv` (this one among them), in mesh order."""
        low: Any = self
        axis = low.layout(kv)[dim]
        if not axis:
            return [self.device]
        mine = low.local_range(low.spec(kv), low.layout(kv), dim)
        team = self.mesh.team(self.device, axis)
        return [d for d in team if self.shapes.on(d).range(low.spec(kv), low.layout(kv), dim) == mine]

    def all_reduce(
        self,
        op: OpNode,
        source: int | Ref,
        target: int | Ref,
        residual: int | Ref | None,
        axis: str,
        kind: str,
        *,
        team: Sequence[int] | None = None,
        step: int | None = None,
        producer: Instruction | None = None,
    ) -> None:
        """Combine `source` over a team into `target` (plus a residual), tile by tile.

        `producer` is the instruction that writes `source`, by default the last one emitted; it loops over the same
        tiles.
        """
        low: Any = self
        self.completed_axes.add(axis)
        src, dst = low.tensor(source), low.tensor(target)
        if src.packed:
            src, dst = low.flat(src), low.flat(dst)
        if residual is not None:
            residual = low.tensor(residual)
        step = low.row_step(src) if step is None else step
        devices = list(team) if team is not None else self.mesh.team(self.device, axis)
        producer = producer or self.instructions[-1]
        self._reduce_scatter(op, producer, src, dst, residual, kind, devices, step)
        self._all_gather(op, dst, devices, step)

    def all_reduce_in_place(self, op: OpNode, ref: Ref, axis: str) -> None:
        """Sum a gradient over a team, in place: every device reduces its part into itself and fetches the others'."""
        low: Any = self
        flat = low.flat(ref)
        producer = self.instructions[-1]
        step = upper(producer.step) if flat.packed else 0
        devices = self.mesh.team(self.device, axis)
        self._reduce_scatter(op, producer, flat, flat, None, "sum", devices, step)
        self._all_gather(op, flat, devices, step)

    def _tiles(self, extent: Number, step: int) -> int:
        bounds = tuple(s.max for s in self.shapes.symbols)
        return 1 if step <= 0 else max(1, -(-extent.upper(bounds) // step))

    def _reduce_scatter(
        self,
        op: OpNode,
        producer: Instruction,
        src: Ref,
        dst: Ref,
        residual: Any,
        kind: str,
        devices: list[int],
        step: int,
    ) -> None:
        low: Any = self
        n, me, tiles = len(devices), devices.index(self.device), self._tiles(src.extent, step)
        peers = [q for q in range(n) if q != me]
        ready = self._signals(n * tiles)
        done = self._done = self._signals(n * tiles)
        per_index = step > 0
        producer.notifies += [Notify(0, devices[q], ready + me * tiles, per_index) for q in peers]

        def part(ref: Any, access: int, peer: int = -1) -> Operand:
            return Operand(ref.slot, Mode.ROWPART, access, min(peer, 0), max(peer, 0), part=me, parts=n)

        in_place = src.slot == dst.slot
        operands = [part(dst, Access.INOUT if in_place else Access.OUT)]
        operands.append(part(residual, Access.IN) if residual is not None else low.null())
        operands += [
            part(src, Access.IN if not in_place else Access.NONE)
            if q == me
            else part(src, Access.NONE, devices[q])
            for q in range(n)
        ]
        kernel = f"{_TREE[kind]}_{dst.dtype}"
        reduce = low.emit(kernel, op, src.extent, step, operands, priority=2, label=reduce_label(op.label))
        reduce.waits += [Wait(ready + q * tiles, per_index, 1) for q in peers]
        reduce.notifies += [Notify(0, devices[q], done + me * tiles, per_index) for q in peers]
        if (
            not in_place
        ):  # in place, `done` of a peer says that it has read the part the gather will overwrite
            ack = self._signals(n * tiles)
            reduce.notifies += [Notify(0, devices[q], ack + me * tiles, per_index) for q in peers]
            self._acknowledge(op, src, ack, peers, step)

    def _all_gather(self, op: OpNode, dst: Ref, devices: list[int], step: int) -> None:
        low: Any = self
        n, me, tiles = len(devices), devices.index(self.device), self._tiles(dst.extent, step)
        peers = [q for q in range(n) if q != me]
        done, ack, per_index = self._done, self._signals(n * tiles), step > 0
        operands = []
        for i, q in enumerate(peers):
            access = Access.INOUT if i == 0 else Access.NONE
            operands.append(Operand(dst.slot, Mode.ROWPART, access, part=q, parts=n))
            operands.append(Operand(dst.slot, Mode.ROWPART, Access.NONE, 0, devices[q], part=q, parts=n))
        gather = low.emit(
            f"copy_pairs_{dst.dtype}",
            op,
            dst.extent,
            step,
            operands,
            priority=2,
            label=gather_label(op.label),
        )
        gather.waits += [Wait(done + q * tiles, per_index, 1) for q in peers]
        gather.notifies += [Notify(0, devices[q], ack + me * tiles, per_index) for q in peers]
        self._acknowledge(op, dst, ack, peers, step)

    _done: int = 0

    def gather(self, op: OpNode, source: int, target: int, axis: str) -> None:
        """Bring the column shards of `source` together in `target` on the first device of the axis."""
        low: Any = self
        self.completed_axes.add(axis)
        src, dst = low.tensor(source), low.tensor(target)
        devices, step = self.mesh.team(self.device, axis), low.row_step(src)
        n, me, tiles = len(devices), devices.index(self.device), self._tiles(src.extent, step)
        ready, ack = self._signals(n * tiles), self._signals(tiles)
        held = Operand(src.slot, Mode.ROW, Access.IN)
        if me > 0:
            offer = low.emit("", op, src.extent, step, [held], priority=2, label=f"{op.label}/offer")
            offer.notifies.append(Notify(0, devices[0], ready + me * tiles, True))
            task = low.emit("", op, src.extent, step, [held], priority=2, label=f"{op.label}/ack")
            task.waits.append(Wait(ack, True, 1))
            return
        spec, layout = low.spec(source), low.layout(source)
        operands = []
        for q, device in enumerate(devices):
            begin, end = self.shapes.on(device).range(spec, layout, len(spec.shape) - 1)
            access = Access.OUT if q == 0 else Access.NONE
            operands.append(Operand(dst.slot, Mode.ROWCOLS, access, part=begin, parts=end - begin))
            operands.append(held if q == 0 else Operand(src.slot, Mode.ROW, Access.NONE, 0, device))
        copy = low.emit(
            f"copy_pairs_{dst.dtype}",
            op,
            src.extent,
            step,
            operands,
            priority=2,
            label=gather_label(op.label),
        )
        copy.waits += [Wait(ready + q * tiles, True, 1) for q in range(1, n)]
        copy.notifies += [Notify(0, device, ack, True) for device in devices[1:]]

    def _acknowledge(self, op: OpNode, ref: Ref, ack: int, peers: list[int], step: int) -> None:
        """An empty task that reads the tile as long as peers do."""
        low: Any = self
        mode = Mode.ROW if step > 0 else Mode.WHOLE
        task = low.emit(
            "",
            op,
            ref.extent,
            step,
            [Operand(ref.slot, mode, Access.IN)],
            priority=2,
            label=f"{op.label}/ack",
        )
        tiles = self._tiles(ref.extent, step)
        task.waits += [Wait(ack + q * tiles, step > 0, 1) for q in peers]
