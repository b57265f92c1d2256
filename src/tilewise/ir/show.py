"""Prints graphs as text."""

from __future__ import annotations

import hashlib
import re

from tilewise.core.dims import Dim, DimLabel
from tilewise.ir.graph import Graph, TensorNode

__all__ = ["show_graph"]


_PLAIN_NAME = re.compile(r"[\w.:/#<>-]+")


def show_graph(graph: Graph) -> str:
    """A graph as text: templates first, then inputs, parameters and states, ops in order, outputs
    and hints. Names with unusual characters are quoted, so that a name never looks like several
    lines.
    """
    lines = [f"graph {_name(graph.name)} k_splits={graph.k_splits}"]
    for key, template in graph.templates.items():
        body = show_graph(template.graph).replace("\n", "\n  ")
        lines.append(f"template {_name(key)} {template.arguments} -> {template.results}\n  {body}")
    symbols = {s for t in graph.tensors for s in t.spec.shape if isinstance(s, Dim)}
    lines += [f"symbol {_name(s.name)} in [{s.min}, {s.max}]" for s in sorted(symbols, key=lambda s: s.name)]
    frozen = {*graph.frozen}
    for t in graph.tensors:
        if t.kind != "result":
            spec, value = t.spec, " frozen" if t.id in frozen else _value(graph, t)
            lines.append(f"%{t.id} = {t.kind} {_name(spec.name)} {spec} {_labels(t)} {spec.storage}{value}")
    for op in graph.ops:
        results = ", ".join(f"%{o}" for o in op.outputs)
        operands = ", ".join("-" if i is None else f"%{i}" for i in op.inputs)
        operands = operands.removesuffix(", -").removesuffix(", -")
        attrs = ", ".join(f"{k}={_attribute(v)}" for k, v in sorted(op.attrs.items()))
        lines.append(f"{results} = {op.op}({operands}) {{{attrs}}} {op.phase} # {_name(op.label)}")
    lines += [f"output {_name(name)} = %{t}" for name, t in graph.outputs.items()]
    lines += [f"hint %{t} = {axes}" for t, axes in sorted(graph.hints.items())]
    return "\n".join(lines)


def _name(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else ascii(name)


def _attribute(value: object) -> str:
    return _name(value) if isinstance(value, str) else " ".join(str(value).split())


def _labels(tensor: TensorNode) -> str:
    return f"({', '.join(_label(label) for label in tensor.spec.labels)})"


def _label(label: DimLabel | None) -> str:
    """The parts of a label that determine where sums are cut."""
    if label is None:
        return "-"
    group = f"/{label.group}" if label.group > 1 else ""
    return f"{_name(label.name)}/{label.atom}{group}{'*' if label.is_summed_by_batch_splits else ''}"


def _value(graph: Graph, tensor: TensorNode) -> str:
    """A hash of a constant's content."""
    value = graph.constant_values.get(tensor.id)
    return "" if value is None else f" {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
