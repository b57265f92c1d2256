"""The outline of a graph for pictures: a list of stretches. A stretch is an op, or calls that
repeat.

Ten thousand equal layers are one stretch with ten thousand repetitions. Two alternating kinds of
layers are one stretch of two calls. A call repeats an earlier one if both use the same template
(the structure of a layer), have parameters and states of their own, share the same other tensors,
and read results of calls at the same distance. Weights and states that only one call reads are
counted, not drawn. The functions are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from tilewise.core.dims import upper_bound
from tilewise.ir.digest import digest_template
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode

__all__ = ["Layers", "Outline", "Stretch", "layers_in", "outline_graph", "stretch_title"]

_LONGEST_PERIOD = 16  # calls that are repeated as one


class Stretch(NamedTuple):
    """Ops and their repetitions.

    Attributes:
        ops: one op, or the calls that are repeated.
        last: the last op of the last repetition.
        repeats: number of repetitions; 1 for a single op.
        num_parameters: elements of the parameters that only one repetition reads.
        num_state: elements of the states that only one repetition reads.
    """

    ops: tuple[OpNode, ...]
    last: OpNode
    repeats: int
    num_parameters: int
    num_state: int


class Outline(NamedTuple):
    """A graph as it is drawn.

    Attributes:
        stretches: all stretches, in order.
        of_op: per op, the number of its stretch.
        drawn: inputs, parameters and states that do not belong to one call.
        edges: pairs of stretches, where the second reads a result of the first; each pair once.
        feeds: pairs of a drawn tensor and a stretch that reads it; each pair once.
    """

    stretches: tuple[Stretch, ...]
    of_op: tuple[int, ...]
    drawn: tuple[TensorNode, ...]
    edges: tuple[tuple[int, int], ...]
    feeds: tuple[tuple[int, int], ...]


def outline_graph(graph: Graph) -> Outline:
    """The stretches of a graph and the edges between them."""
    own = _own_tensors(graph)
    stretches: list[Stretch] = []
    of_op: list[int] = []
    start = 0
    while start < len(graph.ops):
        period, count = _repetitions(graph, start)
        ops = graph.ops[start : start + period]
        start += period * count
        read = {i: graph.tensors[i] for op in ops for i in op.given if i in own}
        sizes = {
            kind: _elements([t for t in read.values() if t.kind == kind]) for kind in ("parameter", "state")
        }
        of_op += [len(stretches)] * (period * count)
        stretches.append(Stretch(ops, graph.ops[start - 1], count, sizes["parameter"], sizes["state"]))
    edges: dict[tuple[int, int], None] = {}
    feeds: dict[tuple[int, int], None] = {}
    for op, stretch in zip(graph.ops, of_op):
        for i in op.given:
            producer = graph.tensors[i].producer
            if producer is None and i not in own:
                feeds[i, stretch] = None
            elif producer is not None and of_op[producer] != stretch:
                edges[of_op[producer], stretch] = None
    drawn = tuple(t for t in graph.tensors if t.kind != "result" and t.id not in own)
    return Outline(tuple(stretches), tuple(of_op), drawn, tuple(edges), tuple(feeds))


class Layers(NamedTuple):
    """All layers that calls refer to, including layers within layers. Layers that were traced alike
    are one.

    Attributes:
        templates: per layer, its first template.
        titles: per layer, the name of its function, with a number if several layers have the same
            name.
        number: by the identity of a template, the index of its layer in `templates` and `titles`.
    """

    templates: tuple[Template, ...]
    titles: tuple[str, ...]
    number: Mapping[int, int]

    def called(self, graph: Graph, stretch: Stretch) -> list[int]:
        """Numbers of the layers that a stretch calls, once for each of its ops."""
        return [
            self.number[id(graph.templates[op.attrs["template"]])] for op in stretch.ops if op.op == "call"
        ]


def layers_in(graph: Graph) -> Layers:
    """The layers of a graph, then the layers within these layers."""
    first: dict[str, int] = {}
    number: dict[int, int] = {}
    templates: list[Template] = []
    digests: dict[int, str] = {}
    ahead = list(graph.templates.values())
    for template in ahead:
        if id(template) in number:
            continue
        digest = digest_template(template, digests)
        number[id(template)] = first.setdefault(digest, len(templates))
        if number[id(template)] == len(templates):
            templates.append(template)
        ahead += template.graph.templates.values()
    return Layers(tuple(templates), tuple(_titles(templates)), number)


def _titles(templates: Sequence[Template]) -> Iterator[str]:
    taken: Counter[str] = Counter()
    for template in templates:
        name = template.key.rpartition(".")[2] or template.key
        taken[name] += 1
        yield name if taken[name] == 1 else f"{name} ({taken[name]})"


def stretch_title(graph: Graph, stretch: Stretch, layers: Layers) -> str:
    """The text of a box: op and label, or `layers.0 … layers.35: 36 × decoder_layer`."""
    first = stretch.ops[0]
    if first.op != "call":
        return (
            first.op
            if first.label in ("", first.op)
            else f"{first.op}: {first.label.removeprefix(first.op + ':')}"
        )
    called = " + ".join(layers.titles[n] for n in layers.called(graph, stretch))
    if stretch.repeats == 1:
        return f"{first.label}: {called}"
    called = called if len(stretch.ops) == 1 else f"({called})"
    return f"{first.label} … {stretch.last.label}: {stretch.repeats} × {called}"


def _elements(tensors: Sequence[TensorNode]) -> int:
    return sum(prod(upper_bound(s) for s in t.shape) for t in tensors)


def _own_tensors(graph: Graph) -> set[int]:
    """Parameters and states that only calls read and that are not outputs."""
    readers: Counter[int] = Counter()
    calls: Counter[int] = Counter()
    for op in graph.ops:
        inputs = set(op.given)
        readers.update(inputs)
        if op.op == "call":
            calls.update(inputs)
    shown = set(graph.outputs.values())
    return {
        t.id
        for t in graph.tensors
        if t.kind in ("parameter", "state") and 0 < readers[t.id] == calls[t.id] and t.id not in shown
    }


# ---- repetitions ----------------------------------------------------------------------------------------------------


def _repetitions(graph: Graph, start: int) -> tuple[int, int]:
    """Period and number of repetitions of the longest repeated stretch of calls that starts at an
    op; (1, 1) if no calls repeat there.
    """
    ops = graph.ops
    if ops[start].op != "call":
        return 1, 1
    best, most = (1, 1), 1
    for period in range(1, _LONGEST_PERIOD + 1):
        if start + period >= len(ops) or ops[start + period - 1].op != "call":
            break
        end = start + period
        while end < len(ops) and _repeats(graph, ops[end], ops[end - period], start):
            end += 1
        count = (end - start) // period
        if count > 1 and period * count > most:
            best, most = (period, count), period * count
        if most == end - start and (end == len(ops) or ops[end].op != "call"):
            break  # no other period reaches farther
    return best


def _repeats(graph: Graph, op: OpNode, before: OpNode, start: int) -> bool:
    """Whether a call repeats the one a period earlier, with tensors of its own."""
    period = op.id - before.id
    entered = start if before.id - start < period else None
    same = op.op == before.op == "call" and op.attrs["template"] == before.attrs["template"]
    return (
        same
        and len(op.inputs) == len(before.inputs)
        and op.phase == before.phase
        and all(_bind_alike(graph, a, b, period, entered) for a, b in zip(op.inputs, before.inputs))
    )


def _bind_alike(
    graph: Graph, tensor: int | None, before: int | None, period: int, entered: int | None
) -> bool:
    """Whether two repetitions read alike. The first repetition reads results from before op `entered`."""
    if tensor is None or before is None or tensor == before:
        return tensor == before
    a, b = graph.tensors[tensor], graph.tensors[before]
    if a.producer is not None and entered is not None and (b.producer is None or b.producer < entered):
        return entered <= a.producer < entered + period
    if a.producer is None or b.producer is None:
        return a.producer == b.producer and a.kind == b.kind and a.kind in ("parameter", "state")
    places = [graph.ops[t.producer].outputs.index(t.id) for t in (a, b) if t.producer is not None]
    return abs(a.producer - b.producer) == period and places[0] == places[1]
