"""A plan as one HTML page: memory use and reads from other devices at every call of a step, and a
timeline of a traced step.

It draws the data of a `PlanPicture`. The page has no scripts and loads nothing. Every name is
escaped by `text`. A drawing has at most `COLUMNS` columns, each of which shows the highest value of
its calls. A table has at most `MAX_ROWS` rows. The page says if something is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewise.core.sizes import format_bytes
from tilewise.observe.charts import Bar, Row, timeline_chart
from tilewise.observe.page import duration, html_page, html_table, kernel_classes, text
from tilewise.observe.trace import TaskSpan

__all__ = ["CallPicture", "PassPicture", "PlanPicture", "StagePicture", "render_plan"]

COLUMNS = 600
MAX_ROWS = 500
MAX_LANES = 64
MAX_LABELS = 3  # that a cell names
WIDTH, LEFT, HEIGHT = 1200, 120, 220
PLOT = WIDTH - LEFT - 10
LABEL = 80  # pixels that the words of a mark take
UPDATE_SHARE = 4  # one column of updates for so many others
RESOLUTION = 1_000_000  # of a planned pipeline's time
PHASES = {"forward": "c0", "backward": "c1", "update": "c2"}
PASSES = {"F": "c0", "B": "c1", "I": "c1", "W": "c3"}
MOVES = {"all_gather": "c4", "reduce_scatter": "c3"}


class CallPicture(NamedTuple):
    """One call of a step.

    Attributes:
        name: name of the layer, or of the run of ops.
        template: name of the lowered template that it uses.
        phase: forward, backward or update.
        microbatch: number of the microbatch.
        alive: live bytes by category while the call runs, without buffers that live for the whole
            run.
        reads: per class of devices, the elements that the call reads from other devices, by label
            of the instruction.
    """

    name: str
    template: str
    phase: str
    microbatch: int
    alive: Mapping[str, int]
    reads: tuple[Mapping[str, int], ...]


@dataclass(frozen=True)
class StagePicture:
    """The devices of one stage of a pipeline, or all devices.

    Attributes:
        name: name of the stage; empty if there is no pipeline.
        lasting: bytes by category of buffers that live for the whole run.
        usage: bytes by category of all memory that a device reserves, and their total.
        classes: the classes of its devices, in words.
        calls: the calls, in order.
        in_flight: bytes of what layers save, for all microbatches that are in flight at one time.
    """

    name: str
    lasting: Mapping[str, int]
    usage: Mapping[str, int]
    classes: tuple[str, ...]
    calls: tuple[CallPicture, ...]
    in_flight: int = 0


class PassPicture(NamedTuple):
    """A pass of a pipeline.

    Attributes:
        name: virtual stage, kind and microbatch, such as `0F3`.
        kind: `F`, `B`, `I` or `W`.
        begin, end: its time, in any unit.
        num_calls: how many calls of its stage it consists of, without moves and updates.
    """

    name: str
    kind: str
    begin: float
    end: float
    num_calls: int


@dataclass(frozen=True)
class PlanPicture:
    """The data of a plan's page.

    Attributes:
        title, note: title of the page, and sentences below it.
        program: the name of the list of calls that is drawn.
        stages: the stages of the pipeline; one without a pipeline.
        stage_of_device: the stage of each device.
        passes: per stage, its passes as planned; empty without a pipeline.
        spans: per device, start and end of each call in ns; empty unless a run was traced and has
            the plan's tasks.
    """

    title: str
    note: str
    program: str
    stages: tuple[StagePicture, ...]
    stage_of_device: tuple[int, ...]
    passes: tuple[tuple[PassPicture, ...], ...] = ()
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()


def render_plan(picture: PlanPicture, timeline: Sequence[TaskSpan] = ()) -> str:
    """The page as text.

    Args:
        picture: data of the plan.
        timeline: tasks of a traced run of the plan, if there was one.
    """
    head = f"<p>{text(picture.note)}</p>"
    sections = [head + _pipeline(picture)] if picture.passes else []
    for stage in picture.stages:
        sections.append(("" if sections else head) + _memory(picture, stage))
        sections += [_schedule(stage, of) for of in range(len(stage.classes))]
    if timeline:
        sections.append(_lanes(picture, timeline))
    return html_page(picture.title, [*sections, *map(_calls, picture.stages)])


# ---- pipeline ----------------------------------------------------------------------------------------------


def _pipeline(picture: PlanPicture) -> str:
    """The passes of every stage over time, as planned and, below, as in the traced run."""
    end = max((p.end for of in picture.passes for p in of), default=0.0)
    scale = RESOLUTION / max(end, 1e-30)
    rows = [
        Row(f"stage {stage}", [_bar(p, int(p.begin * scale), int(p.end * scale)) for p in of])
        for stage, of in enumerate(picture.passes)
    ]
    planned = timeline_chart(rows[:MAX_LANES], 0, RESOLUTION)
    measured, columns = "", ["stage", "in flight", "passes", "idle as planned"]
    cells = [
        [stage.name, format_bytes(stage.in_flight), f"{len(of):,}", f"{_idle(of, end):.1%}"]
        for stage, of in zip(picture.stages, picture.passes)
    ]
    if picture.spans:
        of_stages = [_measured(picture, stage) for stage in range(len(picture.stages))]
        first = min(p.begin for of in of_stages for p in of)
        last = max(p.end for of in of_stages for p in of)
        rows = [
            Row(f"stage {stage}", [_bar(p, int(p.begin), int(p.end)) for p in of])
            for stage, of in enumerate(of_stages)
        ]
        measured = (
            f"<p class='soft'>As measured:</p>{timeline_chart(rows[:MAX_LANES], int(first), int(last))}"
        )
        columns.append("idle as measured")
        for row, of in zip(cells, of_stages):
            row.append(f"{_idle(of, last - first):.1%}")
    hidden = len(picture.passes) - MAX_LANES
    more = f"<p class='soft'>and {hidden:,} more stages</p>" if hidden > 0 else ""
    return (
        "<h2>Pipeline</h2><p class='soft'>The passes of each stage over time, if they take as long as their "
        "floating-point operations. A name is virtual stage, kind and microbatch: F forward, B backward, I and W its "
        f"parts for inputs and weights.</p><p class='legend'>{_legend(PASSES)}</p>{planned}{measured}{more}"
        f"{html_table(tuple(columns), [tuple(row) for row in cells[:MAX_ROWS]])}"
    )


def _bar(p: PassPicture, begin: int, end: int) -> Bar:
    return Bar(begin, end, PASSES[p.kind], p.name)


def _idle(passes: Sequence[PassPicture], length: float) -> float:
    busy = sum(p.end - p.begin for p in passes)
    return max(0.0, 1 - busy / length) if length > 0 else 0.0


def _measured(picture: PlanPicture, stage: int) -> list[PassPicture]:
    """When the passes of a stage's first device ran: from the first to the last task of their calls."""
    device = picture.stage_of_device.index(stage)
    calls = zip(picture.stages[stage].calls, picture.spans[device])
    spans = iter([span for c, span in calls if c.phase != "update" and not c.name.startswith("move:")])
    made = []
    for p in picture.passes[stage]:
        own = [span for _, span in zip(range(p.num_calls), spans)]
        made.append(p._replace(begin=float(min(own)[0]), end=float(max(end for _, end in own))))
    return made


