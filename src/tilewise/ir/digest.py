"""The digest of a graph: SHA-256 of a text of all its fields. Two different graphs never have the
same text.

The text consists of plain tuples in `ascii` notation. Strings are quoted and escaped, and each type
has its own notation, so a name cannot imitate another value. The digest does not depend on the
process or the locale. Each layer is hashed once, by its template. The order of tensors, ops,
outputs and templates counts; the order of hints and attributes does not. There is a second digest
of what a graph computes, which ignores layout hints and names of templates.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import islice
from types import NoneType
from typing import Any

import numpy as np

from tilewise.core.dtypes import DType
from tilewise.core.frozen import FrozenMap
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode, TensorSpec

__all__ = ["digest_computation", "digest_graph", "digest_template"]

_AT_ONCE = 4096  # lines that are formatted together
_PLAIN = {int, str, bool, float, NoneType}

Line = tuple[object, ...]


def digest_graph(graph: Graph, loss: int | None = None) -> str:
    """SHA-256 of a graph, in hexadecimal. Equal graphs have equal digests.

    Args:
        graph: the graph. All its parts count, including its templates.
        loss: the tensor that training minimizes, or None.
    """
    return _digest(graph, (("loss", loss),), {})


def digest_computation(graph: Graph, loss: int | None = None) -> str:
    """SHA-256 of what a graph computes: of everything except the graph's name and layout hints.

    Args:
        graph: the graph. Layers that differ only in layout hints count as one.
        loss: as for `digest_graph`.
    """
    return _digest(_without_layouts(graph, {}), (("loss", loss),), {})


def _without_layouts(graph: Graph, done: dict[int, Graph]) -> Graph:
    """A graph without its name and hints. The same is done to its layers. Layers that are then
    equal become one, with a key derived from their content.
    """
    if id(graph) in done:
        return done[id(graph)]
    keys, templates, digests = {}, {}, dict[int, str]()
    for key, template in graph.templates.items():
        bare = replace(template, key="", graph=_without_layouts(template.graph, done))
        keys[key] = digest_template(bare, digests)
        templates[keys[key]] = replace(bare, key=keys[key])
    attrs: dict[object, FrozenMap[str, Any]] = {}  # what calls of one layer share
    ops = []
    for op in graph.ops:
        if op.op == "call":
            key, saved = op.attrs["template"], op.attrs["saved"]
            if (key, saved) not in attrs:
                attrs[key, saved] = FrozenMap({"template": keys[key], "saved": saved})
            op = replace(op, attrs=attrs[key, saved])
        ops.append(op)
    done[id(graph)] = replace(graph, name="", ops=tuple(ops), templates=templates, hints={})
    return done[id(graph)]


def digest_template(template: Template, digests: dict[int, str]) -> str:
    """SHA-256 of a layer's structure. Layers that were traced alike have the same digest.

    Args:
        template: the layer. All its parts count.
        digests: a cache of digests, by identity of the template's graph.
    """
    (line,) = _template_lines([template], digests)
    return hashlib.sha256(ascii(line).encode("ascii")).hexdigest()


def _digest(graph: Graph, more: Iterable[Line], digests: dict[int, str]) -> str:
    sha = hashlib.sha256()
    for lines in (_lines(graph, digests), iter(more)):
        while part := list(islice(lines, _AT_ONCE)):
            sha.update(ascii(part).encode("ascii"))
    return sha.hexdigest()


def _lines(graph: Graph, digests: dict[int, str]) -> Iterator[Line]:
    yield "graph", _text(graph.name), graph.k_splits
    for key, line in zip(graph.templates, _template_lines(graph.templates.values(), digests)):
        yield "template", _text(key), *line
    yield from _tensor_lines(graph.tensors)
    for tensor, value in sorted(graph.constant_values.items()):
        yield "value", tensor, *_content(value)
    yield from map(_op_line, graph.ops)
    for name, tensor in graph.outputs.items():
        yield "output", _text(name), tensor
    for tensor, axes in sorted(graph.hints.items()):
        yield "hint", tensor, _plain(axes)
    if graph.frozen:
        yield "frozen", graph.frozen


def _template_lines(templates: Iterable[Template], digests: dict[int, str]) -> Iterator[Line]:
    for template in templates:
        inner = digests.get(id(template.graph))
        if inner is None:
            inner = digests[id(template.graph)] = _digest(template.graph, (), digests)
        yield _text(template.key), template.arguments, template.results, inner


def _tensor_lines(tensors: Iterable[TensorNode]) -> Iterator[Line]:
    """A line per tensor. If specs share a `TensorFamily`, it is formatted once."""
    forms: dict[Line, int] = {}
    seen: dict[Line, int] = {}
    for t in tensors:
        s = t.spec
        key = id(s.shape), id(s.dtype), id(s.labels), s.storage, s.tile_hint, s.init, s.init_scale
        number = seen.get(key)
        if number is None:
            form = _form(s)
            if form not in forms:
                yield "form", len(forms), form
            number = seen[key] = forms.setdefault(form, len(forms))
        yield t.id, t.kind, number, _text(s.name), t.producer


def _form(spec: TensorSpec) -> Line:
    shape, labels = (ascii([_plain(part) for part in parts]) for parts in (spec.shape, spec.labels))
    first = _text(spec.init), float(spec.init_scale)
    return shape, spec.dtype.name, labels, _text(spec.storage), spec.tile_hint, *first


def _op_line(op: OpNode) -> Line:
    attrs = [(_text(name), _plain(op.attrs[name])) for name in sorted(op.attrs)]
    return op.id, _text(op.op), op.inputs, op.outputs, attrs, _text(op.phase), _text(op.label)


def _text(value: str) -> str:
    """A plain `str`: derived classes may format themselves differently."""
    return value if type(value) is str else str.__str__(value)


def _content(value: np.ndarray[Any, Any]) -> Line:
    return str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()


def _plain(value: object) -> object:
    """A value as numbers, strings and lists. An object of a class becomes a tuple that begins with
    the class.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Enum):
        return _name_of(kind), value.name
    if isinstance(value, int | np.integer):
        return operator.index(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, str):
        return _text(value)
    if kind is tuple:
        return [_plain(item) for item in value]  # type: ignore[attr-defined]
    return _name_of(kind), *_parts(value)


def _parts(value: object) -> Iterator[object]:
    """The values that an object consists of."""
    if isinstance(value, DType):
        yield value.name
    elif isinstance(value, np.ndarray):
        yield from _content(value)
    elif is_dataclass(value):
        yield from (_plain(getattr(value, f.name)) for f in fields(value))
    elif isinstance(value, Mapping):
        yield from sorted(((_plain(k), _plain(v)) for k, v in value.items()), key=ascii)
    elif isinstance(value, set | frozenset):
        yield from sorted(map(_plain, value), key=ascii)
    elif isinstance(value, tuple | list):
        yield from map(_plain, value)
    else:
        yield str(value)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
