"""Describing a graph: `GraphBuilder` checks every call at once and keeps equal nodes only once.

What it makes is `ir.Graph`; gradients, passes and layouts work on that. Names of parameters come from the caller's
path, never from a counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

import tilewise.graph.ops  # noqa: F401  (registers the ops)
from tilewise.core.border import Border, shown
from tilewise.core.dims import DimLabel, Size, is_power_of_two
from tilewise.core.dtypes import DType, dtype
from tilewise.core.errors import ShapeError
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode, TensorSpec
from tilewise.ir.op import check_call, op_named

__all__ = ["INV_COUNT", "GraphBuilder"]

INV_COUNT = "loss.inv_count"
OPTIMIZER = "optimizer."
MAX_CHUNKS = 1024

_border = Border("graph", ShapeError)

Labels = Sequence[DimLabel | None]


class GraphBuilder:
    """A graph under construction.

    Args:
        name: for messages and pictures.
        reduction_chunks: C, the number of chunks that contractions over labelled dims are cut into: a power of two,
            and the largest number of devices that may share such a dim in exact mode.

    Shapes: sizes are `int` or `Dim`; row-major, last dim fastest. Every operation raises ShapeError at the call, with
    the operands' shapes, when they do not fit, are of another type, or belong to another graph.
    """

    def __init__(self, name: str = "graph", *, reduction_chunks: int = 8) -> None:
        self.name = _border.text("GraphBuilder", "a graph's name", name)
        self.reduction_chunks = _border.integer(
            "GraphBuilder", "reduction_chunks", reduction_chunks, 1, MAX_CHUNKS
        )
        if not is_power_of_two(self.reduction_chunks):
            _border.refuse(
                "GraphBuilder", "reduction_chunks must be a power of two", str(reduction_chunks), "choose 8"
            )
        self.tensors: list[TensorNode] = []
        self.ops: list[OpNode] = []
        self.outputs: dict[str, int] = {}
        self.constant_values: dict[int, Any] = {}
        self.templates: dict[str, Template] = {}
        self.layers: dict[
            str, tuple[object, Mapping[str, Any]]
        ] = {}  # template -> its function and attributes
        self.phase = "forward"
        self.loss_id: int | None = None
        self._names: dict[str, int] = {}
        self._cache: dict[Any, tuple[int, ...]] = {}

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """A block whose declarations and ops stay together: when it raises, none of them has happened."""
        tensors, ops = len(self.tensors), len(self.ops)
        outputs, templates, layers = dict(self.outputs), dict(self.templates), dict(self.layers)
        loss_id = self.loss_id
        try:
            yield
        except BaseException:
            del self.tensors[tensors:], self.ops[ops:]
            self.outputs, self.templates, self.layers = outputs, templates, layers
            self.loss_id = loss_id
            self._names = {name: i for name, i in self._names.items() if i < tensors}
            self.constant_values = {i: v for i, v in self.constant_values.items() if i < tensors}
            self._cache = {key: ids for key, ids in self._cache.items() if all(i < tensors for i in ids)}
            raise

    # ---- tensors from outside -----------------------------------------------------------------------------

    def _outside(self, kind: str, spec: TensorSpec) -> TensorNode:
        _border.text(kind, "a name", spec.name)
        if spec.name in self._names or spec.name in self.outputs:
            _border.refuse(kind, "names must be unique", f"{spec.name!r}, which is taken", "rename it")
        if spec.name.startswith(OPTIMIZER) and self.phase != "update":
            _border.refuse(kind, f"names in {OPTIMIZER!r} are the optimizer's", repr(spec.name), "rename it")
        for dim, label in enumerate(spec.labels):
            if label is not None and label.is_batch and (dim > 0 or kind not in ("input", "constant")):
                _border.refuse(
                    kind,
                    f"{label.name!r} labels dim 0 of inputs and constants",
                    f"dim {dim} of {kind} {spec.name!r}",
                    "transpose it, or choose another label",
                )
        node = TensorNode(len(self.tensors), spec, kind)
        self.tensors.append(node)
        self._names[spec.name] = node.id
        return node

    def input(
        self,
        shape: Sequence[Size],
        dtype: str | DType = "f32",
        *,
        name: str,
        labels: Labels = (),
        storage: str = "rows",
    ) -> TensorNode:
        """A tensor given at every call; `storage="scalars"` for one number per row (ids, labels, positions)."""
        return self._outside("input", _spec("input", shape, dtype, labels, name, storage))

    def parameter(
        self,
        shape: Sequence[Size],
        dtype: str | DType = "f32",
        *,
        name: str,
        labels: Labels = (),
        init_scale: float = 1.0,
    ) -> TensorNode:
        """A trained tensor: a vector, or a weight `[out, in]` or `[in, out]`, which is kept in packed panels.

        Args:
            shape: one or two sizes.
            dtype: of its elements.
            name: its path.
            labels: per dim what it counts, or None.
            init_scale: of a weight: how far its random values spread, as a multiple of the other weights' spread.
        """
        spec = _spec("parameter", shape, dtype, labels, name, "rows")
        if len(spec.shape) > 2 or not all(isinstance(s, int) for s in spec.shape) or spec.dtype.name == "i32":
            _border.refuse(
                "parameter",
                "a parameter has one or two fixed dims of f32 or bf16",
                f"{spec} {name!r}",
                "reshape it",
            )
        return self._outside(
            "parameter",
            replace(spec, storage="packed" if len(spec.shape) == 2 else "vector", init_scale=init_scale),
        )

    def state(
        self,
        shape: Sequence[Size],
        dtype: str | DType = "f32",
        *,
        name: str,
        labels: Labels = (),
        storage: str = "rows",
    ) -> TensorNode:
        """A tensor that lives on between calls and is written in place (a KV cache, optimizer moments)."""
        spec = _spec("state", shape, dtype, labels, name, storage)
        if not all(isinstance(s, int) for s in spec.shape):
            _border.refuse(
                "state", "a state has fixed dims", f"{spec} for {name!r}", "give it its largest size"
            )
        return self._outside("state", spec)

    def constant(
        self, value: np.ndarray, *, name: str, labels: Labels = (), storage: str = "rows"
    ) -> TensorNode:
        """A tensor whose value is known now: RoPE tables, positions."""
        known = {np.dtype(np.float32): "f32", np.dtype(np.int32): "i32"}
        if not isinstance(value, np.ndarray) or value.dtype not in known:
            _border.refuse(
                "constant",
                "a constant is an array of float32 or int32",
                f"{shown(value)}, {name!r}",
                "cast it",
            )
        node = self._outside(
            "constant", _spec("constant", value.shape, known[value.dtype], labels, name, storage)
        )
        self.constant_values[node.id] = value.copy()  # the caller may go on with its own
        return node

    def output(self, tensor: TensorNode, name: str) -> TensorNode:
        """Make a result readable by name after a run."""
        self._own("output", tensor)
        _border.text("output", "an output's name", name)
        if name in self.outputs or self._names.get(name, tensor.id) != tensor.id:
            _border.refuse("output", "output names must be unique", f"{name!r}, which is taken", "rename it")
        self.outputs[name] = tensor.id
        return tensor

    def output_id(self, tensor: int, name: str) -> None:
        """`output` by tensor id."""
        self.output(
            self.tensors[_border.integer("output_id", "an id", tensor, 0, len(self.tensors) - 1)], name
        )

    # ---- operations ---------------------------------------------------------------------------------------

    def _own(self, call: str, tensor: TensorNode) -> TensorNode:
        """A tensor of this graph; another graph's would stand for whatever has its number here."""
        _border.instance(
            call, "an operand", tensor, TensorNode, "pass tensors of the graph, as its methods return them"
        )
        if tensor.id >= len(self.tensors) or self.tensors[tensor.id] is not tensor:
            _border.refuse(
                call,
                "operands must belong to the graph",
                f"{tensor.spec} {tensor.spec.name!r} of another",
                "make it here",
            )
        return tensor

    def op(self, name: str, inputs: Sequence[TensorNode | None], **attrs: Any) -> list[TensorNode]:
        """Append an op by name; equal ops on equal operands are the same op.

        Raises:
            ShapeError: the call does not follow the op's signature, or its operands do not fit together.
        """
        operands = _border.sequence("op", "operands", inputs, "tensors")
        checked = check_call(name, operands, attrs)
        ids = tuple(None if t is None else self._own(name, t).id for t in operands)
        return [self.tensors[i] for i in self.op_on_ids(name, ids, checked)]

    def op_on_ids(self, name: str, ids: tuple[int | None, ...], attrs: Mapping[str, Any]) -> tuple[int, ...]:
        """`op` on tensor ids and attributes that are known to follow its signature."""
        key = (name, ids, tuple(sorted(attrs.items())), self.phase)
        if key in self._cache:
            return self._cache[key]
        given = [None if i is None else self.tensors[i].spec for i in ids]
        _refuse_packed(name, given, attrs)
        specs = op_named(name).infer(given, attrs)
        outputs = self.append(name, ids, specs, attrs)
        self._cache[key] = outputs
        return outputs

    def append(
        self,
        name: str,
        ids: tuple[int | None, ...],
        specs: Sequence[TensorSpec],
        attrs: Mapping[str, Any],
        *,
        label: str = "",
    ) -> tuple[int, ...]:
        """Append an op whose output specs are known."""
        op_id, first = len(self.ops), len(self.tensors)
        self.tensors += [TensorNode(first + i, s, "result", op_id) for i, s in enumerate(specs)]
        outputs = tuple(range(first, len(self.tensors)))
        self.ops.append(
            OpNode(op_id, name, ids, outputs, dict(attrs), self.phase, label or self._label(name, ids))
        )
        return outputs

    def _label(self, name: str, ids: tuple[int | None, ...]) -> str:
        """The parameter an op works with is its best name in traces and messages."""
        for i in ids:
            if i is not None and self.tensors[i].kind in ("parameter", "state"):
                return f"{name}:{self.tensors[i].spec.name}"
        return name

    def matmul(
        self,
        a: TensorNode,
        b: TensorNode,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        residual: TensorNode | None = None,
    ) -> TensorNode:
        """`a @ b`, with either transposed. `b` may be a parameter (`a` then `[..., k]`, and `residual` is added).

        Raises:
            ShapeError: inner sizes or dtypes differ.
        """
        self._own("matmul", a)
        if self._own("matmul", b).kind == "parameter":
            if _border.truth("matmul", "transpose_a", transpose_a):
                _border.refuse(
                    "matmul",
                    "the rows of x count against a weight as they are",
                    f"transpose_a with {a.spec}, {b.spec}",
                    "transpose the weight instead",
                )
            inputs = [a, b] + ([residual] if residual is not None else [])
            return self.op(
                "linear", inputs, num_terms=1, transpose=transpose_b, residual=residual is not None
            )[0]
        out = self.op("matmul", [a, b], transpose_a=transpose_a, transpose_b=transpose_b)[0]
        return out if residual is None else self.add(out, residual)

    def add(self, a: TensorNode, b: TensorNode) -> TensorNode:
        """`a + b`."""
        return self.op("add", [a, b])[0]

    def multiply(self, a: TensorNode, b: TensorNode) -> TensorNode:
        """`a * b`."""
        return self.op("multiply", [a, b])[0]

    def scale(self, x: TensorNode, factor: float) -> TensorNode:
        """`factor * x`."""
        return self.op("scale", [x], factor=factor)[0]

    def silu(self, x: TensorNode) -> TensorNode:
        """`x * sigmoid(x)`."""
        return self.op("silu", [x])[0]

    def softmax(self, x: TensorNode) -> TensorNode:
        """Softmax over the last dim."""
        return self.op("softmax", [x])[0]

    def cast(self, x: TensorNode, dtype: str) -> TensorNode:
        """`x` as `f32` or `bf16`."""
        return self.op("cast", [x], dtype=_dtype(dtype).name)[0]

    def rms_norm(self, x: TensorNode, gamma: TensorNode, *, eps: float = 1e-6) -> TensorNode:
        """`x / sqrt(mean(x²) + eps) * gamma` over the last dim."""
        return self.op("rms_norm", [x, gamma], eps=eps)[0]

    def embedding(self, ids: TensorNode, table: TensorNode) -> TensorNode:
        """Rows of `table` `[vocab, hidden]` at `ids` (i32)."""
        return self.op("embedding", [ids, table])[0]

    def rope(self, x: TensorNode, positions: TensorNode, table: TensorNode, *, head_dim: int) -> TensorNode:
        """Rotary embedding of heads side by side in the last dim; `table` holds cosines and sines per position."""
        return self.op("rope", [x, positions, table], head_dim=head_dim, inverse=False)[0]

    def scaled_dot_product_attention(
        self,
        q: TensorNode,
        k: TensorNode,
        v: TensorNode,
        *,
        head_dim: int,
        causal: bool = True,
        scale: float | None = None,
    ) -> TensorNode:
        """Self-attention on `[batch, seq, heads * head_dim]`; grouped when k and v have fewer heads."""
        attrs = {"head_dim": head_dim, "causal": causal, "scale": _attention_scale(scale, head_dim)}
        return self.op("attention", [q, k, v], **attrs)[0]

    def paged_attention(
        self,
        q: TensorNode,
        k_cache: TensorNode,
        v_cache: TensorNode,
        positions: TensorNode,
        sequence: TensorNode,
        block_table: TensorNode,
        *,
        head_dim: int,
        block_size: int = 64,
        scale: float | None = None,
    ) -> TensorNode:
        """Causal attention of flattened tokens over a KV cache in blocks."""
        attrs = {"head_dim": head_dim, "block_size": block_size, "scale": _attention_scale(scale, head_dim)}
        return self.op("attention_paged", [q, k_cache, v_cache, positions, sequence, block_table], **attrs)[0]

    def kv_write(self, cache: TensorNode, x: TensorNode, slots: TensorNode) -> TensorNode:
        """The cache with rows of `x` written at `slots` (in place); use the result from here on."""
        return self.op("kv_write", [cache, x, slots])[0]

    def gather_rows(self, x: TensorNode, index: TensorNode) -> TensorNode:
        """Rows of `x` `[T, d]` at `index` `[S]`."""
        return self.op("gather_rows", [x, index])[0]

    def cross_entropy(
        self, logits: TensorNode, labels: TensorNode, inv_count: TensorNode, *, ignore_index: int = -100
    ) -> tuple[TensorNode, TensorNode]:
        """Mean cross-entropy `[1]` and every row's share of it; `inv_count` is 1 / number of counted labels."""
        loss, rows, *_ = self.op("cross_entropy", [logits, labels, inv_count], ignore_index=ignore_index)
        return loss, rows

    def mean_cross_entropy(
        self, logits: TensorNode, labels: TensorNode, *, ignore_index: int = -100
    ) -> tuple[TensorNode, TensorNode]:
        """`cross_entropy` whose `inv_count` is the input `loss.inv_count`, filled from the labels at every step."""
        self._own("mean_cross_entropy", labels)
        if labels.kind != "input":
            _border.refuse(
                "mean_cross_entropy",
                "labels are counted at every step: an input",
                f"a {labels.kind}",
                "pass an input",
            )
        with self.all_or_nothing():
            spec = TensorSpec((1,), _dtype("f32"), name=INV_COUNT, storage="vector")
            inv_count = self._outside("input", spec)
            return self.cross_entropy(logits, labels, inv_count, ignore_index=ignore_index)

    def loss(self, tensor: TensorNode) -> TensorNode:
        """Declare the loss `[1]`; planning appends its backward pass. It is read as output `loss`.

        Raises:
            ShapeError: the tensor is no loss.
        """
        self._own("loss", tensor)
        producer = self.ops[tensor.producer].op if tensor.producer is not None else tensor.kind
        if producer != "cross_entropy" or tensor.shape != (1,):
            raise ShapeError(
                f"[graph.loss] a loss comes from cross_entropy; got {tensor.spec} from {producer}; call it"
            )
        self.loss_id = tensor.id
        return self.output(tensor, "loss")

    # ---- the finished thing -------------------------------------------------------------------------------

    def find(self, name: str) -> TensorNode:
        """The input, parameter, state or constant of that name.

        Raises:
            ShapeError: there is none.
        """
        _border.text("find", "a tensor's name", name)
        if name not in self._names:
            raise ShapeError(
                f"[graph.find] the graph must have the tensor; got {name!r}; it has {', '.join(self._names)}"
            )
        return self.tensors[self._names[name]]

    def has(self, name: str) -> bool:
        """Whether a tensor from outside has that name."""
        return isinstance(name, str) and name in self._names

    def freeze(self) -> Graph:
        """The graph as data."""
        return Graph(
            self.name,
            tuple(self.tensors),
            tuple(self.ops),
            dict(self.outputs),
            self.reduction_chunks,
            dict(self.constant_values),
            dict(self.templates),
        )

    @classmethod
    def thaw(cls, graph: Graph) -> GraphBuilder:
        """A builder that continues a frozen graph; tensor ids stay."""
        builder = cls(graph.name, reduction_chunks=graph.reduction_chunks)
        builder.tensors, builder.ops = list(graph.tensors), list(graph.ops)
        builder.outputs, builder.constant_values = dict(graph.outputs), dict(graph.constant_values)
        builder.templates = dict(graph.templates)
        builder._names = {t.spec.name: t.id for t in graph.tensors if t.spec.name}
        return builder


