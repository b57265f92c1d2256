"""Attention and its parts: RoPE, the KV cache, self-attention over whole sequences, paged
attention.

Heads are adjacent in the last dim, `[..., heads * head_dim]`. The label of this dim has the head
size as atom (the smallest piece that may be sharded), so a strategy can shard heads without a
reshape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.core.dims import DimLabel, Size
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import PlanError
from tilewise.graph.ops.common import (
    incoming,
    leading,
    require,
    require_floats,
    require_indices,
    require_positive,
)
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import GROUPS
from tilewise.ir.lowering import Draft, Lowering, Ref
from tilewise.ir.op import Factors, Op, PartialValue, Signature, register
from tilewise.ir.program import Number, NumberLike, tiles_across
from tilewise.ir.tape import Gradient, Tape

__all__ = ["SOFTCAPS"]

MAX_HEAD_DIM = 1024
SOFTCAPS = 1e-6, 1e6


def _heads(spec: TensorSpec, head_dim: int, op: str) -> int:
    width = spec.shape[-1]
    require(
        2 <= head_dim <= MAX_HEAD_DIM,
        op,
        f"head_dim must lie in [2, {MAX_HEAD_DIM}], not at {head_dim}",
        spec,
    )
    require(
        isinstance(width, int) and len(spec.shape) > 1 and spec.storage == "rows" and width % head_dim == 0,
        op,
        f"the last dim must hold heads of {head_dim}",
        spec,
    )
    assert isinstance(width, int)
    return width // head_dim


@register
class Rope(Op):
    """Rotary embedding of paired halves: inputs x, positions, table (`[max, head_dim]`: cosines,
    then sines).
    """

    name = "rope"
    in_place = ((0, 0),)
    signature = Signature(3, attributes={"head_dim": int, "inverse": bool})

    def index_bounds(
        self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]
    ) -> dict[int, tuple[int, Size, Size | None]]:
        """Positions are rows of the table."""
        assert inputs[2] is not None
        return {1: (0, inputs[2].shape[0], None)}

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of x."""
        x, positions, table = inputs
        assert x is not None and positions is not None and table is not None
        _heads(x, attrs["head_dim"], "rope")
        require_floats("rope", x)
        require(attrs["head_dim"] % 2 == 0, "rope", "head_dim must be even", x, advice="RoPE rotates pairs")
        require(positions.shape == x.shape[:-1], "rope", "one position per row", x, positions)
        require_indices("rope", "positions", positions, x)
        is_table = len(table.shape) == 2 and table.storage == "rows" and table.dtype.name == "f32"
        require(
            is_table and table.shape[-1] == attrs["head_dim"],
            "rope",
            "the table must be f32 rows of the head size",
            x,
            table,
        )
        return [TensorSpec(x.shape, x.dtype, x.labels)]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Heads may be sharded; positions are sharded like rows."""
        assert inputs[0] is not None
        rows = leading(inputs[0])
        return Factors(((*rows, "h"), rows, ("p", "e")), ((*rows, "h"),), whole=frozenset("pe"))

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """The inverse rotation of dy."""
        _, positions, table = op.given
        attrs = {**op.attrs, "inverse": not op.attrs["inverse"]}
        dy = incoming(op, grads)
        return [*tape.op("rope", [dy, tape.use(positions), tape.use(table)], **attrs), None, None]

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile."""
        x, positions, table = op.given
        t = low.tensor(x)
        low.emit(
            "rope",
            op,
            over=t,
            dtype=t.dtype,
            tiles={
                "out": low.row(op.outputs[0]),
                "x": low.row(x),
                "positions": low.row(positions),
                "table": low.whole(table),
            },
            ints={"head_dim": op.attrs["head_dim"], "inverse": op.attrs["inverse"]},
        )


