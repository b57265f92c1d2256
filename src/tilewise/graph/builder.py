"""`GraphBuilder`: defines a graph with one method per kind of tensor and per op. Each call is
checked at once.

Calls add nodes to a `GraphDraft`, which becomes an `ir.Graph`. Gradients, passes and layouts work
on the `ir.Graph`. Names of parameters come from the caller's path, never from a counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import tilewise.graph.ops  # noqa: F401  (registers the ops)
from tilewise.core.dims import MAX_SIZE, Dim, DimLabel, Size
from tilewise.core.dtypes import DType
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import ShapeError
from tilewise.core.tree import MAX_COUNT
from tilewise.core.validation import Validator, shown
from tilewise.graph.composed import ComposedMethods, attention_scores
from tilewise.graph.draft import GraphDraft
from tilewise.graph.methods import is_dropout_key
from tilewise.ir.graph import Graph, TensorNode, TensorSpec
from tilewise.ir.hints import Hint, as_tensor_layout
from tilewise.ir.op import check_call

__all__ = ["INV_COUNT", "POSITIONS", "SEED", "GraphBuilder", "is_own_name"]

INV_COUNT = "loss.inv_count"
SEED = "loss.seed"  # the gradient of the loss with respect to itself: 1
POSITIONS = (
    "rows.positions"  # each row's position in its sequence, if the sequence length varies between runs
)

_validate = Validator("graph", ShapeError)

Labels = Sequence[DimLabel | None]
_USUAL_K_SPLITS = 8


def is_own_name(name: str) -> bool:
    """Whether a name is that of an input that the framework declares and computes itself."""
    return name in (INV_COUNT, POSITIONS) or is_dropout_key(name)


class GraphBuilder(ComposedMethods):
    """Builds a graph.

    Args:
        name: the graph's name in messages and pictures.
        k_splits: number of parts into which contractions over labelled dims are cut (as in
            split-K). n devices may share such a dim if n is 1 or k_splits / n is a power of two.
            With 8 k splits, n may be 1, 2, 4 or 8; with 12 k splits, n may be 1, 3, 6 or 12, and 2
            with unequal shares. None: what the model prefers, or 8.

    Shapes: sizes are `int` or `Dim`; row-major, last dim fastest. Every call raises ShapeError if
    its operands do not fit, have the wrong type, or belong to another graph. The message contains
    the operands' shapes. Only one thread at a time may use a builder; `ParallelGraphBuilder`
    defines layers in several threads.
    """

    def __init__(self, name: str = "graph", *, k_splits: int | None = None) -> None:
        self.name = _validate.text("GraphBuilder", "a graph's name", name)
        self._is_chosen = k_splits is not None
        k_splits = _USUAL_K_SPLITS if k_splits is None else k_splits
        self.k_splits = _validate.integer("GraphBuilder", "k_splits", k_splits, 1, MAX_COUNT)
        self.draft = GraphDraft(self)

    def prefer_k_splits(self, number: int) -> None:
        """Set the number of k splits, unless the builder's author has chosen one. A model calls this
        before it defines an op.

        Raises:
            ShapeError: the number is out of range.
        """
        number = _validate.integer("prefer_k_splits", "number", number, 1, MAX_COUNT)
        if not self._is_chosen:
            self.k_splits = number

    # ---- tensors from outside -----------------------------------------------------------------------------

    def input(
        self,
        shape: Sequence[Size] | TensorSpec,
        dtype: str | DType = "f32",
        name: str = "",
        *,
        labels: Labels = (),
        storage: str = "rows",
        layout: Hint | None = None,
        tile_hint: int | None = None,
    ) -> TensorNode:
        """Declare a tensor whose value is given at every call.

        Args:
            shape: sizes, or a `TensorSpec`, which then says everything but the name and the layout.
            dtype: element type.
            name: the input's name.
            labels: per dim, a label that says what the dim counts, or None.
            storage: `"scalars"` for a tensor with one number per row (ids, labels, positions).
            layout: the mesh axes that shard the tensor's dims (ir/hints.py). By default, that of the
                `TensorSpec`, or the strategy's rules decide.
            tile_hint: rows per tile.
        """
        return self._declare("input", _spec("input", shape, dtype, labels, name, storage, tile_hint), layout)

    def parameter(
        self,
        shape: Sequence[Size] | TensorSpec,
        dtype: str | DType = "f32",
        name: str = "",
        *,
        labels: Labels = (),
        init: str | None = None,
        init_scale: float = 1.0,
        layout: Hint | None = None,
        tile_hint: int | None = None,
    ) -> TensorNode:
        """Declare a trained tensor: a vector, or a weight `[out, in]` or `[in, out]`, which is
        stored in packed panels.

        Args:
            shape: one or two sizes, or a `TensorSpec`, which then says everything but name, initial
                values and layout.
            dtype: element type.
            name: the parameter's path.
            labels: per dim, a label that says what the dim counts, or None.
            init: initial values: `normal`, `ones` or `zeros`; by default random weights, and ones
                for vectors.
            init_scale: standard deviation of random values, as a multiple of that of other weights.
            layout: as in `input`.
            tile_hint: rows per tile; for a weight a multiple of 32.
        """
        spec = _spec("parameter", shape, dtype, labels, name, "rows", tile_hint)
        if len(spec.shape) > 2 or not all(isinstance(s, int) for s in spec.shape) or spec.dtype.name == "i32":
            _validate.invalid(
                "parameter",
                "a parameter must have one or two fixed dims of f32 or bf16",
                f"{spec} {name!r}",
                "declare it with one or two dims, for example [out, in]",
            )
        storage = "packed" if len(spec.shape) == 2 else "vector"
        first = init if init is not None else {"packed": "normal", "vector": "ones"}[storage]
        layout = spec.dist_hint if layout is None else layout
        spec = replace(spec, storage=storage, init=first, init_scale=init_scale)
        return self._declare("parameter", spec, layout)

    def state(
        self,
        shape: Sequence[Size],
        dtype: str | DType = "f32",
        *,
        name: str,
        labels: Labels = (),
        storage: str = "rows",
        layout: Hint | None = None,
    ) -> TensorNode:
        """Declare a tensor that persists between calls and is written in place (a KV cache,
        optimizer moments). `layout` is as in `input`.
        """
        spec = _spec("state", shape, dtype, labels, name, storage, None)
        if not all(isinstance(s, int) for s in spec.shape):
            _validate.invalid(
                "state", "a state must have fixed dims", f"{spec} for {name!r}", "give it its largest size"
            )
        return self._declare("state", spec, layout)

    def constant(
        self, value: np.ndarray, name: str, *, labels: Labels = (), storage: str = "rows"
    ) -> TensorNode:
        """Declare a tensor whose value is known now, such as RoPE tables."""
        dtypes = {np.dtype(np.float32): "f32", np.dtype(np.int32): "i32"}
        if not isinstance(value, np.ndarray) or value.dtype not in dtypes or np.ma.is_masked(value):
            _validate.invalid(
                "constant",
                "a constant must be an array of float32 or int32 without a mask",
                f"{shown(value)}, {name!r}",
                "convert it with .astype(np.float32) or .astype(np.int32), and fill masked elements",
            )
        spec = _spec("constant", value.shape, dtypes[value.dtype], labels, name, storage, None)
        _require_batch_first("constant", spec)
        node = self.draft.declare("constant", spec)
        copy = np.array(value, order="C")  # the caller may change its own array
        copy.flags.writeable = False
        self.draft.constant_values[node.id] = copy
        return node

    def positions(self, tokens: TensorNode) -> TensorNode:
        """The position of each row in its sequence, from 0: i32, with the shape `[batch, seq]` of
        the tokens.

        If `seq` is fixed, the result is a constant. If `seq` is symbolic, the instance computes the
        positions at every run.

        Raises:
            ShapeError: the tokens belong to another graph or do not have two dims, or the graph
                already has positions.
        """
        spec = self.draft.own("positions", tokens).spec
        batch, length = (*spec.shape, 1, 1)[:2]
        if len(spec.shape) != 2 or isinstance(batch, Dim):
            _validate.invalid(
                "positions", "tokens must be [batch, seq]", f"{spec}", "declare them with two dims"
            )
        name = POSITIONS if isinstance(length, Dim) else "positions"
        if self.has(name):
            _validate.invalid(
                "positions",
                f"a graph may have only one tensor {name!r}",
                f"a second one for {spec}; the first is {self.find(name).spec}",
                f"use graph.find({name!r}) if it has the tokens' shape, otherwise your own i32 input or constant",
            )
        if not isinstance(length, Dim):
            value = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
            return self.constant(value, name=name, labels=spec.labels, storage="scalars")
        own = TensorSpec(spec.shape, dtype_named("i32"), spec.labels, name, storage="scalars")
        return self.draft.declare("input", own)

    def constrain(self, tensor: TensorNode, layout: Hint) -> TensorNode:
        """Ask for a layout of a tensor, and return the tensor. The layout changes where results are
        computed and what is transferred, but no bit of a result.

        Args:
            layout: `("dp", None, "tp")`, or `{"dp": Shard(0), "tp": Replicate()}` (ir/hints.py).
                Axes that a mesh does not have are ignored.

        Raises:
            LayoutError: `layout` is not a layout of the tensor.
            ShapeError: the tensor belongs to another graph.
        """
        self.draft.own("constrain", tensor)
        name = tensor.spec.name or f"result {tensor.id}"
        self.draft.hint(tensor.id, as_tensor_layout("constrain", layout, len(tensor.shape), name))
        return tensor

    def _declare(self, kind: str, spec: TensorSpec, layout: Hint | None) -> TensorNode:
        _require_batch_first(kind, spec)
        with self.all_or_nothing():
            node = self.draft.declare(kind, spec)
            layout = spec.dist_hint if layout is None else layout
            return node if layout is None else self.constrain(node, layout)

    def output(self, tensor: TensorNode, name: str) -> TensorNode:
        """Make a result readable by name after a run."""
        self.draft.own("output", tensor)
        _validate.text("output", "an output's name", name)
        self.draft.name_output(name, tensor.id)
        return tensor

    # ---- operations ---------------------------------------------------------------------------------------

    def op(self, name: str, inputs: Sequence[TensorNode | None], **attrs: Any) -> list[TensorNode]:
        """Append an op by name, and return its outputs. If an equal op on the same operands exists,
        return the outputs of that op.

        Raises:
            ShapeError: the call does not match the op's signature, or its operands do not fit
                together.
        """
        operands = _validate.sequence("op", "operands", inputs, "tensors")
        checked = check_call(name, operands, attrs)
        ids = tuple(None if t is None else self.draft.own(name, t).id for t in operands)
        return [self.draft.tensors[i] for i in self.draft.op(name, ids, checked)]

    def add_bias(self, x: TensorNode, bias: TensorNode) -> TensorNode:
        """`x + bias`, with the vector `[n]` added to every row of `x` `[..., n]`."""
        return self.op("add_bias", [x, bias])[0]

    def scale(self, x: TensorNode, factor: float) -> TensorNode:
        """`factor * x`."""
        return self.op("scale", [x], factor=factor)[0]

    def silu(self, x: TensorNode) -> TensorNode:
        """`x * sigmoid(x)`."""
        return self.op("silu", [x])[0]

    def relu(self, x: TensorNode) -> TensorNode:
        """`max(x, 0)`."""
        return self.op("relu", [x])[0]

    def gelu(self, x: TensorNode, *, approximate: str = "none") -> TensorNode:
        """`x` times the standard normal distribution function of `x`: exact (`none`), or
        approximated by `tanh`.
        """
        _validate.choice("gelu", "approximate", approximate, ("none", "tanh"))
        return self.op("gelu" if approximate == "none" else "gelu_tanh", [x])[0]

    def tanh(self, x: TensorNode) -> TensorNode:
        """The hyperbolic tangent."""
        return self.op("tanh", [x])[0]

    def softcap(self, x: TensorNode, cap: float) -> TensorNode:
        """`cap * tanh(x / cap)`."""
        return self.op("softcap", [x], cap=cap)[0]

    def cast(self, x: TensorNode, dtype: str) -> TensorNode:
        """`x` converted to `f32` or `bf16`."""
        return self.op("cast", [x], dtype=dtype_named(dtype).name)[0]

    def rms_norm(
        self,
        x: TensorNode,
        gamma: TensorNode,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        head_dim: int | None = None,
    ) -> TensorNode:
        """`x / sqrt(mean(x²) + eps) * (gamma + offset)` over the last dim, rounded once.

        Args:
            x: `[..., n]`.
            gamma: `[n]`, or `[head_dim]`.
            eps: above 0.
            offset: added to gamma; 1 in Gemma.
            head_dim: the last dim has adjacent heads of this size. Each is normalized separately,
                with one gamma.
        """
        size = 0 if head_dim is None else _validate.integer("rms_norm", "head_dim", head_dim, 1, MAX_SIZE)
        return self.op("rms_norm", [x, gamma], eps=eps, offset=offset, head_dim=size)[0]

    def layer_norm(self, x: TensorNode, gamma: TensorNode, beta: TensorNode, eps: float = 1e-5) -> TensorNode:
        """`(x - mean(x)) / sqrt(variance(x) + eps) * gamma + beta` over the last dim, rounded once."""
        return self.op("layer_norm", [x, gamma, beta], eps=eps)[0]

    def embedding(self, ids: TensorNode, table: TensorNode) -> TensorNode:
        """Rows of `table` `[vocab, hidden]` at `ids` (i32)."""
        return self.op("embedding", [ids, table])[0]

    def rope(self, x: TensorNode, positions: TensorNode, table: TensorNode, *, head_dim: int) -> TensorNode:
        """Rotary embedding of heads that are adjacent in the last dim. `table` has cosines and
        sines per position.
        """
        return self.op("rope", [x, positions, table], head_dim=head_dim, inverse=False)[0]

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
        window: int | None = None,
        softcap: float | None = None,
    ) -> TensorNode:
        """Causal attention of flattened tokens over a KV cache in blocks; the arguments are those
        of `scaled_dot_product_attention`.
        """
        for cache in (k_cache, v_cache):
            self._require_format_of_cache("paged_attention", cache, head_dim, block_size)
        scores = attention_scores("paged_attention", scale, head_dim, window, softcap)
        attrs = {"head_dim": head_dim, "block_size": block_size, **scores}
        return self.op("attention_paged", [q, k_cache, v_cache, positions, sequence, block_table], **attrs)[0]

    def kv_write(
        self, cache: TensorNode, x: TensorNode, slots: TensorNode, *, head_dim: int, block_size: int = 64
    ) -> TensorNode:
        """Write rows of `x` into the cache at `slots`, in place, and return the cache. Later ops
        must use the returned tensor.

        In a block, each head's rows are contiguous. `paged_attention` with the same `head_dim` and
        `block_size` reads them in this form.
        """
        return self.op("kv_write", [cache, x, slots], head_dim=head_dim, block_size=block_size)[0]

    def _require_format_of_cache(
        self, function: str, cache: TensorNode, head_dim: int, block_size: int
    ) -> None:
        written = self.draft.own(function, cache).id
        for op in reversed(self.draft.ops):
            if written in op.outputs:
                written_with = {name: op.attrs.get(name) for name in ("head_dim", "block_size")}
                if op.op == "kv_write" and written_with != {"head_dim": head_dim, "block_size": block_size}:
                    _validate.invalid(
                        function,
                        "a cache must be read with the head_dim and block_size it was written with",
                        f"head_dim={head_dim}, block_size={block_size} after {written_with}",
                        "pass the same values to kv_write and paged_attention",
                    )
                return

    def gather_rows(self, x: TensorNode, index: TensorNode) -> TensorNode:
        """The rows of `x` `[T, d]` at `index` `[S]`. If `x` is i32 `[T]`, the numbers of `x` at
        `index`.
        """
        return self.op("gather_rows", [x, index])[0]

    def cross_entropy(
        self,
        logits: TensorNode,
        labels: TensorNode,
        inv_count: TensorNode,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> tuple[TensorNode, TensorNode]:
        """The mean cross-entropy `[1]`, and every row's share of the mean. `inv_count` is 1 /
        number of counted labels. With `label_smoothing`, every class has this share of the target,
        divided by the number of classes, which are then not sharded.
        """
        smoothing = _validate.number("cross_entropy", "label_smoothing", label_smoothing, 0.0, 1.0)
        with self.all_or_nothing():
            loss, rows, *_ = self.op("cross_entropy", [logits, labels, inv_count], ignore_index=ignore_index)
            if smoothing == 0:
                return loss, rows
            wide = logits if logits.spec.dtype.name == "f32" else self.cast(logits, "f32")
            of_classes = self.scale(self.mean(self.log_softmax(wide), -1), -1.0)
            ignored = self._as_rows(self.op("equal_to", [labels], value=ignore_index)[0])
            counted = self.mul(self.mul(of_classes, self.sub(1.0, ignored)), inv_count)
            loss = self.add(self.scale(loss, 1.0 - smoothing), self.scale(self.sum(counted), smoothing))
            return loss, self.add(
                self.scale(self._as_rows(rows), 1.0 - smoothing), self.scale(counted, smoothing)
            )

    def mean_cross_entropy(
        self,
        logits: TensorNode,
        labels: TensorNode,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> tuple[TensorNode, TensorNode]:
        """`cross_entropy` with the input `loss.inv_count` as `inv_count`. The input's value is
        computed from the labels at every step.
        """
        self.draft.own("mean_cross_entropy", labels)
        if labels.kind != "input":
            _validate.invalid(
                "mean_cross_entropy",
                "labels must be an input, because they are counted at every step",
                f"a {labels.kind}",
                "pass an input",
            )
        if self.has(INV_COUNT):
            _validate.invalid(
                "mean_cross_entropy",
                "a graph may have only one mean_cross_entropy",
                f"a second in {self.name!r}",
                "use cross_entropy with your own inv_count",
            )
        with self.all_or_nothing():
            spec = TensorSpec((1,), dtype_named("f32"), name=INV_COUNT, storage="vector")
            inv_count = self.draft.declare("input", spec)
            return self.cross_entropy(
                logits, labels, inv_count, ignore_index=ignore_index, label_smoothing=label_smoothing
            )

    def loss(self, tensor: TensorNode) -> TensorNode:
        """Declare the loss: any result that is a single f32. Planning appends the backward pass.
        The loss becomes an output with the name `loss`.

        Raises:
            ShapeError: the tensor is not a result, or not one f32; or the graph already has a loss.
        """
        self.draft.own("loss", tensor)
        if self.draft.loss_id is not None:
            raise ShapeError(
                f"[graph.loss] a graph may have only one loss; got a second in {self.name!r}; declare the sum of both"
            )
        if tensor.kind != "result" or tensor.shape != (1,) or tensor.spec.dtype.name != "f32":
            raise ShapeError(
                f"[graph.loss] a loss must be one f32 computed by the graph; got a {tensor.kind} {tensor.spec}; use "
                "cross_entropy, mean or sum"
            )
        self.output(tensor, "loss")  # raises if another output has this name
        self.draft.loss_id = tensor.id
        return tensor

    # ---- reading ------------------------------------------------------------------------------------------

    def find(self, name: str) -> TensorNode:
        """The input, parameter, state or constant with this name.

        Raises:
            ShapeError: no tensor has this name.
        """
        names = self.draft.names
        if name not in names:
            raise ShapeError(
                f"[graph.find] the graph must have the tensor; got {name!r}; it has {', '.join(names)}"
            )
        return self.draft.tensors[names[name]]

    def has(self, name: str) -> bool:
        """Whether an input, parameter, state or constant has this name."""
        return isinstance(name, str) and name in self.draft.names

    def freeze(self) -> Graph:
        """The graph as data."""
        return self.draft.freeze(self.name, self.k_splits)

    @classmethod
    def thaw(cls, graph: Graph) -> GraphBuilder:
        """A builder that continues a frozen graph; tensor ids do not change."""
        builder = cls(graph.name, k_splits=graph.k_splits)
        builder.draft = GraphDraft.of(graph, builder)
        return builder


def _require_batch_first(kind: str, spec: TensorSpec) -> None:
    """Check that only the first dim of a declared tensor counts the batch."""
    for dim, label in enumerate(spec.labels):
        if (
            label is not None
            and label.is_summed_by_batch_splits
            and (dim > 0 or kind not in ("input", "constant"))
        ):
            _validate.invalid(
                kind,
                f"{label.name!r} may label only dim 0 of inputs and constants",
                f"dim {dim} of {kind} {spec.name!r}",
                "transpose it, or choose another label",
            )


def _spec(
    call: str,
    shape: Sequence[Size] | TensorSpec,
    dtype: str | DType,
    labels: Labels,
    name: str,
    storage: str,
    tile_hint: int | None,
) -> TensorSpec:
    if isinstance(shape, TensorSpec):
        spec = shape.renamed(name) if name else shape
        others = {"dtype": dtype not in ("f32", spec.dtype), "labels": bool(tuple(labels))}
        others |= {"tile_hint": tile_hint is not None, "storage": storage != "rows"}
        if any(others.values()):
            got = ", ".join(other for other, is_passed in others.items() if is_passed)
            _validate.invalid(call, "a TensorSpec says what a tensor is", f"one, and {got}", "set it there")
        name = spec.name
    else:
        spec = TensorSpec(shape, dtype_named(dtype), labels, name, tile_hint, storage)
    if name == SEED or is_own_name(name):
        _validate.invalid(call, f"the name {name!r} is reserved", "a tensor of that name", "rename it")
    return spec