_dtype = dtype


def _spec(
    call: str, shape: Sequence[Size], dtype: str | DType, labels: Labels, name: str, storage: str
) -> TensorSpec:
    if isinstance(name, str) and name == INV_COUNT:
        _border.refuse(
            call, f"{INV_COUNT!r} is mean_cross_entropy's own", "another of that name", "rename it"
        )
    sizes = tuple(_border.sequence(call, "a shape", shape, "sizes"))
    kinds = tuple(_border.sequence(call, "labels", labels, "labels"))
    return TensorSpec(sizes, _dtype(dtype), kinds, name, storage=storage)


def _attention_scale(scale: float | None, head_dim: int) -> float:
    """What scores are multiplied by: one over the root of the head size unless something else is asked for."""
    if scale is not None:
        return _border.number("attention", "scale", scale)
    return float(_border.integer("attention", "head_dim", head_dim, 1, 1 << 20) ** -0.5)


def _refuse_packed(name: str, given: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> None:
    """Weights lie in panels; only ops that say so can read them."""
    takes = getattr(op_named(name), "takes_packed", lambda position, attrs: False)
    for position, spec in enumerate(given):
        if spec is not None and spec.storage == "packed" and not takes(position, attrs):
            raise ShapeError(
                f"[graph.{name}] operand {position} must be a result, not a weight; got {spec} {spec.name!r}; "
                "weights go into matmul, embedding and elementwise ops among themselves"
            )