@register
class Attention(Op):
    """Self-attention with grouped heads on `[batch, seq, heads * head_dim]`. Outputs are the result
    and the logarithm of each row's softmax sum (saved for the backward pass).

    Inputs are q, k, v and lengths. Attention that is not causal may have the lengths of the
    sequences (i32, one per sequence); otherwise `lengths` is absent. A window or softcap of 0
    has no effect.
    """

    name = "attention"
    is_costly = True
    signature = Signature(
        4,
        absent=frozenset({3}),
        attributes={"head_dim": int, "causal": bool, "scale": float, "window": int, "softcap": float},
    )

    def index_bounds(
        self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]
    ) -> dict[int, tuple[int, Size, Size | None]]:
        """A length lies in [1, seq]."""
        q, lengths = inputs[0], inputs[3]
        assert q is not None
        return {3: (1, q.shape[1], q.shape[1])} if lengths is not None else {}

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of q, and fp32 `[batch, seq, heads]`."""
        q, k, v, lengths = inputs
        assert q is not None and k is not None and v is not None
        require(len(q.shape) == 3, "attention", "operands must be [batch, seq, heads * head_dim]", q, k, v)
        require(
            attrs["causal"] or lengths is not None or isinstance(q.shape[1], int),
            "attention",
            "a symbolic seq must be causal or have lengths, or tokens would see the padding behind them",
            q,
            advice="fix the size, or pass causal=True or lengths",
        )
        _require_shaped_scores("attention", attrs)
        require(
            attrs["causal"] or not attrs["window"],
            "attention",
            f"a window ends at its token, so it must be causal, not a window of {attrs['window']} both ways",
            q,
            advice="pass causal=True, or no window",
        )
        if lengths is not None:
            _require_lengths(q, lengths, attrs["causal"])
        require_floats("attention", q, k, v)
        heads, kv_heads = _heads(q, attrs["head_dim"], "attention"), _heads(k, attrs["head_dim"], "attention")
        require(
            k.shape == v.shape and k.shape[:-1] == q.shape[:-1],
            "attention",
            "q, k and v must share rows",
            q,
            k,
            v,
        )
        require(heads % kv_heads == 0, "attention", "query heads must divide by KV heads", q, k)
        label = q.labels[-1]
        lse = DimLabel(label.name, 1) if label else None
        return [
            TensorSpec(q.shape, q.dtype, q.labels),
            TensorSpec((*q.shape[:-1], heads), DTYPES["f32"], (*q.labels[:-1], lse)),
        ]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Batch and heads may be sharded; a KV head is sharded with its query heads."""
        x = ("b", "s", "h")
        return Factors((x, x, x, ("b",) if inputs[3] is not None else None), (x, x), whole=frozenset("s"))

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """One op computes dq, dk and dv."""
        inputs = [None if i is None else tape.use(i) for i in op.inputs]
        out, lse = (tape.use(o) for o in op.outputs)
        return [*tape.op("attention_backward", [incoming(op, grads), out, lse, *inputs], **op.attrs), None]

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per block of whole sequences. If there may be few sequences, tasks also share
        the heads.
        """
        q, k, v = op.given[:3]
        _require_whole_sequences(low, op, q)
        out, lse = op.outputs
        tiles = {"out": out, "lse": lse, "q": q, "k": k, "v": v}
        _emit_by_heads(low, op, tiles, q, k, op.inputs[3], _head_shares(low, op, out, k))


def _require_shaped_scores(op: str, attrs: Mapping[str, Any]) -> None:
    window, softcap = attrs["window"], attrs["softcap"]
    require(
        window >= 0, op, f"a window must be 1 or more positions, not {window}", advice="0 means no window"
    )
    low, high = SOFTCAPS
    in_range = softcap == 0 or low <= softcap <= high
    require(
        in_range,
        op,
        f"a softcap must lie in [{low:g}, {high:g}], not at {softcap:g}",
        advice="0 means no softcap",
    )


def _require_pages(op: str, cache: TensorSpec, attrs: Mapping[str, Any]) -> None:
    """A cache consists of whole blocks, and a block of whole heads."""
    size, rows = attrs["block_size"], cache.shape[0]
    require_positive(op, block_size=size)
    _heads(cache, attrs["head_dim"], op)
    require(
        isinstance(rows, int) and rows % size == 0,
        op,
        f"a cache must hold whole blocks of {size} rows",
        cache,
    )


def _require_lengths(q: TensorSpec, lengths: TensorSpec, causal: bool) -> None:
    require_indices("attention", "lengths", lengths, q)
    require(lengths.shape == q.shape[:1], "attention", "one length per sequence", q, lengths)
    require(
        not causal,
        "attention",
        "lengths need causal=False: causal tokens never see the padding behind them",
        q,
        lengths,
        advice="drop them, or pass causal=False",
    )


def _emit_by_heads(
    low: Lowering,
    op: OpNode,
    tiles: Mapping[str, int | Ref],
    q: int,
    k: int,
    lengths: int | None,
    shares: int,
) -> Draft:
    """Emit attention over whole sequences, forward or backward: one task per row tile, or one task
    per share of the heads for all rows.
    """
    t, ints, seq = low.tensor(q), _heads_of(low, op, q, k, shares), low.size(low.spec(q).shape[1])
    group = t.cols // low.tensor(k).cols
    per_column = {"lse": op.attrs["head_dim"], "k": group, "v": group, "dk": group, "dv": group}
    if shares > 1:
        views = {name: low.col(tensor, per_column.get(name, 1)) for name, tensor in tiles.items()}
        seen = None if lengths is None else low.whole(lengths)
    else:
        views = {name: low.row(tensor) for name, tensor in tiles.items()}
        seen = None if lengths is None else low.row(lengths, div=seq)  # a row for every sequence
    return low.emit(
        op.op,
        op,
        over=Number(t.cols) if shares > 1 else t,
        step=t.cols // shares if shares > 1 else None,
        dtype=t.dtype,
        tiles={**views, "lengths": seen},
        ints={"seq_len": seq, "causal": op.attrs["causal"], "window": op.attrs["window"], **ints},
        floats={name: op.attrs[name] for name in ("scale", "softcap")},
    )


def _head_shares(low: Lowering, op: OpNode, out: int, k: int) -> int:
    """The number of tasks that share the heads: the number of tiles across the result, if it
    divides the KV heads.
    """
    ref = low.tensor(out)
    most, kv_heads = tiles_across(ref.cols, ref.tile_cols), low.tensor(k).cols // op.attrs["head_dim"]
    return max(n for n in range(1, most + 1) if kv_heads % n == 0)


def _require_whole_sequences(low: Lowering, op: OpNode, q: int) -> None:
    """A task needs whole sequences, so the row tile must consist of them."""
    spec, step = low.spec(q), low.row_step(low.tensor(q))
    length = low.size(spec.shape[1])
    if not _is_multiple(step, length):
        raise PlanError(
            f"[graph.attention] the rows of a tile must be whole sequences; got tiles of {step} rows for {spec} in "
            f"{op.label!r}; give all batched inputs the same sequence length"
        )


def _is_multiple(step: NumberLike, length: NumberLike) -> bool:
    """Whether a number of rows is a number of whole sequences, for every value of a symbol."""
    if isinstance(step, int) or isinstance(length, int):
        return isinstance(step, int) and isinstance(length, int) and step % length == 0
    return step[2:] == length[2:] and step.multiple % length.multiple == 0


def _heads_of(low: Lowering, op: OpNode, q: int, k: int, shares: int = 1) -> dict[str, int]:
    """Local query heads, local KV heads (of a share if tasks share heads), and the head size."""
    size = op.attrs["head_dim"]
    columns = size * shares
    return {
        "heads": low.tensor(q).cols // columns,
        "kv_heads": low.tensor(k).cols // columns,
        "head_dim": size,
    }


@register
class AttentionBackward(Op):
    """Inputs dout, out, lse, q, k, v, lengths; outputs dq, dk, dv. If KV heads are replicated, dk
    and dv are first summed over the replicas in fp32, along the tree over the group's query heads.
    """

    name = "attention_backward"
    signature = Signature(7, absent=frozenset({6}), attributes=Attention.signature.attributes)

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The specs of q, k and v."""
        specs = [s for s in inputs[3:6] if s is not None]
        return [TensorSpec(s.shape, s.dtype, s.labels) for s in specs]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """As in the forward pass."""
        x = ("b", "s", "h")
        group = PartialValue("group", ("h",), (1, 2), tree=GROUPS)
        lengths = ("b",) if inputs[6] is not None else None
        return Factors((*(x,) * 6, lengths), (x,) * 3, whole=frozenset("s"), partial_values=(group,))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """The tasks of the forward pass, then the sum over replicas of a KV head."""
        q, k = op.given[3], op.given[4]
        spread = low.pending_reduction(op, "group")
        targets: list[int | Ref] = list(op.outputs)
        if spread is not None:
            targets[1:] = [low.temp_like(low.tensor(o), dtype="f32", name="partial") for o in op.outputs[1:]]
        names = ("dq", "dk", "dv", "dout", "out", "lse", "q", "k", "v")
        tiles = dict(zip(names, (*targets, *op.given)))
        # replicas are signaled per row tile
        shares = 1 if spread else _head_shares(low, op, op.outputs[0], k)
        backward = _emit_by_heads(low, op, tiles, q, k, op.inputs[6], shares)
        if spread is not None:
            for partial, out in zip(targets[1:], op.outputs[1:]):
                low.all_reduce(op, partial, out, None, spread, producer=backward)


