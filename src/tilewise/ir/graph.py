"""The graph as data: tensors, operations, templates. It does not know about devices.

`graph.GraphBuilder` creates a graph, passes transform it, and `plan` reads it. A template is the
structure of a layer that the graph uses, perhaps many times. Tensors and ops are numbered from 0
without gaps. Ops are always in topological order, so no code needs recursion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from tilewise.core.dims import MAX_SIZE, Dim, DimLabel, Size, upper_bound
from tilewise.core.dtypes import DType, dtype
from tilewise.core.errors import ShapeError
from tilewise.core.frozen import FrozenMap, freeze_maps
from tilewise.core.mesh import Axes
from tilewise.core.validation import Validator, shown
from tilewise.formats import FORMATS, KERNEL_FORMATS, WeightFormat
from tilewise.ir.hints import Hint, as_tensor_layout

__all__ = [
    "METADATA",
    "PANEL_ROWS",
    "Graph",
    "OpNode",
    "Template",
    "TensorFamily",
    "TensorForm",
    "TensorNode",
    "TensorSpec",
]

Label = DimLabel | None
TensorForm = tuple[tuple[Size, ...], DType, tuple[Label, ...], str, int | None]
PANEL_ROWS = 32  # of a packed weight; cuts never separate them, and storage is padded to them
STORAGES = ("rows", "scalars", "packed", "vector", *KERNEL_FORMATS)
INITS = ("normal", "ones", "zeros")
MAX_BYTES = 1 << 60
METADATA = "__metadata__"  # reserved by safetensors files: no tensor may have this name

_validate = Validator("ir", ShapeError)


class TensorFamily:
    """What tensors have in common that differ only in a part of their names. It is stored once.

    Attributes:
        prefix, suffix: the common beginning and end of their names; the part in between differs.

    All other attributes are those of `TensorSpec`, which has checked them.
    """

    __slots__ = (
        "dist_hint",
        "dtype",
        "form",
        "init",
        "init_scale",
        "labels",
        "prefix",
        "shape",
        "storage",
        "suffix",
        "tile_hint",
    )

    def __init__(
        self,
        form: TensorForm,
        init: str,
        init_scale: float,
        prefix: str = "",
        suffix: str = "",
        dist_hint: tuple[Axes, ...] | None = None,
    ) -> None:
        self.form, self.dist_hint = form, dist_hint
        self.shape, self.dtype, self.labels, self.storage, self.tile_hint = form
        self.init, self.init_scale = init, init_scale
        self.prefix, self.suffix = prefix, suffix

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorFamily, (
            self.form,
            self.init,
            self.init_scale,
            self.prefix,
            self.suffix,
            self.dist_hint,
        )

    def member(self, stem: str) -> TensorSpec:
        """The spec of the tensor whose name has this part. The whole name must have been checked
        before.
        """
        spec = _new_spec(TensorSpec)
        _put(spec, "family", self)
        _put(spec, "stem", stem)
        return spec


@dataclass(frozen=True, init=False, eq=False, repr=False)
class TensorSpec:
    """The description of a tensor, without its location.

    Attributes:
        shape: sizes, row-major, last dim fastest.
        dtype: element type.
        labels: per dim, a label that says what the dim counts (`core.dims.DimLabel`), or None.
            Strategies shard dims by label.
        name: a path such as `layers.3.mlp.up_proj.weight`; empty for intermediate results.
        tile_hint: rows per tile, or None for the planner's choice. Tiles of a weight consist of panels
            of 32 rows.
        storage: how elements are stored: `rows` (row-major, all dims but the last count rows),
            `scalars` (all dims count rows of one element), `packed` (a weight's panels), `vector`
            (one row), or the name of a format of quantised weights (`tilewise.formats`; panels of
            blocks, whose numbers have the dtype).
        init: initial values of a parameter: `normal` (random), `ones` or `zeros`.
        init_scale: standard deviation of random values, as a multiple of the standard deviation
            that `initialize` is given.
        dist_hint: the mesh axes per dim that are asked for when a tensor is declared from this spec
            (ir/hints.py); None lets the strategy decide. It belongs to the declaration: copies do not
            have it, and it is not compared.
        form: everything that determines how the tensor is stored and divided: all fields but the
            name and the initial values.

    An object stores a reference to what it has in common with other specs (`family`) and its own
    part of the name (`stem`). This saves memory: deep models have tens of tensors per layer.

    Raises:
        ShapeError: a value has the wrong type or is out of range.
    """

    __slots__ = ("family", "stem")

    shape: tuple[Size, ...]
    dtype: DType
    labels: tuple[Label, ...] = ()
    name: str = ""
    tile_hint: int | None = None
    storage: str = "rows"
    init: str = "normal"
    init_scale: float = 1.0
    form: TensorForm = field(init=False, repr=False, compare=False)

    if TYPE_CHECKING:
        dist_hint: ClassVar[tuple[Axes, ...] | None]
        family: ClassVar[TensorFamily]  # set per object; not fields, because they repeat the others
        stem: ClassVar[str]

    def __init__(
        self,
        shape: Sequence[Size],
        dtype: DType,
        labels: Sequence[Label] = (),
        name: str = "",
        tile_hint: int | None = None,
        storage: str = "rows",
        init: str = "normal",
        init_scale: float = 1.0,
        dist_hint: Hint | None = None,
    ) -> None:
        is_plain = True  # fast: large graphs have many specs
        if type(shape) is not tuple:
            shape = tuple(_validate.sequence("TensorSpec", "a shape", shape, "sizes"))
        for size in shape:
            is_plain = is_plain and type(size) is int and 0 < size <= MAX_SIZE
        if not is_plain:
            shape = tuple(_size(size) for size in shape)
        if type(dtype) is not DType:
            dtype = _dtype(dtype)
        if type(labels) is not tuple:
            labels = tuple(_validate.sequence("TensorSpec", "labels", labels, "labels, one per dim"))
        labels = labels or (None,) * len(shape)
        if not shape or len(labels) != len(shape):
            _validate.invalid(
                "TensorSpec",
                "a tensor must have at least one dim, and a label or None for each",
                f"{len(labels)} labels for shape {shape} of {name!r}",
                "correct one of them",
            )
        for label in labels:
            if label is not None and not isinstance(label, DimLabel):
                _validate.invalid(
                    "TensorSpec", "a label must be a DimLabel or None", shown(label), "wrap it in DimLabel"
                )
        if not isinstance(name, str):
            _validate.invalid("TensorSpec", "a name must be text", shown(name), "pass a str")
        if type(name) is not str:
            name = str.__str__(name)
        if name == METADATA:
            _invalid_metadata_name()
        if tile_hint is not None:
            tile_hint = _validate.integer("TensorSpec", "tile_hint", tile_hint, 1, MAX_SIZE)
            if (storage == "packed" or storage in KERNEL_FORMATS) and tile_hint % PANEL_ROWS:
                rule = f"the tiles of a weight must consist of panels of {PANEL_ROWS} rows"
                _validate.invalid("TensorSpec", rule, f"tile_hint={tile_hint}", "choose a multiple")
        if type(storage) is not str or storage not in STORAGES:
            _validate.choice("TensorSpec", "storage", storage, STORAGES)
        if type(init) is not str or init not in INITS:
            _validate.choice("TensorSpec", "init", init, INITS)
        if type(init_scale) is not float or not 0.0 <= init_scale <= 1e6:
            _validate.number("TensorSpec", "init_scale", init_scale, 0.0, 1e6)
        layout = None if dist_hint is None else as_tensor_layout("TensorSpec", dist_hint, len(shape), name)
        family = TensorFamily((shape, dtype, labels, storage, tile_hint), init, init_scale, dist_hint=layout)
        _put(self, "family", family)
        _put(self, "stem", name)
        elements = prod(shape) if is_plain else prod(upper_bound(size) for size in shape)
        if elements * dtype.itemsize > MAX_BYTES:
            _validate.invalid(
                "TensorSpec", "a tensor may have at most 2**60 bytes", f"{self} {name!r}", "make it smaller"
            )

    @property
    def is_packed(self) -> bool:
        """Whether it is a weight in panels, quantised or not."""
        return self.storage == "packed" or self.storage in KERNEL_FORMATS

    @property
    def format(self) -> WeightFormat | None:
        """The format of a quantised weight; None for other tensors."""
        return FORMATS.get(self.storage)

    @classmethod
    def parameter(cls, shape: tuple[Size, ...], dtype: str | DType, name: str = "", **kw: Any) -> TensorSpec:
        """The spec of a trained tensor. It needs a name."""
        return cls(shape, _dtype(dtype), name=name, **kw)

    @classmethod
    def activation(cls, shape: tuple[Size, ...], dtype: str | DType, **kw: Any) -> TensorSpec:
        """The spec of a computed tensor."""
        return cls(shape, _dtype(dtype), **kw)

    def renamed(self, name: str) -> TensorSpec:
        """The same spec with another name."""
        if type(name) is not str or not name or not name.isprintable():
            _validate.text("TensorSpec", "a name", name)
        if name == METADATA:
            _invalid_metadata_name()
        family = self.family
        if family.prefix or family.suffix:
            family = self.named("", "")
        return family.member(name)

    def named(self, prefix: str, suffix: str) -> TensorFamily:
        """The family of tensors that equal this one except for the part of the name between
        `prefix` and `suffix`.
        """
        return TensorFamily(self.form, self.init, self.init_scale, prefix, suffix, self.dist_hint)

    def __eq__(self, other: object) -> bool:
        if type(other) is not TensorSpec:
            return NotImplemented
        return self is other or _compared(self) == _compared(other)

    def __hash__(self) -> int:
        return hash((self.form, self.name))

    def __repr__(self) -> str:
        shown_fields = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
        return f"TensorSpec({', '.join(shown_fields)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the fields; unpickling does not check them again."""
        return _member, (self.family, self.stem)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(s) for s in self.shape)}]"


