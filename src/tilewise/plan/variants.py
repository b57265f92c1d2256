"""Lowering every distinct template once per class of devices and microbatch position that makes a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewise.core.workers import ENOUGH, WorkerPool
from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import GraphLayout
from tilewise.ir.lowering import Ref
from tilewise.ir.op import import_ops, modules_of_ops
from tilewise.ir.program import LoweredTemplate, Slot
from tilewise.ir.schedule import Schedule
from tilewise.plan.accumulation import BatchSums
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.collectives import place_signals
from tilewise.plan.lower import TemplateLowering, alias_roots
from tilewise.plan.rings import credits_of_uses
from tilewise.plan.segments import Segment
from tilewise.plan.shapes import LocalShapes

__all__ = ["Use", "Variant", "Variants", "lower_variants"]


@dataclass(frozen=True)
class Variant:
    """One template as it was lowered.

    Attributes:
        number: its position among all variants; programs refer to it.
        templates: instructions per class of devices.
        views: per class, what every slot stands for, in the order of the slots.
        inner: tensors of the template's graph that live inside it, with the positions of the ops that use them first
            and last.
        graph, layout: the template's, or the whole graph's for a run of root ops.
        roots: tensor -> tensor whose memory it shares.
        rings: number of the variant whose rings it uses too: the first of the same template.
    """

    number: int
    templates: tuple[LoweredTemplate, ...]
    views: tuple[tuple[Ref, ...], ...]
    inner: dict[int, tuple[int, int]]
    graph: Graph
    layout: GraphLayout
    roots: dict[int, int]
    scratch_bytes: int
    rings: int

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What the template's operands stand for, in all classes alike."""
        return self.templates[0].slots


@dataclass(frozen=True)
class Use:
    """One entry of a schedule with the variant that does it.

    Attributes:
        ring_use: how many uses of its rings come before it in a step.
        numbers: that the call's instructions ask for (`plan.rings`).
    """

    segment: Segment
    microbatch: int
    variant: int
    ring_use: int = 0
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Variants:
    """All variants of a plan and the order in which a step uses them."""

    variants: tuple[Variant, ...]
    uses: tuple[Use, ...]

    @property
    def num_signals(self) -> int:
        """Signals of all templates together."""
        last = self.variants[-1] if self.variants else None
        return 0 if last is None else last.templates[0].first_signal + last.templates[0].num_signals

    @property
    def scratch_bytes(self) -> int:
        """Working memory of a worker: what the largest call of a kernel needs, on any device."""
        return max((v.scratch_bytes for v in self.variants), default=0)


@dataclass(frozen=True)
class _Job:
    """What is lowered once: a template, or a run of root ops, at a position of the step.

    Attributes:
        keep: tensors that live on behind the call; None for root ops.
        outside: tensors that live outside the template; None for root ops.
        late: ops that run after the last microbatch only.
    """

    name: str
    graph: Graph
    ops: Sequence[OpNode]
    layout: GraphLayout
    microbatch: int
    late: frozenset[int]
    keep: frozenset[int] | None
    outside: frozenset[int] | None


@dataclass(frozen=True)
class _Lowered:
    """What became of a job, but for its place among all: see `Variant`."""

    templates: tuple[LoweredTemplate, ...]
    views: tuple[tuple[Ref, ...], ...]
    inner: dict[int, tuple[int, int]]
    roots: dict[int, int]
    scratch_bytes: int


def lower_variants(
    graph: Graph,
    layout: GraphLayout,
    shapes: LocalShapes,
    segments: Sequence[Segment],
    schedule: Schedule,
    sums: BatchSums,
    roots: dict[int, int],
    numbers: DeviceNumbers,
    pool: WorkerPool | None = None,
) -> Variants:
    """Walk the schedule and lower what has not been lowered yet.

    Args:
        shapes: of all devices; one of each class is asked (`LocalShapes.kinds`).
        sums: what waits for the last microbatch.
        roots: of the root graph's tensors.
        numbers: in which the devices of a class differ.
        pool: lowers templates for one device where they are many; for several, they share `numbers`, in order.
    """
    jobs: dict[tuple[object, ...], _Job] = {}
    keys: list[tuple[object, ...]] = []
    for turn in schedule:
        identity, job = _job_of(graph, layout, segments[turn.segment], turn.microbatch, sums)
        key: tuple[object, ...] = (identity, job.microbatch)
        keys.append(key)
        jobs.setdefault(key, job)
    lowered = _lower_all(list(jobs.values()), shapes, roots, numbers, pool)
    made: dict[tuple[object, ...], Variant] = {}
    num_signals = 0
    rings: dict[object, tuple[int, int]] = {}  # the first variant of a template, and its rings' signals
    for (key, job), found in zip(jobs.items(), lowered):
        of = key[0]  # the template, at any position
        first_of_rings = num_signals
        if of in rings:
            first_of_rings = rings[of][1]
        else:
            rings[of] = len(made), num_signals
            num_signals += sum(max(sites) for sites in zip(*(t.ring_sites for t in found.templates)))
        templates = tuple(place_signals(found.templates, num_signals, first_of_rings))
        made[key] = Variant(
            len(made),
            templates,
            found.views,
            found.inner,
            job.graph,
            job.layout,
            found.roots,
            found.scratch_bytes,
            rings[of][0],
        )
        num_signals += templates[0].num_signals
    uses = [
        Use(segments[turn.segment], turn.microbatch, made[key].number) for turn, key in zip(schedule, keys)
    ]
    variants = tuple(made.values())
    return Variants(variants, _with_credits(variants, uses))