# ---- memory ------------------------------------------------------------------------------------------------


def _memory(picture: PlanPicture, stage: StagePicture) -> str:
    """Stacked categories over the calls of a step, and their bytes."""
    styles, places = _categories(stage), _columns(stage.calls)
    columns = [_fullest(stage, of) for of in places]
    drawing = _stack(columns, styles, _marks(places, HEIGHT))
    rows = [(name, f"{count:,}", format_bytes(count)) for name, count in stage.usage.items() if count]
    of = f" of {stage.name}" if stage.name else ""
    return (
        f"<h2>Memory of a device{of} over the calls of {text(picture.program)}</h2>"
        "<p class='soft'>From left to right one call after the other; lines begin a microbatch, or the update. What "
        "lasts lies below.</p>"
        f"<p class='legend'>{_legend(styles)}</p>{drawing}{html_table(('bytes of', 'bytes', ''), rows)}"
        "<p class='soft'>As reserved: results and temporaries have regions, whose gaps are counted there.</p>"
    )


def _categories(stage: StagePicture) -> dict[str, str]:
    """Categories with their colours, those of the whole run first."""
    names = [name for name, count in stage.lasting.items() if count]
    return kernel_classes([*names, *(name for call in stage.calls for name in call.alive)])


def _fullest(stage: StagePicture, calls: Sequence[CallPicture]) -> dict[str, int]:
    """Bytes by category during the call with most live bytes."""
    most = max(calls, key=lambda call: sum(call.alive.values()), default=None)
    nbytes = dict(stage.lasting)
    for name, count in most.alive.items() if most is not None else ():
        nbytes[name] = nbytes.get(name, 0) + count
    return nbytes


