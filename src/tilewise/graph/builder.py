"""`GraphBuilder`: defines a graph with one method per kind of tensor and per op. Each call is
checked at once.

Calls add nodes to a `GraphDraft`, which becomes an `ir.Graph`. Gradients, passes and layouts work
on the `ir.Graph`. Names of parameters come from the caller's path, never from a counter.
"""

from __future__ import annotations

from collections.abc import Mapping

import tilewise.graph.ops  # noqa: F401  (registers the ops)
from tilewise.core.dims import MAX_SIZE
from tilewise.core.dtypes import QUANTIZED_MATMULS
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import ShapeError
from tilewise.core.tree import MAX_COUNT
from tilewise.core.validation import Validator
from tilewise.graph.adapters import Adapter, check_adapters
from tilewise.graph.composed import ComposedMethods, attention_scores
from tilewise.graph.declarations import INV_COUNT
from tilewise.graph.draft import GraphDraft
from tilewise.ir.graph import Graph, TensorNode, TensorSpec

__all__ = ["GraphBuilder"]

_validate = Validator("graph", ShapeError)

_USUAL_K_SPLITS = 8


class GraphBuilder(ComposedMethods):
    """Builds a graph.

    Args:
        name: the graph's name in messages and pictures.
        k_splits: number of parts into which contractions over labelled dims are cut (as in
            split-K). n devices may share such a dim if n is 1 or k_splits / n is a power of two.
            With 8 k splits, n may be 1, 2, 4 or 8; with 12 k splits, n may be 1, 3, 6 or 12, and 2
            with unequal shares. None: what the model prefers, or 8.
        formats: the formats of quantised weights (`tilewise.formats`), by the parameters' full names.
            A weight that is not listed is stored in its dtype.
        quantized_matmul: how products use quantised weights. `exact`: with the bf16 numbers that they
            mean. `grouped`: those of formats of 4 bits, with a transposed weight, scale sums of 32
            products (docs/numerics.md, rule 12); they are faster for few rows and have no gradient.
        adapters: low-rank adapters (`Adapter`) of weights of `nn.linear`, by the weights' full names.

    Attributes:
        gates: factors of gated adapters, `[rows, rank]`, one tensor for each number of rows. The author of a
            layer sets them before its first product.

    Shapes: sizes are `int` or `Dim`; row-major, last dim fastest. Every call raises ShapeError if
    its operands do not fit, have the wrong type, or belong to another graph. The message contains
    the operands' shapes. Only one thread at a time may use a builder; `ParallelGraphBuilder`
    defines layers in several threads.
    """

    def __init__(
        self,
        name: str = "graph",
        *,
        k_splits: int | None = None,
        formats: Mapping[str, str] | None = None,
        quantized_matmul: str = "exact",
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.name = _validate.text("GraphBuilder", "a graph's name", name)
        self._is_chosen = k_splits is not None
        k_splits = _USUAL_K_SPLITS if k_splits is None else k_splits
        self.k_splits = _validate.integer("GraphBuilder", "k_splits", k_splits, 1, MAX_COUNT)
        self.formats = dict(formats or {})
        _validate.choice("GraphBuilder", "quantized_matmul", quantized_matmul, QUANTIZED_MATMULS)
        self.quantized_matmul = quantized_matmul
        self.adapters = check_adapters({} if adapters is None else adapters)
        self.gates: tuple[TensorNode, ...] = ()
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

    # ---- operations ---------------------------------------------------------------------------------------

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
        """Rotary embedding of heads that are adjacent in the last dim.

        Args:
            x: `[..., heads * head_dim]`.
            positions: `[...]` i32, rows of the table.
            table: `[positions, n]` fp32: `n / 2` cosines, then as many sines. The first `n`
                elements of every head are rotated, at most `head_dim`; the others do not change.
            head_dim: size of a head.
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
        """Causal attention of flattened tokens over a KV cache in blocks, in the model's dtype or in
        int8 (`kv_write`); the other arguments are those of `scaled_dot_product_attention`.
        """
        for cache in (k_cache, v_cache):
            self._require_format_of_cache("paged_attention", cache, head_dim, block_size)
        scores = attention_scores("paged_attention", scale, head_dim, window, softcap)
        attrs = {"head_dim": head_dim, "block_size": block_size, **scores}
        name = "attention_paged_int8" if k_cache.spec.dtype.name == "i32" else "attention_paged"
        return self.op(name, [q, k_cache, v_cache, positions, sequence, block_table], **attrs)[0]

    def kv_write(
        self, cache: TensorNode, x: TensorNode, slots: TensorNode, *, head_dim: int, block_size: int = 64
    ) -> TensorNode:
        """Write rows of `x` into the cache at `slots`, in place, and return the cache. Later ops
        must use the returned tensor.

        In a block, each head's rows are contiguous. `paged_attention` with the same `head_dim` and
        `block_size` reads them in this form.

        A cache of dtype i32 with `head_dim / 4 + 1` columns for each head holds int8: one scale and
        `head_dim` codes for each row and head.
        """
        name = "kv_write_int8" if cache.spec.dtype.name == "i32" else "kv_write"
        return self.op(name, [cache, x, slots], head_dim=head_dim, block_size=block_size)[0]

    def _require_format_of_cache(
        self, function: str, cache: TensorNode, head_dim: int, block_size: int
    ) -> None:
        written = self.draft.own(function, cache).id
        for op in reversed(self.draft.ops):
            if written in op.outputs:
                written_with = {name: op.attrs.get(name) for name in ("head_dim", "block_size")}
                if op.op in ("kv_write", "kv_write_int8") and written_with != {
                    "head_dim": head_dim,
                    "block_size": block_size,
                }:
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

    def freeze(self) -> Graph:
        """The graph as data."""
        return self.draft.freeze(self.name, self.k_splits)

    @classmethod
    def thaw(cls, graph: Graph) -> GraphBuilder:
        """A builder that continues a frozen graph; tensor ids do not change."""
        builder = cls(graph.name, k_splits=graph.k_splits)
        builder.draft = GraphDraft.of(graph, builder)
        return builder