def _job_of(
    graph: Graph, layout: GraphLayout, segment: Segment, microbatch: int, sums: BatchSums
) -> tuple[tuple[object, ...], _Job]:
    """What a segment asks for, and which of a template it is; positions that make no difference are one."""
    call, name = segment.call, segment.name(graph)
    if call is None:
        inside, own, late, ops, keep, outside = graph, layout, sums, segment.ops, None, None
        identity: tuple[object, ...] = (name,)
    else:
        template = graph.templates[call.attrs["template"]]
        inside, own, late = template.graph, layout.calls[call.id], sums.calls[call.id]
        ops = inside.ops
        keep = frozenset((*template.results, *call.attrs["saved"]))
        outside = keep | frozenset(template.arguments)
        identity = (name, id(own), call.attrs["saved"], late.late_ops)
    varies = any(o in late.complete_last for op in ops for o in op.outputs)
    return identity, _Job(name, inside, ops, own, microbatch if varies else 0, late.late_ops, keep, outside)


def _lower_all(
    jobs: Sequence[_Job],
    shapes: LocalShapes,
    roots: dict[int, int],
    numbers: DeviceNumbers,
    pool: WorkerPool | None,
) -> list[_Lowered]:
    apart = [job for job in jobs if job.keep is not None]
    counts.lowered += len(apart)
    found: dict[int, _Lowered | None] = {}
    if pool is not None and shapes.mesh.num_devices == 1 and len(apart) >= ENOUGH:
        modules = modules_of_ops({op.op for job in apart for op in job.ops})
        if modules is not None:
            answers = pool.map(_lower_apart, [(modules, job, shapes) for job in apart])
            found = dict(zip(map(id, apart), answers))
    return [found.get(id(job)) or _lower(job, shapes, roots, numbers) for job in jobs]


def _lower_apart(modules: Sequence[str], job: _Job, shapes: LocalShapes) -> _Lowered | None:
    """As `_lower`, in another process; None where the template asks for numbers, which all share."""
    import_ops(modules)
    numbers = DeviceNumbers(shapes)
    found = _lower(job, shapes, {}, numbers)
    return found if numbers.is_empty else None


def _lower(job: _Job, shapes: LocalShapes, roots: dict[int, int], numbers: DeviceNumbers) -> _Lowered:
    """One job, for a device of each class."""
    own_roots = roots if job.keep is None else alias_roots(job.graph, job.ops, job.keep)
    lowerings = [
        TemplateLowering(
            job.name,
            job.graph,
            job.ops,
            job.layout,
            shapes.on(d),
            own_roots,
            job.microbatch,
            numbers,
            job.late,
        )
        for d in shapes.kinds
    ]
    templates = tuple(low.run() for low in lowerings)
    return _Lowered(
        templates,
        tuple(tuple(low.refs[s] for s in templates[0].slots) for low in lowerings),
        {} if job.outside is None else _lives(lowerings[0], job.outside),
        own_roots,
        max(low.scratch_bytes for low in lowerings),
    )


def _with_credits(variants: Sequence[Variant], uses: Sequence[Use]) -> tuple[Use, ...]:
    """Uses of rings with their numbers."""
    positions: dict[int, list[int]] = {}
    for position, use in enumerate(uses):
        if variants[use.variant].templates[0].ring_sites:
            positions.setdefault(variants[use.variant].rings, []).append(position)
    result = list(uses)
    for of in positions.values():
        for number, (position, numbers) in enumerate(zip(of, credits_of_uses(of))):
            result[position] = replace(uses[position], ring_use=number, numbers=numbers)
    return tuple(result)


def _lives(low: TemplateLowering, outside: frozenset[int]) -> dict[int, tuple[int, int]]:
    """First and last op that uses each result which no caller sees."""
    lives: dict[int, tuple[int, int]] = {}
    for n, op in enumerate(low.ops):
        for t in (*op.inputs, *op.outputs):
            root = low.roots.get(t, t) if t is not None else None
            if root is not None and low.graph.tensors[root].kind == "result" and root not in outside:
                lives[root] = (lives.get(root, (n, n))[0], n)
    return lives
