"""Building a plan: segments, lowering of each distinct template once per device, memory, bindings.

Root ops between two layer calls form a segment, lowered like a template. A step is all microbatches, each forward and
backward, and then the update. Offsets, handles and signals are equal on all devices; extents may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph, OpNode, TensorSpec
from tilewise.ir.layout import GraphLayout, TensorLayout
from tilewise.ir.op import op_named
from tilewise.ir.program import Call, DeviceProgram, LoweredTemplate, Number, Slot, TensorEntry, upper
from tilewise.ir.verify_program import verify_acknowledgements
from tilewise.plan.collectives import broadcast_instructions, place_signals
from tilewise.plan.lower import Ref, TemplateLowering, alias_roots, flat_view
from tilewise.plan.memory import Buffer, place_buffers, place_in_sequence, shared_bytes
from tilewise.plan.shapes import LocalShapes, round_up

__all__ = ["PlanBuilder", "Segment", "accumulated_tensors"]

Key = tuple[object, ...]


def accumulated_tensors(graph: Graph) -> set[int]:
    """Tensors that are sums over the whole batch: complete only after the last microbatch."""
    found: set[int] = set()
    for op in graph.ops:
        if op.op == "call":
            template = graph.templates[op.attrs["template"]]
            inner = accumulated_tensors(template.graph)
            found.update(o for o, r in zip(op.outputs, template.results) if r in inner)
        else:
            found.update(op.outputs[i] for i in getattr(op_named(op.op), "accumulates", ()))
    return found


@dataclass(frozen=True)
class Segment:
    """A layer call, or a run of root ops of one phase."""

    index: int
    phase: str
    ops: tuple[OpNode, ...]

    @property
    def call(self) -> OpNode | None:
        """The call op, for a layer."""
        return self.ops[0] if self.ops[0].op == "call" else None


@dataclass
class _Lowered:
    """One template variant, lowered for every device: its first signal, and the tensors bound from outside."""

    name: str
    per_device: list[LoweredTemplate]
    lowerings: list[TemplateLowering]
    first_signal: int
    interface: frozenset[int]


class PlanBuilder:
    """Assembles buffers, entries and programs from a graph and its layout.

    Args:
        graph: the whole graph, backward and update included.
        layout: its layout on the mesh.
        shapes: local sizes.
    """

    def __init__(self, graph: Graph, layout: GraphLayout, shapes: LocalShapes) -> None:
        self.graph, self.layout, self.shapes = graph, layout, shapes
        self.num_devices = shapes.mesh.num_devices
        self.accumulated = accumulated_tensors(graph)
        self.keep = frozenset(graph.outputs.values()) | frozenset(self.accumulated)
        self.roots = alias_roots(graph, graph.ops, self.keep)
        self.buffers: dict[Key, Buffer] = {}
        self.entries: list[list[TensorEntry]] = [[] for _ in range(self.num_devices)]
        self.entry_ids: dict[Key, int] = {}
        self.num_handles = 0
        self.num_signals = 0
        self.arena_bytes = 0
        self.regions = {"activations": 0, "temporaries": 0}
        self._handles: dict[Key, int] = {}
        self._buffer_of: dict[Key, Key] = {}
        self._sharing: list[Buffer] = []
        self._lowered: dict[Key, _Lowered] = {}
        self._order: list[Key] = []
        self._work: list[tuple[Segment, int, Key]] = []

    @property
    def symbol_bounds(self) -> tuple[int, ...]:
        """The upper bound of every symbol."""
        return tuple(s.max for s in self.shapes.symbols)

    @cached_property
    def segments(self) -> list[Segment]:
        """Root ops in order, cut at calls and where the phase changes."""
        runs: list[list[OpNode]] = []
        for op in self.graph.ops:
            fresh = not runs or op.op == "call" or runs[-1][-1].op == "call" or runs[-1][-1].phase != op.phase
            if fresh:
                runs.append([op])
            else:
                runs[-1].append(op)
        return [Segment(i, ops[0].phase, tuple(ops)) for i, ops in enumerate(runs)]

    # ---- lowering -----------------------------------------------------------------------------------------

    def lower_all(self) -> None:
        """Lower every distinct template for every device and microbatch position that makes a difference."""
        total = self.shapes.settings.accumulation
        for microbatch in range(total):
            for segment in self.segments:
                if segment.phase != "update":
                    self._work.append((segment, microbatch, self._lower(segment, microbatch)))
        for segment in self.segments:
            if segment.phase == "update":
                self._work.append((segment, total - 1, self._lower(segment, total - 1)))

    def _lower(self, segment: Segment, microbatch: int) -> Key:
        call = segment.call
        if call is not None:
            template = self.graph.templates[call.attrs["template"]]
            graph, layout, name = template.graph, self.layout.calls[call.id], template.key
            ops: tuple[OpNode, ...] = graph.ops
            keep = frozenset((*template.results, *call.attrs["saved"]))
            interface = keep | frozenset(template.arguments)
            identity: Key = (name, id(layout), call.attrs["saved"])
            roots = alias_roots(graph, ops, keep)
        else:
            graph, ops, layout, name = self.graph, segment.ops, self.layout, f"segment{segment.index}"
            identity, roots, interface = (name,), self.roots, frozenset()
        sums = accumulated_tensors(graph)
        varies = any(o in sums for op in ops for o in op.outputs)
        key = (*identity, microbatch if varies else 0)
        if key not in self._lowered:
            counts.lowered += call is not None
            lowerings = [
                TemplateLowering(name, graph, ops, layout, self.shapes.on(d), roots, microbatch)
                for d in range(self.num_devices)
            ]
            per_device = place_signals([low.run() for low in lowerings])
            verify_acknowledgements(per_device)
            self._lowered[key] = _Lowered(name, per_device, lowerings, self.num_signals, interface)
            self.num_signals += per_device[0].num_signals
            self._order.append(key)
        return key

    # ---- memory -------------------------------------------------------------------------------------------

    def plan_memory(self) -> None:
        """Offsets of all buffers: what lives on first, then results by lifetime, then temporaries."""
        lasting = self._lasting_buffers()
        results = self._result_buffers()
        lasting_end = place_in_sequence(lasting, 0)
        end = place_buffers(results, lasting_end)
        workspace_end = end
        temporaries: list[Buffer] = []
        for key in self._order:
            buffers = self._template_buffers(key)
            workspace_end = max(workspace_end, place_buffers(buffers, end))
            temporaries += buffers
        self.arena_bytes = workspace_end
        self.regions = {"activations": end - lasting_end, "temporaries": workspace_end - end}
        for buffer in (*lasting, *results, *temporaries):
            self.buffers[buffer.key] = buffer
        self._sharing = [*results, *temporaries]

    def _bytes(self, tensor: int) -> int:
        return self.shapes.bytes_max(self.graph.spec(tensor), self.layout.tensors[tensor])

    def _lasting_buffers(self) -> list[Buffer]:
        """Parameters, optimizer state, constants, inputs of all microbatches, gradients, carries, outputs."""
        total = self.shapes.settings.accumulation
        buffers = []
        for t in self.graph.tensors:
            if t.kind == "result" and (t.id in self.roots or t.id not in self.keep):
                continue
            size, category = self._bytes(t.id), _category(t.kind, t.spec.name)
            if t.kind == "result":
                category = "gradients" if t.id in self.accumulated else "outputs"
            if self.is_batched(t.id):
                size = round_up(size, 64) * total
            buffers.append(Buffer(("tensor", t.id), size, category))
            if t.id in self.accumulated:
                levels = (total - 1).bit_length()
                buffers += [Buffer(("carry", t.id, i), self._bytes(t.id), "carries") for i in range(levels)]
        return buffers

    def is_batched(self, tensor: int) -> bool:
        """Whether a tensor that others read or write has a part of its own for every microbatch."""
        node = self.graph.tensors[tensor]
        label = node.spec.labels[0]
        lasting = node.kind in ("input", "constant") or (
            tensor in self.keep and tensor not in self.accumulated
        )
        return lasting and label is not None and label.is_batch

    def _result_buffers(self) -> list[Buffer]:
        """Results that travel between segments, with the segments in which they live."""
        lives: dict[int, list[int]] = {}
        for segment in self.segments:
            for op in segment.ops:
                for t in (*op.inputs, *op.outputs):
                    if t is not None:
                        root = self.roots.get(t, t)
                        if self.graph.tensors[root].kind == "result" and root not in self.keep:
                            lives.setdefault(root, []).append(segment.index)
        return [
            Buffer(("tensor", t), self._bytes(t), "activations", min(where), max(where))
            for t, where in lives.items()
        ]

    def _template_buffers(self, key: Key) -> list[Buffer]:
        """Temporaries of one template: inner results and what ops asked for, with the ops in which they live."""
        lowered = self._lowered[key]
        low = lowered.lowerings[0]
        made = []
        if low.graph is not self.graph:
            lives: dict[int, list[int]] = {}
            for n, op in enumerate(low.ops):
                for t in (*op.inputs, *op.outputs):
                    root = low.roots.get(t, t) if t is not None else None
                    if (
                        root is not None
                        and low.graph.tensors[root].kind == "result"
                        and root not in lowered.interface
                    ):
                        lives.setdefault(root, []).append(n)
            for t, where in lives.items():
                size = low.shapes.bytes_max(low.graph.spec(t), low.graph_layout.tensors[t])
                made.append(Buffer(("inner", key, t), size, "temporaries", min(where), max(where)))
        for i, temp in enumerate(low.temps):
            sizes = [other.temps[i].max_bytes for other in lowered.lowerings]
            made.append(Buffer(("temp", key, i), max(sizes), "temporaries", temp.op, temp.op))
        return made

    # ---- entries ------------------------------------------------------------------------------------------

    def _entry(
        self, key: Key, buffer: Buffer, refs: Sequence[Ref], strides: Sequence[int], shift: int = 0
    ) -> int:
        """The entry for `key`, made on all devices at once; entries of one buffer share its handles."""
        if key in self.entry_ids:
            return self.entry_ids[key]
        bounds = tuple(s.max for s in self.shapes.symbols)
        tiles = max(max(1, -(-r.extent.upper(bounds) // r.tile_rows)) for r in refs)
        owner = (buffer.key, shift)
        if owner not in self._handles:
            self._handles[owner] = self.num_handles
            self.num_handles += tiles
        first = self._handles[owner]
        for device, (ref, stride) in enumerate(zip(refs, strides)):
            self.entries[device].append(
                TensorEntry(
                    key,
                    buffer.offset + shift,
                    ref.extent,
                    ref.cols,
                    stride,
                    ref.dtype,
                    ref.tile_rows,
                    first,
                )
            )
        self.entry_ids[key] = len(self.entries[0]) - 1
        self._buffer_of[key] = buffer.key
        return self.entry_ids[key]

    def tensor_entry(self, tensor: int, microbatch: int = 0, flat: bool = False) -> int:
        """Entry of a root tensor (of its part for one microbatch, where it has parts)."""
        root = self.roots.get(tensor, tensor)
        spec, layout = self.graph.spec(root), self.layout.tensors[root]
        part = microbatch if self.is_batched(root) else 0
        refs, strides = [], []
        for device in range(self.num_devices):
            ref, stride = local_view(self.shapes.on(device), spec, layout, self.graph.tensors[root].kind)
            refs.append(flat_view(ref, 0, spec.storage == "vector") if flat else ref)
            strides.append(1 if flat and spec.storage == "vector" else stride)
        buffer = self.buffers["tensor", root]
        shift = part * round_up(self._bytes(root), 64) if part else 0
        return self._entry(("flat" if flat else "tensor", root, part), buffer, refs, strides, shift)

    def _bind(self, segment: Segment, microbatch: int, key: Key, slot: Slot) -> int:
        """The entry a slot of a template stands for in one use of it."""
        lowered = self._lowered[key]
        low = lowered.lowerings[0]
        call = segment.call
        if slot.kind in ("temp", "temp_flat"):
            refs = [other.refs[slot] for other in lowered.lowerings]
            return self._entry(
                (slot.kind, key, slot.id),
                self.buffers["temp", key, slot.id],
                refs,
                [_stride(r) for r in refs],
            )
        tensor = slot.id
        if call is not None:
            template = self.graph.templates[call.attrs["template"]]
            names = (*template.arguments, *template.results, *call.attrs["saved"])
            actual = dict(zip(names, (*call.inputs, *call.outputs)))
            if tensor not in actual:
                refs = [other.refs[slot] for other in lowered.lowerings]
                buffer = self.buffers["inner", key, tensor]
                strides = [_stride(r, low.graph.spec(tensor).storage) for r in refs]
                return self._entry((slot.kind, key, tensor), buffer, refs, strides)
            tensor = actual[tensor]
        if slot.kind in ("carry", "carry_flat"):
            refs = [other.refs[slot] for other in lowered.lowerings]
            strides = [_stride(r, self.graph.spec(tensor).storage) for r in refs]
            return self._entry(
                (slot.kind, tensor, slot.level), self.buffers["carry", tensor, slot.level], refs, strides
            )
        return self.tensor_entry(tensor, microbatch, flat=slot.kind == "flat")

    # ---- programs -----------------------------------------------------------------------------------------

    def programs(self) -> dict[str, list[DeviceProgram]]:
        """The programs a graph can run, per device: `forward`, and with a loss `backward` and `step`."""
        for t in self.graph.tensors:  # everything a user may read or write has an entry, used or not
            if t.kind != "result" or t.id in self.keep:
                for microbatch in range(self.shapes.settings.accumulation if self.is_batched(t.id) else 1):
                    self.tensor_entry(t.id, microbatch)
        bound = [
            (s, k, [self._bind(s, m, k, slot) for slot in self._lowered[k].per_device[0].slots], m)
            for s, m, k in self._work
        ]
        aliases = self._aliases()
        wanted: dict[str, tuple[str, ...]] = {"forward": ("forward",)}
        if any(s.phase == "backward" for s in self.segments):
            wanted["backward"] = ("backward",)
            wanted["step"] = ("forward", "backward", "update")
        result = {}
        if self.num_devices > 1:
            result["broadcast"] = self._broadcast_programs()
        for name, phases in wanted.items():
            single = name != "step" and self.shapes.settings.accumulation > 1
            if single:
                continue
            calls = [(self._order.index(k), b) for s, k, b, _ in bound if s.phase in phases]
            result[name] = [self._device_program(d, calls, aliases) for d in range(self.num_devices)]
        return result

    def holder(self, tensor: int, device: int) -> int:
        """The first device that holds the same part of a tensor as `device`."""
        spec, layout = self.graph.spec(tensor), self.layout.tensors[tensor]
        ranges = [
            [self.shapes.on(d).range(spec, layout, i) for i in range(len(spec.shape))]
            for d in range(device + 1)
        ]
        return ranges.index(ranges[device])

    def _broadcast_programs(self) -> list[DeviceProgram]:
        """Per device, copies of every parameter and optimizer state that an earlier device holds as well."""
        lasting = [
            t for t in self.graph.tensors if _category(t.kind, t.spec.name) in ("parameters", "optimizer")
        ]
        binding = tuple(self.tensor_entry(t.id, flat=True) for t in lasting)
        slots = tuple(Slot("flat", t.id) for t in lasting)
        programs = []
        for device in range(self.num_devices):
            copied = []
            for slot, t in enumerate(lasting):
                e, source = self.entries[device][binding[slot]], self.holder(t.id, device)
                if source != device:
                    copied.append(
                        (t.spec.name, Ref(slot, e.extent, e.cols, e.dtype, upper(e.tile_rows)), source)
                    )
            template = LoweredTemplate("broadcast", broadcast_instructions(copied), slots, ())
            programs.append(DeviceProgram((template,), (Call(0, binding),), tuple(self.entries[device])))
        return programs

    def _device_program(
        self, device: int, calls: list[tuple[int, list[int]]], aliases: dict[int, tuple[int, ...]]
    ) -> DeviceProgram:
        templates = tuple(self._lowered[k].per_device[device] for k in self._order)
        return DeviceProgram(
            templates, tuple(Call(t, tuple(b)) for t, b in calls), tuple(self.entries[device]), aliases
        )

    @property
    def scratch_bytes(self) -> int:
        """Working memory of a worker: what the largest call of a kernel needs, on any device."""
        return max((low.scratch_bytes for v in self._lowered.values() for low in v.lowerings), default=0)

    def first_signals(self) -> list[int]:
        """First signal of every template, in the order of the programs' template lists."""
        return [self._lowered[k].first_signal for k in self._order]

    def _aliases(self) -> dict[int, tuple[int, ...]]:
        """Entries that share memory with an entry without sharing its handles."""
        by_buffer: dict[Key, list[int]] = {}
        for entry_key, buffer_key in self._buffer_of.items():
            by_buffer.setdefault(buffer_key, []).append(self.entry_ids[entry_key])
        shared = shared_bytes(self._sharing)
        aliases: dict[int, tuple[int, ...]] = {}
        for i, others in shared.items():
            targets = tuple(
                by_buffer[self._sharing[j].key][0] for j in others if self._sharing[j].key in by_buffer
            )
            for entry in by_buffer.get(self._sharing[i].key, []):
                aliases[entry] = targets
        return aliases


def _category(kind: str, name: str) -> str:
    if kind == "state":
        return "optimizer" if name.startswith("optimizer.") else "state"
    return {"parameter": "parameters", "constant": "inputs", "input": "inputs"}.get(kind, "activations")


def _stride(ref: Ref, storage: str = "rows") -> int:
    return round_up(ref.cols, 2) if ref.packed or storage == "packed" else ref.cols


def local_view(shapes: LocalShapes, spec: TensorSpec, layout: TensorLayout, kind: str) -> tuple[Ref, int]:
    """Number, columns, tile and stride of a root tensor on one device."""
    extent = shapes.extent(spec, layout) if spec.storage != "vector" else Number(1)
    cols = shapes.cols(spec, layout)
    tile = shapes.tile_rows(spec, kind, extent)
    packed = spec.storage == "packed"
    return Ref(0, extent, cols, spec.dtype.name, tile, packed), shapes.stride(spec, cols)