_dtype = dtype
_put = object.__setattr__  # for new objects, which are frozen afterwards
_new_spec = object.__new__
_compared = attrgetter("form", "name", "init", "init_scale")
_member = TensorFamily.member


def _name_of(spec: TensorSpec) -> str:
    family = spec.family
    return f"{family.prefix}{spec.stem}{family.suffix}"


TensorSpec.name = property(_name_of)  # type: ignore[assignment]
for _shared in (
    "shape",
    "dtype",
    "labels",
    "tile_hint",
    "storage",
    "init",
    "init_scale",
    "form",
    "dist_hint",
):
    setattr(TensorSpec, _shared, property(attrgetter(f"family.{_shared}")))


def _invalid_metadata_name() -> NoReturn:
    _validate.invalid(
        "TensorSpec",
        "a tensor's name must not be one that files of weights reserve",
        repr(METADATA),
        "rename it",
    )


def _size(size: object) -> Size:
    """One entry of a shape: a positive integer or a symbol."""
    return size if isinstance(size, Dim) else _validate.integer("TensorSpec", "a size", size, 1, MAX_SIZE)


class _Operators:
    """The operators of tensors: calls of the builder that made them.

    Attributes:
        owner: the `GraphBuilder`. Tensors of frozen graphs have none.
    """

    __slots__ = ("owner",)
    owner: Any

    __array_ufunc__ = None  # NumPy leaves operators to the tensor
    __iter__ = None

    def _builder(self) -> Any:
        owner = getattr(self, "owner", None)
        if owner is None:
            spec = self.spec  # type: ignore[attr-defined]
            _validate.invalid(
                "operator",
                "operators need a tensor of a graph that is being defined",
                f"{spec} {spec.name!r} of a frozen one",
                "use the tensor that a call of the graph returned",
            )
        return owner

    def __add__(self, other: Any) -> TensorNode:
        return self._builder().add(self, other)  # type: ignore[no-any-return]

    def __radd__(self, other: Any) -> TensorNode:
        return self._builder().add(other, self)  # type: ignore[no-any-return]

    def __sub__(self, other: Any) -> TensorNode:
        return self._builder().sub(self, other)  # type: ignore[no-any-return]

    def __rsub__(self, other: Any) -> TensorNode:
        return self._builder().sub(other, self)  # type: ignore[no-any-return]

    def __mul__(self, other: Any) -> TensorNode:
        return self._builder().mul(self, other)  # type: ignore[no-any-return]

    def __rmul__(self, other: Any) -> TensorNode:
        return self._builder().mul(other, self)  # type: ignore[no-any-return]

    def __truediv__(self, other: Any) -> TensorNode:
        return self._builder().div(self, other)  # type: ignore[no-any-return]

    def __rtruediv__(self, other: Any) -> TensorNode:
        return self._builder().div(other, self)  # type: ignore[no-any-return]

    def __matmul__(self, other: Any) -> TensorNode:
        return self._builder().matmul(self, other)  # type: ignore[no-any-return]

    def __pow__(self, exponent: Any) -> TensorNode:
        return self._builder().pow(self, exponent)  # type: ignore[no-any-return]

    def __gt__(self, other: Any) -> TensorNode:
        return self._builder().greater(self, other)  # type: ignore[no-any-return]

    def __lt__(self, other: Any) -> TensorNode:
        return self._builder().greater(other, self)  # type: ignore[no-any-return]

    def __neg__(self) -> TensorNode:
        return self._builder().mul(self, -1.0)  # type: ignore[no-any-return]

    def __getitem__(self, index: Any) -> TensorNode:
        return self._builder().index(self, index)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class TensorNode(_Operators):
    """A tensor of a graph. `producer` is the op that computes it; None for inputs, parameters,
    states and constants.

    `kind` is one of `input`, `parameter`, `state`, `constant`, `result`.

    A tensor that a builder returned has operators, which append ops to the builder's graph: `a + b`,
    `2 * a`, `a @ b`, `-a`, `a ** 2`, `a > b`, `x[:, 1:]`. They are the calls `add`, `mul`, `matmul`,
    `pow`, `greater` and `slice` of `GraphBuilder`. `a == b` asks whether both are one tensor. In an
    index, an integer selects and drops a dim, `...` stands for the dims that are not named, and `None`
    adds a dim of size 1; steps must be 1.
    """

    id: int
    spec: TensorSpec
    kind: str
    producer: int | None = None

    @classmethod
    def of_builder(
        cls, owner: object, id: int, spec: TensorSpec, kind: str, producer: int | None = None
    ) -> TensorNode:
        """A tensor whose operators append ops to a builder's graph."""
        node = cls(id, spec, kind, producer)
        _put(node, "owner", owner)
        return node

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the fields, several times faster than the default of dataclasses with slots."""
        return TensorNode, (self.id, self.spec, self.kind, self.producer)

    @property
    def shape(self) -> tuple[Size, ...]:
        """Sizes of the tensor."""
        return self.spec.shape


@dataclass(frozen=True, slots=True)
class OpNode:
    """One operation. `op` is the name of a registered op, inputs and outputs are ids of tensors,
    and `attrs` is hashable.
    """

    id: int
    op: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    phase: str = "forward"
    label: str = ""

    def __post_init__(self) -> None:
        if type(self.attrs) is not FrozenMap:
            _put(self, "attrs", FrozenMap(self.attrs))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the fields, like `TensorNode`."""
        return OpNode, (self.id, self.op, self.inputs, self.outputs, self.attrs, self.phase, self.label)

    @property
    def given(self) -> tuple[int, ...]:
        """The inputs that are not absent."""
        return tuple(i for i in self.inputs if i is not None)