def _stack(columns: Sequence[Mapping[str, int]], styles: Mapping[str, str], behind: Sequence[str]) -> str:
    """Stacked areas, scaled by the highest sum."""
    whole = max((sum(of.values()) for of in columns), default=0)
    parts, below = [], [0] * len(columns)
    for name, style in styles.items():
        above = [low + of.get(name, 0) for low, of in zip(below, columns)]
        most = max((of.get(name, 0) for of in columns), default=0)
        parts.append(_band(below, above, max(1, whole), style, f"{name}: up to {format_bytes(most)}"))
        below = above
    return _svg(HEIGHT, [*parts, *behind, _scale_text(format_bytes(whole))])


def _columns(calls: Sequence[CallPicture]) -> list[Sequence[CallPicture]]:
    """Calls by the column of a drawing that they belong to; updates, which are many and short,
    share some columns.
    """
    work = [[call] for call in calls if call.phase != "update"]
    updates = [call for call in calls if call.phase == "update"]
    places = max(1, len(work) // UPDATE_SHARE) if updates else 0
    units = [*work, *_shared(updates, min(places, len(updates)))]
    return [[call for unit in of for call in unit] for of in _shared(units, min(COLUMNS, len(units)))]


def _shared(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Items divided into this many runs of neighbours."""
    return [items[i * len(items) // count : (i + 1) * len(items) // count] for i in range(count)]


def _band(below: Sequence[int], above: Sequence[int], whole: int, style: str, label: str) -> str:
    """The area between two step functions."""
    width = PLOT / max(1, len(above))

    def y(value: int) -> str:
        return f"{HEIGHT - 4 - (HEIGHT - 24) * value / whole:.1f}"

    path = [f"M{LEFT} {y(above[0])}"]
    for place, value in enumerate(above):
        path.append(f"V{y(value)}H{LEFT + width * (place + 1):.1f}")
    for place in reversed(range(len(below))):
        path.append(f"V{y(below[place])}H{LEFT + width * place:.1f}")
    return f'<path class="{style}" d="{"".join(path)}Z"><title>{text(label)}</title></path>'


def _marks(columns: Sequence[Sequence[CallPicture]], height: int) -> list[str]:
    """A line where a microbatch begins, and where the update begins."""
    parts, starts = [], list[tuple[int, str]]()
    for place, (call, *_) in enumerate(columns):
        words = "update" if call.phase == "update" else f"microbatch {call.microbatch}"
        if not starts or starts[-1][1] != words:
            starts.append((place, words))
    for number, (place, words) in enumerate(starts[:MAX_LANES]):
        x = LEFT + PLOT * place / len(columns)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        end = starts[number + 1][0] if number + 1 < len(starts) else len(columns)
        if PLOT * (end - place) / len(columns) > LABEL:
            parts.append(f'<text class="soft" x="{x + 3:.1f}" y="11">{words}</text>')
    return parts


def _scale_text(words: str) -> str:
    return f'<text class="soft" x="{LEFT - 8}" y="30" text-anchor="end">{text(words)}</text>'


# ---- schedule ----------------------------------------------------------------------------------------------


def _schedule(stage: StagePicture, of: int) -> str:
    """A cell per call in the row of the call's phase. The row below shows what devices of a class
    read from other devices.
    """
    calls, total = stage.calls, Counter[str]()
    for call in calls:
        for label, count in call.reads[of].items():
            total[_move(label)] += count
    columns = _columns(calls)
    width = PLOT / max(1, len(columns))
    parts = []
    for row, phase in enumerate(PHASES):
        parts.append(f'<text x="{LEFT - 8}" y="{30 + 20 * row}" text-anchor="end">{phase}</text>')
    reads = [max(sum(c.reads[of].values()) for c in column) for column in columns]
    for place, column in enumerate(columns):
        x = LEFT + width * place
        for phase in dict.fromkeys(c.phase for c in column):
            mine = [c for c in column if c.phase == phase]
            words = _words_of(mine[0], of) + (f", and {len(mine) - 1} more" if len(mine) > 1 else "")
            parts.append(_cell(x, 18 + 20 * [*PHASES].index(phase), width, 16, PHASES[phase], words))
        call = max(column, key=lambda c: sum(c.reads[of].values()))
        y = 160.0
        for move, count in _by_move(call.reads[of]).items():
            height = 76 * count / max(1, max(reads))
            y -= height
            parts.append(_cell(x, y, width, height, MOVES.get(move, "cx"), _words_of(call, of)))
    label = f'<text x="{LEFT - 8}" y="100" text-anchor="end">reads, up to</text>'
    most = f'<text class="soft" x="{LEFT - 8}" y="116" text-anchor="end">{max(reads, default=0):,}</text>'
    drawing = _svg(164, [*_marks(columns, 164), *parts, *([label, most] if total else [])])
    counts = ", ".join(f"{count:,} by {move}" for move, count in total.items()) or "nothing"
    return (
        f"<h2>Schedule of {text(stage.classes[of])}</h2><p class='soft'>{len(calls):,} calls. Elements read from "
        f"other devices: {text(counts)}. Point at a cell for its call.</p>"
        f"<p class='legend'>{_legend({**PHASES, **{m: MOVES.get(m, 'cx') for m in total}})}</p>{drawing}"
    )


def _move(label: str) -> str:
    """The collective at the end of an instruction's label, or that it moves a tensor between stages."""
    return label.rpartition("/")[2] if "/" in label else "move" if label.startswith("move:") else "copies"


def _by_move(reads: Mapping[str, int]) -> Counter[str]:
    elements: Counter[str] = Counter()
    for label, count in reads.items():
        elements[_move(label)] += count
    return elements


def _words_of(call: CallPicture, of: int) -> str:
    part = (
        f"{call.phase} of {call.name}"
        if call.phase == "update"
        else f"{call.name}, microbatch {call.microbatch}"
    )
    most = sorted(call.reads[of].items(), key=lambda item: -item[1])
    moved = "; ".join(f"{label} {count:,}" for label, count in most[:MAX_LABELS])
    moved += f"; and {len(most) - MAX_LABELS} more" if len(most) > MAX_LABELS else ""
    return f"{part}" + (f": reads {moved}" if moved else "")


def _cell(x: float, y: float, width: float, height: float, style: str, words: str) -> str:
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{max(0.7, width - 0.3):.1f}" height="{height:.1f}">'
        f"<title>{text(words)}</title></rect>"
    )


def _calls(stage: StagePicture) -> str:
    """A table of every call with its figures."""
    rows = [
        (
            number,
            call.phase,
            call.microbatch,
            call.name,
            call.template,
            *(f"{sum(of.values()):,}" for of in call.reads),
            *(f"{count:,}" for count in (sum(call.alive.values()),)),
        )
        for number, call in enumerate(stage.calls[:MAX_ROWS])
    ]
    head = ("call", "phase", "microbatch", "name", "template")
    heads = (
        *head,
        *(f"elements read by {name}" for name in stage.classes),
        "bytes of results and temporaries",
    )
    hidden = len(stage.calls) - MAX_ROWS
    more = f"<p class='soft'>and {hidden:,} more</p>" if hidden > 0 else ""
    of = f" of {stage.name}" if stage.name else ""
    return f"<h2>Calls{of}</h2><div class='scroll'>{html_table(heads, rows)}</div>{more}"


# ---- a run -------------------------------------------------------------------------------------------------


def _lanes(picture: PlanPicture, timeline: Sequence[TaskSpan]) -> str:
    """The workers' tasks by kind. If the tasks are those of the plan, also the calls by phase above
    them, and times by phase.
    """
    begin, end = min(r.start_ns for r in timeline), max(r.end_ns for r in timeline)
    time: Counter[str] = Counter()
    for record in timeline:
        time[_kind(record.kernel)] += record.end_ns - record.start_ns
    styles = kernel_classes(kind for kind, _ in time.most_common())
    lanes: dict[tuple[int, int], list[TaskSpan]] = {}
    for record in timeline:
        lanes.setdefault((record.device, record.worker), []).append(record)
    rows = []
    for device in sorted({device for device, _ in lanes}):
        if picture.spans:
            spans = zip(picture.stages[picture.stage_of_device[device]].calls, picture.spans[device])
            bars = [
                Bar(a, b, PHASES[call.phase], _words_of(call, 0).partition(":")[0]) for call, (a, b) in spans
            ]
            rows += [
                Row(f"device {device} {phase}", [b for b in bars if b.style == style])
                for phase, style in PHASES.items()
            ]
        rows += [
            Row(
                f"device {d} worker {w}",
                [Bar(r.start_ns, r.end_ns, styles[_kind(r.kernel)], r.kernel) for r in of],
            )
            for (d, w), of in sorted(lanes.items())
            if d == device
        ]
    hidden = len(rows) - MAX_LANES
    more = f"<p class='soft'>and {hidden:,} more lanes</p>" if hidden > 0 else ""
    count = Counter(_kind(r.kernel) for r in timeline)
    table = [
        (kind, f"{count[kind]:,}", duration(ns), f"{ns / sum(time.values()):.1%}")
        for kind, ns in time.most_common()
    ]
    memory = ""
    if picture.spans:
        cells = _over_time(picture, begin, max(1, end - begin))
        memory = (
            "<h2>Memory of device 0 in the run</h2><p class='soft'>Of the calls that ran at a time, what the plan has "
            f"alive for the one with most.</p>{_stack(cells, _categories(picture.stages[0]), ())}"
        )
    return (
        f"<h2>A run</h2><p class='soft'>{len(timeline):,} tasks in {duration(end - begin)}. Bars that are too narrow "
        "are drawn as one.</p>"
        f"<p class='legend'>{_legend({k: s for k, s in styles.items() if s != 'cx'})}</p>"
        f"{timeline_chart(rows[:MAX_LANES], begin, end)}{more}"
        f"{html_table(('kind of task', 'tasks', 'time', 'share'), table[:MAX_ROWS])}{memory}"
    )


def _over_time(picture: PlanPicture, begin: int, length: int) -> list[dict[str, int]]:
    """Bytes by category of the first device over the run's time."""
    running: list[list[CallPicture]] = [[] for _ in range(COLUMNS)]
    for call, (first, last) in zip(picture.stages[0].calls, picture.spans[0]):
        low, high = ((moment - begin) * COLUMNS // length for moment in (first, last))
        for cell in running[max(0, low) : high + 1]:
            cell.append(call)
    return [_fullest(picture.stages[0], calls) for calls in running]


def _kind(label: str) -> str:
    """The kind of a task: the name of the collective, if the task belongs to one; otherwise its op
    without the parameter.
    """
    return f"/{_move(label)}" if "/" in label else label.partition(":")[0]


def _legend(styles: Mapping[str, str]) -> str:
    return "".join(
        f"<span class='entry'><span class='key {style}'></span>{text(name)}</span>"
        for name, style in styles.items()
    )


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
