"""A plan in words: what each device stores and runs, and what it reads from other devices, template
by template.

A template is a block of instructions that is used many times, for example once per layer. Figures
are counted from the instructions, with every symbol (a size that a run supplies) at its bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from string import ascii_lowercase, digits
from typing import TYPE_CHECKING

from tilewise.ir.policy import DEFAULT_POLICY
from tilewise.ir.program import Instruction, LoweredTemplate, upper
from tilewise.ir.reshards import explain_reshards, explain_storage, is_layer
from tilewise.plan.passes import PassSpan, bytes_in_flight, first_devices, idle_shares, walk_by_flops
from tilewise.plan.policy import PolicyRules, matched_names, show_hints
from tilewise.plan.traffic import TrafficCounter, count_file_traffic

if TYPE_CHECKING:
    from tilewise.plan.tables import PlanTables

__all__ = ["explain_plan", "name_devices", "name_runs", "num_tasks", "short_name"]

_CHART = 96  # columns of the chart of a pipeline
_DIGITS, _LETTERS = digits, ascii_lowercase


def explain_plan(plan: PlanTables) -> str:
    """Mesh, memory, tiles, tasks, traffic and templates as text."""
    settings = plan.settings
    lines = [
        f"plan of {plan.graph.name!r} on {plan.mesh} ({plan.mesh.num_devices} devices, "
        f"{settings.workers_per_device} workers each)",
        f"  numerics: exact, {plan.graph.k_splits} k splits, {settings.batch_splits} batch splits, "
        f"{settings.accumulation} microbatches",
    ]
    changes = explain_reshards(plan.graph, plan.layout, settings.accumulation)
    lines += (
        ["  changes of layout, per device (mean) and microbatch:", *(f"    {c}" for c in changes)]
        if changes
        else []
    )
    shards = explain_storage(plan.graph, plan.layout)
    lines += ["  sharded state:", *(f"    {line}" for line in shards)] if shards else []
    lines += _policy(plan)
    lines += _files(plan)
    return "\n".join(
        [
            *lines,
            *_memory(plan),
            *_saved(plan),
            *_pipeline(plan),
            *_tiles(plan),
            *_programs(plan),
            *_templates(plan),
        ]
    )


def _policy(plan: PlanTables) -> Iterator[str]:
    """What the execution policy states, what its entries match, and how many tasks it moves."""
    policy = plan.settings.policy
    if policy == DEFAULT_POLICY:
        return
    words = [f"placement {policy.placement}"]
    words += [f"base priority {policy.base_priority}"] if policy.base_priority else []
    words += [] if policy.prefetch else ["no prefetch"]
    words += [f"bound to cores {name_runs(policy.cores)}"] if policy.cores else []
    words += [f"bound to cores of NUMA node {policy.numa_node}"] if policy.numa_node is not None else []
    words += (
        ["each worker bound to a core"] if policy.bind_to_cores and policy.binds and len(words) == 1 else []
    )
    yield f"  policy: {', '.join(words)}"
    rules = PolicyRules(policy, plan.settings.workers_per_device)
    for entry, kinds in matched_names(plan, rules).items():
        matched = "; ".join(f"{kind} {_some(names)}" for kind, names in kinds.items())
        yield f"    {entry.pattern!r}: {show_hints(entry.hints)}, for {matched}"
    for name in plan.programs if rules.entries or rules.default.workers else ():
        texts = [_targets(plan, device, name) for device in plan.kinds]
        if name != "broadcast":
            yield f"    {name}:"
            yield from ("  " + line for line in _per_device(plan, texts))


def _some(names: Sequence[str]) -> str:
    """Names as text; of many, the first and the last."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]} ({len(names)})"


def _targets(plan: PlanTables, device: int, program: str) -> str:
    """How many tasks of a program on a device are for each worker."""
    of, counts = plan.class_of(device), Counter[tuple[int, int]]()
    for call in of.calls[program]:
        for instruction in of.templates[call.template].instructions:
            hints, count = instruction.hints.over(call.hints), _num_steps(instruction, plan.symbol_bounds)
            if not hints.workers:
                counts[2, 0] += count
            for worker, share in hints.shares(count):
                counts[int(hints.is_preference), worker] += share
    words = ("pinned to worker", "that prefer worker", "for any worker")
    return ", ".join(
        f"{count:,} tasks {words[kind]}{f' {worker}' if kind < 2 else ''}"
        for (kind, worker), count in sorted(counts.items())
    )