@dataclass(frozen=True)
class Graph:
    """A frozen graph.

    Attributes:
        inputs / parameters / states / constants: ids of the tensors of each kind, in the order of
            declaration.
        outputs: name -> tensor id.
        k_splits: number of parts into which a contraction over a labelled dim is cut
            (docs/numerics.md, rule 2).
        constant_values: values of constants (NumPy arrays), by tensor id.
        templates: templates that `call` ops of this graph use, by key.
        hints: layouts that users ask for, by tensor id: mesh axes per dim, major first. Hints
            change no bit of a result.
        frozen: ids of parameters that training does not change, in ascending order.
    """

    name: str
    tensors: tuple[TensorNode, ...]
    ops: tuple[OpNode, ...]
    outputs: Mapping[str, int]
    k_splits: int = 8
    constant_values: Mapping[int, Any] = field(default_factory=dict)
    templates: Mapping[str, Template] = field(default_factory=dict)
    hints: Mapping[int, tuple[Axes, ...]] = field(default_factory=dict)
    frozen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        values = FrozenMap({tensor: _read_only(value) for tensor, value in self.constant_values.items()})
        _put(self, "constant_values", values)
        freeze_maps(self, "outputs", "templates", "hints")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        plain = (f.name for f in fields(self) if f.name != "constant_values")
        return self._constant_bits() == other._constant_bits() and all(
            getattr(self, name) == getattr(other, name) for name in plain
        )

    @cached_property
    def cache(self) -> dict[int, Any]:
        """Values that functions of the graph have computed, by op id. They are not part of the
        graph.
        """
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the graph without `cache`."""
        return Graph, tuple(getattr(self, f.name) for f in fields(self))

    def _constant_bits(self) -> dict[int, tuple[object, ...]]:
        """The bytes of constants, for comparison. Comparing two arrays would give an array, not a
        truth value.
        """
        return {t: (v.dtype, v.shape, v.tobytes()) for t, v in self.constant_values.items()}

    def of_kind(self, kind: str) -> list[TensorNode]:
        """Tensors of one kind, in order of declaration."""
        return [t for t in self.tensors if t.kind == kind]

    def trainable(self) -> list[TensorNode]:
        """Parameters that training changes, in order of declaration."""
        frozen = {*self.frozen}
        return [t for t in self.of_kind("parameter") if t.id not in frozen]

    def spec(self, tensor: int) -> TensorSpec:
        """The spec of a tensor, by id."""
        return self.tensors[tensor].spec

    def with_layers(self) -> list[Graph]:
        """This graph, then the graphs of its layers, also of layers within layers, each once."""
        graphs = {id(self): self}
        ahead = [self]
        for graph in ahead:
            new = {id(t.graph): t.graph for t in graph.templates.values() if id(t.graph) not in graphs}
            graphs |= new
            ahead += new.values()
        return ahead


def _read_only(value: Any) -> Any:
    """A read-only array. Pickling or copying an array would make it writable again."""
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value = value.view()
        value.flags.writeable = False
    return value


@dataclass(frozen=True)
class Template:
    """The structure of a repeated layer: a graph with an ordered interface.

    A `call` op binds `arguments` (tensor ids of `graph`: inputs, constants, parameters, states, in
    this order) to tensors of the calling graph, and `results` to its outputs.
    """

    key: str
    graph: Graph
    arguments: tuple[int, ...]
    results: tuple[int, ...]