@register
class KvWrite(Op):
    """Writes rows of x into the cache at `slots`, in place. Inputs are cache, x, slots; the output
    is the cache afterwards.

    In a block, the `block_size` rows of `head_dim` numbers of a head are contiguous, as
    `attention_paged` reads them.
    """

    name = "kv_write"
    in_place = ((0, 0),)
    must_alias = True
    signature = Signature(3, attributes={"head_dim": int, "block_size": int})

    def index_bounds(
        self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]
    ) -> dict[int, tuple[int, Size, Size | None]]:
        """Slots are rows of the cache; -1 writes nothing."""
        assert inputs[0] is not None
        return {2: (0, inputs[0].shape[0], -1)}

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of the cache."""
        cache, x, slots = inputs
        assert cache is not None and x is not None and slots is not None
        require(
            cache.shape[-1] == x.shape[-1] and cache.dtype == x.dtype,
            "kv_write",
            "rows must fit the cache",
            cache,
            x,
        )
        rows = all(s.storage == "rows" and len(s.shape) == 2 for s in (cache, x))
        require(rows and isinstance(cache.shape[0], int), "kv_write", "needs [rows, d] and [T, d]", cache, x)
        require_floats("kv_write", x)
        _require_pages(self.name, cache, attrs)
        require(slots.shape == x.shape[:-1], "kv_write", "one slot per row", x, slots)
        require_indices("kv_write", "slots", slots, x)
        return [TensorSpec(cache.shape, cache.dtype, cache.labels)]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Heads may be sharded."""
        return Factors((("c", "h"), ("t", "h"), ("t",)), (("c", "h"),), whole=frozenset("ct"))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile."""
        _cache, x, slots = op.given
        t = low.tensor(x)
        tiles = {"cache": low.whole(op.outputs[0]), "x": low.row(x), "slots": low.row(slots)}
        ints = {name: op.attrs[name] for name in ("block_size", "head_dim")}
        low.emit("kv_write", op, over=t, dtype=t.dtype, tiles=tiles, ints=ints)


@register
class AttentionPaged(Op):
    """Attention of flattened tokens over a paged cache.

    Inputs are q, k_cache, v_cache, positions, sequence, block_table. A window or softcap of 0
    has no effect.
    """

    name = "attention_paged"
    signature = Signature(
        6,
        attributes={"head_dim": int, "block_size": int, "scale": float, "window": int, "softcap": float},
    )

    def index_bounds(
        self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]
    ) -> dict[int, tuple[int, Size, Size | None]]:
        """Positions lie in the blocks that a sequence may have. Numbers of sequences are rows of
        the table, and numbers of blocks are blocks of the cache.
        """
        cache, table = inputs[1], inputs[5]
        assert cache is not None and table is not None
        rows, blocks = cache.shape[0], table.shape[1]
        assert isinstance(rows, int) and isinstance(blocks, int)
        size = attrs["block_size"]
        return {3: (0, blocks * size, None), 4: (0, table.shape[0], None), 5: (0, rows // size, None)}

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """The spec of q."""
        q, k, v, positions, sequence, table = (s for s in inputs if s is not None)
        heads, kv_heads = _heads(q, attrs["head_dim"], self.name), _heads(k, attrs["head_dim"], self.name)
        require(heads % kv_heads == 0, self.name, "query heads must divide by KV heads", q, k)
        _require_shaped_scores(self.name, attrs)
        require_floats(self.name, q, k, v)
        caches = (
            len(q.shape) == 2 and k.shape == v.shape and len(k.shape) == 2 and isinstance(k.shape[0], int)
        )
        require(caches, self.name, "needs q [T, d] and two caches [rows, d] of one fixed shape", q, k, v)
        _require_pages(self.name, k, attrs)
        for what, spec in (("positions", positions), ("sequence", sequence)):
            require_indices(self.name, what, spec, q)
            require(spec.shape == q.shape[:-1], self.name, "one number per row", q, spec)
        is_table = table.dtype.name == "i32" and table.storage == "rows" and len(table.shape) == 2
        require(
            is_table and isinstance(table.shape[1], int),
            self.name,
            "the block table must be i32 [sequences, blocks]",
            table,
        )
        return [TensorSpec(q.shape, q.dtype, q.labels)]

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Heads may be sharded."""
        cache, t = ("c", "h"), ("t",)
        return Factors((("t", "h"), cache, cache, t, t, ("s", "m")), (("t", "h"),), whole=frozenset("ctsm"))

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile. If there may be few rows, tasks also share the heads."""
        q, k_cache, v_cache, positions, sequence, table = op.given
        t = low.tensor(q)
        tiles = {"out": op.outputs[0], "q": q}
        caches = {"k_cache": k_cache, "v_cache": v_cache}
        by_row = {"positions": positions, "sequence": sequence}
        shares = _head_shares(low, op, op.outputs[0], k_cache)
        ints = {
            "block_size": op.attrs["block_size"],
            "window": op.attrs["window"],
            **_heads_of(low, op, q, k_cache, shares),
        }
        floats = {name: op.attrs[name] for name in ("scale", "softcap")}
        if shares == 1:
            low.emit(
                "attention_paged",
                op,
                over=t,
                dtype=t.dtype,
                tiles={
                    **{name: low.row(tensor) for name, tensor in (tiles | by_row).items()},
                    **{name: low.whole(cache) for name, cache in caches.items()},
                    "block_table": low.whole(table),
                },
                ints=ints,
                floats=floats,
            )
            return
        low.emit(
            "attention_paged",
            op,
            over=Number(t.cols),
            step=t.cols // shares,
            dtype=t.dtype,
            tiles={
                **{name: low.col(tensor) for name, tensor in tiles.items()},
                **{name: low.whole(tensor) for name, tensor in (caches | by_row).items()},
                "block_table": low.whole(table),
            },
            ints=ints,
            floats=floats,
        )