def _memory(plan: PlanTables) -> Iterator[str]:
    """Bytes by category, of the device of each stage that needs most."""
    usages = plan.estimate_memory_usage()
    of_stages: list[dict[str, int]] = []
    for stage in range(plan.layout.num_stages):
        own = (usage for device, usage in enumerate(usages) if plan.layout.stage_of(device) == stage)
        of_stages.append(max(own, key=lambda usage: usage["total"]))
    yield "  memory per device:"
    if len(of_stages) > 1:
        yield (
            f"    {'':12s} "
            + "".join(f"{f'stage {stage}':>10s}    " for stage in range(len(of_stages))).rstrip()
        )
    for name in of_stages[0]:
        values = [usage[name] for usage in of_stages]
        if name != "offloaded" and any(values):
            yield f"    {name:12s} " + "".join(f"{value / 2**20:10.2f} MiB" for value in values)


def _pipeline(plan: PlanTables) -> Iterator[str]:
    """The passes of each stage as a chart, with the share of idle time and the memory in flight."""
    stages = plan.layout.stages
    if stages is None or "step" not in plan.programs:
        return
    passes = walk_by_flops(plan)
    length = max((of[-1].end for of in passes if of), default=0)
    yield "  pipeline, if passes take as long as their floating-point operations:"
    in_flight = bytes_in_flight(plan)
    for stage, (of, idle) in enumerate(zip(passes, idle_shares(passes))):
        layers = sum(
            op.phase == "forward" and is_layer(plan.graph, op) and stages.ops[op.id] % len(passes) == stage
            for op in plan.graph.ops
        )
        yield (
            f"    stage {stage}: {layers} layer{'' if layers == 1 else 's'}, idle {float(idle):.1%}, "
            f"{in_flight[stage] / 2**20:.2f} MiB in flight"
        )
        yield f"      {_chart(of, length)}"
    yield "      a digit is a forward pass, a letter a backward pass, of microbatch 0, 1, and so on"


def _chart(passes: Sequence[PassSpan], length: Fraction | int) -> str:
    """The passes of a stage over time as characters."""
    columns = ["."] * _CHART
    for p in passes:
        begin, end = (int(_CHART * at / length) if length else 0 for at in (p.begin, p.end))
        marks = _DIGITS if p.kind == "F" else _LETTERS if p.kind in "BI" else _LETTERS.upper()
        for column in range(begin, max(end, begin + 1)):
            columns[min(column, _CHART - 1)] = marks[p.microbatch % len(marks)]
    return "".join(columns)


def _files(plan: PlanTables) -> Iterator[str]:
    """What the devices' files contain, and what is written and read."""
    if not plan.file_bytes:
        return
    yield f"  offloaded: {plan.file_bytes / 2**20:.2f} MiB in a file of each device"
    kinds = Counter(plan.graph.tensors[t].kind for t in plan.layout.files)
    words = {"parameter": "weights", "state": "optimizer states", "result": "activations"}
    yield f"    {', '.join(f'{count} {words[kind]}' for kind, count in sorted(kinds.items()))}"
    for name in plan.programs:
        if name == "broadcast":
            continue
        texts = []
        for device in plan.kinds:
            read, written = count_file_traffic(plan.program, device, name, plan.symbol_bounds)
            texts.append(f"{name} reads {read / 2**20:.2f} MiB and writes {written / 2**20:.2f} MiB")
        yield from _per_device(plan, texts)


def _saved(plan: PlanTables) -> Iterator[str]:
    """What layers save for the backward pass besides their arguments, and which templates read it."""
    graph = plan.graph
    reads = {op.label: op.attrs["template"] for op in graph.ops if op.op == "call" and op.phase == "backward"}
    runs: list[tuple[list[str], tuple[int, str]]] = []
    for op in graph.ops:
        backward = reads.get(f"{op.label}.backward")
        if op.op != "call" or op.phase != "forward" or backward is None:
            continue
        saved = op.outputs[len(op.outputs) - len(op.attrs["saved"]) :]
        size = sum(plan.shapes.bytes_max(graph.spec(t), plan.layout.compute[t]) for t in saved)
        if runs and runs[-1][1] == (size, backward):
            runs[-1][0].append(op.label)
        else:
            runs.append(([op.label], (size, backward)))
    yield from ["  layers save for the backward pass, per microbatch:"] if runs else []
    for labels, (size, backward) in runs:
        names = labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}, each"
        yield f"    {names}: {size / 2**20:.2f} MiB, for {short_name(backward)}"


def _tiles(plan: PlanTables) -> Iterator[str]:
    """How the tensors of every device are divided into tiles."""
    bounds = plan.symbol_bounds
    symbols = ", ".join(f"{s} up to {s.max}" for s in plan.shapes.symbols)
    yield from [f"  sizes of a run: {symbols}; all figures are for the largest"] if symbols else []
    rows = upper(plan.settings.row_tile, bounds)
    up_to = "" if isinstance(plan.settings.row_tile, int) else "up to "
    yield f"  tiles: activations in {up_to}{rows} rows, weights in up to 512 rows"
    texts = []
    for of in plan.program.classes:
        tiles = [
            -(-e.extent.upper(bounds) // upper(e.tile_rows, bounds)) * e.tiles_across for e in of.entries
        ]
        texts.append(f"{sum(tiles):,} tiles of {len(of.entries):,} tensors")
    yield from _per_device(plan, texts)


def _per_device(plan: PlanTables, texts: Sequence[str]) -> Iterator[str]:
    """One line for all devices with the same text. `texts` has a text per class."""
    devices: dict[str, list[int]] = {}
    for device, own in enumerate(plan.program.devices):
        devices.setdefault(texts[own.class_id], []).append(device)
    for text, numbers in devices.items():
        yield f"    device {name_runs(numbers)}: {text}"


def name_devices(plan: PlanTables) -> list[str]:
    """The devices of every class as text, such as `device 0, 1, 4 to 9`."""
    devices: list[list[int]] = [[] for _ in plan.program.classes]
    for device, own in enumerate(plan.program.devices):
        devices[own.class_id].append(device)
    return [f"device {name_runs(numbers)}" for numbers in devices]


def name_runs(numbers: Sequence[int]) -> str:
    """Numbers as text, such as `0, 1, 4 to 9`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 4 else ", ".join(map(str, run)) for run in runs)


def _programs(plan: PlanTables) -> Iterator[str]:
    bounds = plan.symbol_bounds
    for name in plan.programs:
        counts = sorted({len(of.calls[name]) for of in plan.program.classes})
        yield f"  {name}: {' to '.join(map(str, counts[:: max(len(counts) - 1, 1)]))} calls of templates"
        texts = []
        for device, of in zip(plan.kinds, plan.program.classes):
            reads = TrafficCounter(plan.program, [device], bounds).count(of.calls[name])
            moved = sum(int(elements[0]) for elements in reads.values())
            tasks = sum(num_tasks(of.templates[c.template], bounds) for c in of.calls[name])
            texts.append(f"{tasks:,} tasks, reads {moved:,} elements from peers")
        yield from _per_device(plan, texts)


def _templates(plan: PlanTables) -> Iterator[str]:
    """Every distinct template that the longest list of calls uses, with its uses in this list."""
    for device in first_devices(plan):
        of = plan.class_of(device)
        uses = Counter(call.template for call in max(of.calls.values(), key=len))
        yield f"  templates (on device {device}):"
        alike: Counter[str] = Counter()  # by their line of text
        for index, count in uses.items():
            template = of.templates[index]
            tasks = num_tasks(template, plan.symbol_bounds)
            size = f"{len(template.instructions)} instructions, {tasks:,} tasks each"
            alike[f"    {short_name(template.name)}: {{}} of {size}"] += count
        for text, count in alike.items():
            yield text.format(f"{count} use{'s' if count > 1 else ''}")


def short_name(key: str) -> str:
    """The name of a layer's function without its module. `backward` is added for a backward
    template.
    """
    name, dot, backward = key.partition(".backward")
    return name.rpartition(".")[2] + dot + backward


def num_tasks(template: LoweredTemplate, bounds: tuple[int, ...]) -> int:
    """Number of tasks of one use of a template."""
    return sum(_num_steps(instruction, bounds) for instruction in template.instructions)


def _num_steps(instruction: Instruction, bounds: tuple[int, ...]) -> int:
    rows = instruction.extent.upper(bounds)
    step = upper(instruction.step, bounds)
    return 1 if step <= 0 else -(-rows // step)
