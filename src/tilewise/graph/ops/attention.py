"""Attention and its parts: RoPE, the KV cache, self-attention over whole sequences, paged
attention.

Heads are adjacent in the last dim, `[..., heads * head_dim]`. The label of this dim has the head
size as atom (the smallest piece that may be sharded), so a strategy can shard heads without a
reshape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.core.dims import DimLabel
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import PlanError
from tilewise.graph.ops.common import SOFTCAPS, incoming, require, require_indices, require_positive
from tilewise.ir.graph import TensorSpec
from tilewise.ir.layout import GROUPS
from tilewise.ir.lowering import Draft, Lowering, Ref
from tilewise.ir.op import Bounds, Gradients, Op, Partial, Specs, operand, optional, register, result
from tilewise.ir.program import Number, NumberLike, tiles_across
from tilewise.ir.tape import Tape

__all__ = ["int8_columns", "require_whole_sequences"]

MAX_HEAD_DIM = 1024


def _heads(spec: TensorSpec, head_dim: int, op: str) -> int:
    """The number of heads in the last dim, after a check that they are whole."""
    rule = f"head_dim must lie in [2, {MAX_HEAD_DIM}], not at {head_dim}"
    require(2 <= head_dim <= MAX_HEAD_DIM, op, rule, spec)
    width = spec.shape[-1]
    is_whole = isinstance(width, int) and width % head_dim == 0
    require(is_whole, op, f"the last dim must hold heads of {head_dim}", spec)
    assert isinstance(width, int)
    return width // head_dim


@register
class Rope(Op):
    """Rotary embedding of paired halves. The table has cosines, then sines, of every position: one
    column per rotated element. The other elements at the end of each head do not change.
    """

    name = "rope"
    whole = "p e"
    x: int = operand("... h")
    positions: int = operand("...", indexes="p")
    table: int = operand("p e", dtype="f32")
    head_dim: int
    inverse: bool
    out: int = result(like="x", in_place="x")

    def check(self, spec: Specs) -> None:
        """Heads are whole, and the rotated elements are pairs."""
        x, table = spec(self.x), spec(self.table)
        _heads(x, self.head_dim, self.name)
        columns = table.shape[-1]
        is_paired = isinstance(columns, int) and columns % 2 == 0
        advice = "RoPE rotates pairs"
        require(is_paired, self.name, "the table must have an even number of columns", table, advice=advice)
        rule = f"the table must have at most {self.head_dim} columns, the head size"
        require(isinstance(columns, int) and columns <= self.head_dim, self.name, rule, x, table)

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The inverse rotation of dy."""
        dy, positions, table = incoming(self, grads), tape.use(self.positions), tape.use(self.table)
        back = Rope(x=dy, positions=positions, table=table, head_dim=self.head_dim, inverse=not self.inverse)
        return {"x": tape.op(back)[0]}


class _Scores(Op):
    """Base of attention: what is computed from q and k. A window or softcap of 0 has no effect."""

    head_dim: int
    scale: float
    window: int
    softcap: float

    @property
    def _columns_of_kv_head(self) -> int:
        """Columns of a head in the operands of keys and values."""
        return self.head_dim

    def _check_scores(self, q: TensorSpec, k: TensorSpec) -> None:
        heads = _heads(q, self.head_dim, self.name)
        kv_heads = _heads(k, self._columns_of_kv_head, self.name)
        require(heads % kv_heads == 0, self.name, "query heads must divide by KV heads", q, k)
        rule = f"a window must be 1 or more positions, not {self.window}"
        require(self.window >= 0, self.name, rule, advice="0 means no window")
        low, high = SOFTCAPS
        in_range = self.softcap == 0 or low <= self.softcap <= high
        rule = f"a softcap must lie in [{low:g}, {high:g}], not at {self.softcap:g}"
        require(in_range, self.name, rule, advice="0 means no softcap")

    def _head_shares(self, low: Lowering, out: int, k: int) -> int:
        """The number of tasks that share the heads: the number of tiles across the result, if it
        divides the KV heads.
        """
        ref = low.tensor(out)
        most, kv_heads = tiles_across(ref.cols, ref.tile_cols), low.tensor(k).cols // self._columns_of_kv_head
        return max(n for n in range(1, most + 1) if kv_heads % n == 0)

    def _heads_of(self, low: Lowering, q: int, k: int, shares: int) -> dict[str, int]:
        """Local query heads and local KV heads of a share, and the head size."""
        heads = low.tensor(q).cols // (self.head_dim * shares)
        kv_heads = low.tensor(k).cols // (self._columns_of_kv_head * shares)
        return {"heads": heads, "kv_heads": kv_heads, "head_dim": self.head_dim}


class _Sequences(_Scores):
    """Base of attention over whole sequences, forward and backward."""

    whole = "s"
    causal: bool

    def _emit_by_heads(
        self,
        low: Lowering,
        tiles: Mapping[str, int | Ref],
        q: int,
        k: int,
        lengths: int | None,
        first: int | None,
        shares: int,
    ) -> Draft:
        """Emit one task per row tile, or one task per share of the heads for all rows."""
        x, seq = low.tensor(q), low.size(low.spec(q).shape[1])
        group = x.cols // low.tensor(k).cols
        per_column = {"lse": self.head_dim, "k": group, "v": group, "dk": group, "dv": group}
        if shares > 1:
            views = {name: low.col(tensor, per_column.get(name, 1)) for name, tensor in tiles.items()}
            seen = None if lengths is None else low.whole(lengths)
            begin = None if first is None else low.whole(first)
        else:
            views = {name: low.row(tensor) for name, tensor in tiles.items()}
            seen = None if lengths is None else low.row(lengths, div=seq)  # a row for every sequence
            begin = None if first is None else low.row(first)
        heads = self._heads_of(low, q, k, shares)
        return low.emit(
            self.name,
            over=Number(x.cols) if shares > 1 else x,
            step=x.cols // shares if shares > 1 else None,
            dtype=x.dtype,
            tiles={**views, "lengths": seen, "first": begin},
            ints={"seq_len": seq, "causal": self.causal, "window": self.window, **heads},
            floats={"scale": self.scale, "softcap": self.softcap},
        )


@register
class Attention(_Sequences):
    """Self-attention with grouped heads on `[batch, seq, heads * head_dim]`. `lse` is the logarithm
    of each row's softmax sum (saved for the backward pass).

    Attention that is not causal may have the lengths of the sequences (i32, one per sequence).
    Causal attention may have the first position that each token attends to (i32).
    """

    name = "attention"
    is_costly = True
    q: int = operand("b s h")
    k: int = operand("b s h*")
    v: int = operand("b s h*")
    lengths: int | None = optional("b", dtype="i32")
    first: int | None = optional("b s", dtype="i32", storage="scalars")
    out: int = result(like="q")
    lse: int = result("b s h", dtype="f32")

    def index_bounds(self, spec: Specs) -> dict[str, Bounds]:
        """A length lies in [1, seq], a first position in [0, seq)."""
        seq = spec(self.q).shape[1]
        bounds: dict[str, Bounds] = {"lengths": (1, seq, seq), "first": (0, seq, None)}
        return {name: bounds[name] for name in bounds if getattr(self, name) is not None}

    def check(self, spec: Specs) -> None:
        """Heads are whole, and tokens do not see padding."""
        q, k, v = spec(self.q), spec(self.k), spec(self.v)
        self._check_scores(q, k)
        require(k.shape == v.shape, self.name, "k and v must have one shape", k, v)
        require(
            self.causal or self.lengths is not None or isinstance(q.shape[1], int),
            self.name,
            "a symbolic seq must be causal or have lengths, or tokens would see the padding behind them",
            q,
            advice="fix the size, or pass causal=True or lengths",
        )
        require(
            self.causal or not self.window,
            self.name,
            f"a window ends at its token, so it must be causal, not a window of {self.window} both ways",
            q,
            advice="pass causal=True, or no window",
        )
        if self.first is not None:
            require_indices(self.name, "first", spec(self.first), q)
            rule = "first positions need causal=True, because tokens also attend to later ones without it"
            require(
                self.causal, self.name, rule, q, spec(self.first), advice="pass causal=True, or drop them"
            )
        if self.lengths is None:
            return
        lengths = spec(self.lengths)
        require_indices(self.name, "lengths", lengths, q)
        rule = "lengths need causal=False: causal tokens never see the padding behind them"
        require(not self.causal, self.name, rule, q, lengths, advice="drop them, or pass causal=False")

    def results(self, spec: Specs) -> list[TensorSpec]:
        """lse is `[batch, seq, heads]`."""
        q = spec(self.q)
        heads = _heads(q, self.head_dim, self.name)
        label = DimLabel(q.labels[-1].name, 1) if q.labels[-1] else None
        lse = TensorSpec((*q.shape[:-1], heads), DTYPES["f32"], (*q.labels[:-1], label))
        return [TensorSpec(q.shape, q.dtype, q.labels), lse]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """One op computes dq, dk and dv."""
        dout = incoming(self, grads)
        q, k, v = tape.use(self.q), tape.use(self.k), tape.use(self.v)
        dq, dk, dv = tape.op(
            AttentionBackward(
                **self.attrs,
                q=q,
                k=k,
                v=v,
                lengths=None if self.lengths is None else tape.use(self.lengths),
                first=None if self.first is None else tape.use(self.first),
                out=tape.use(self.out),
                lse=tape.use(self.lse),
                dout=dout,
            )
        )
        return {"q": dq, "k": dk, "v": dv}

    def lower(self, low: Lowering) -> None:
        """One task per block of whole sequences. If there may be few sequences, tasks also share
        the heads.
        """
        require_whole_sequences(low, self.q)
        tiles = {"out": self.out, "lse": self.lse, "q": self.q, "k": self.k, "v": self.v}
        shares = self._head_shares(low, self.out, self.k)
        self._emit_by_heads(low, tiles, self.q, self.k, self.lengths, self.first, shares)


def require_whole_sequences(low: Lowering, q: int) -> None:
    """A task needs whole sequences, so the row tile must consist of them."""
    spec, step = low.spec(q), low.row_step(low.tensor(q))
    length = low.size(spec.shape[1])
    if not _is_multiple(step, length):
        raise PlanError(
            f"[graph.{low.op.op}] the rows of a tile must be whole sequences; got tiles of {step} rows for {spec} in "
            f"{low.op.label!r}; give all batched inputs the same sequence length"
        )


def _is_multiple(step: NumberLike, length: NumberLike) -> bool:
    """Whether a number of rows is a number of whole sequences, for every value of a symbol."""
    if isinstance(step, int) or isinstance(length, int):
        return isinstance(step, int) and isinstance(length, int) and step % length == 0
    return step[2:] == length[2:] and step.multiple % length.multiple == 0


@register
class AttentionBackward(_Sequences):
    """Gradients of attention. If KV heads are replicated, dk and dv are first summed over the
    replicas in fp32, along the tree over the group's query heads.
    """

    name = "attention_backward"
    partial_values = (Partial("group", "h", "dk dv", tree=GROUPS),)
    dout: int = operand("b s h")
    out: int = operand("b s h")
    lse: int = operand("b s h*", dtype="f32")
    q: int = operand("b s h")
    k: int = operand("b s h*")
    v: int = operand("b s h*")
    lengths: int | None = optional("b", dtype="i32")
    first: int | None = optional("b s", dtype="i32", storage="scalars")
    dq: int = result(like="q")
    dk: int = result(like="k")
    dv: int = result(like="v")

    def lower(self, low: Lowering) -> None:
        """The tasks of the forward pass, then the sum over replicas of a KV head."""
        spread = low.pending_reduction("group")
        dk: int | Ref = self.dk
        dv: int | Ref = self.dv
        if spread is not None:
            dk, dv = (low.temp_like(low.tensor(t), dtype="f32", name="partial") for t in (self.dk, self.dv))
        tiles = {"dq": self.dq, "dk": dk, "dv": dv, "dout": self.dout, "out": self.out, "lse": self.lse}
        # replicas are signaled per row tile
        shares = 1 if spread else self._head_shares(low, self.dq, self.k)
        own = {"q": self.q, "k": self.k, "v": self.v}
        backward = self._emit_by_heads(low, tiles | own, self.q, self.k, self.lengths, self.first, shares)
        if spread is not None:
            low.all_reduce(dk, self.dk, None, spread, producer=backward)
            low.all_reduce(dv, self.dv, None, spread, producer=backward)


def _check_blocks(op: str, cache: TensorSpec, block_size: int) -> None:
    """A cache has a fixed number of whole blocks."""
    require_positive(op, block_size=block_size)
    rows = cache.shape[0]
    is_whole = isinstance(rows, int) and rows % block_size == 0
    require(is_whole, op, f"a cache must hold whole blocks of {block_size} rows", cache)


@register
class KvWrite(Op):
    """Writes rows of x into the cache at `slots`, in place; the result is the cache afterwards.

    In a block, the `block_size` rows of `head_dim` numbers of a head are contiguous, as
    `attention_paged` reads them.
    """

    name = "kv_write"
    must_alias = True
    whole = "c t"
    cache: int = operand("c h")
    x: int = operand("t h")
    slots: int = operand("t", indexes="c")
    head_dim: int
    block_size: int
    out: int = result(like="cache", in_place="cache")

    def index_bounds(self, spec: Specs) -> dict[str, Bounds]:
        """Slots are rows of the cache; -1 writes nothing."""
        return {"slots": (0, spec(self.cache).shape[0], -1)}

    def check(self, spec: Specs) -> None:
        """A cache consists of whole blocks, and a block of whole heads."""
        cache = spec(self.cache)
        _check_blocks(self.name, cache, self.block_size)
        _heads(cache, self.head_dim, self.name)

    def lower(self, low: Lowering) -> None:
        """One task per row tile."""
        x = low.tensor(self.x)
        tiles = {"cache": low.whole(self.out), "x": low.row(x), "slots": low.row(self.slots)}
        ints = {"block_size": self.block_size, "head_dim": self.head_dim}
        low.emit(self.name, over=x, dtype=x.dtype, tiles=tiles, ints=ints)


def int8_columns(head_dim: int) -> int:
    """Columns of a head in a cache of int8, which is i32: four codes each, and a scale.

    Raises:
        ShapeError: the head size is not a multiple of 4.
    """
    rule = f"a cache of int8 needs a head size that is a multiple of 4, not {head_dim}"
    require(head_dim % 4 == 0, "kv_write_int8", rule, advice="keep the cache in the model's dtype")
    return head_dim // 4 + 1


@register
class KvWriteInt8(KvWrite):
    """`kv_write` into a cache of int8: i32, `int8_columns` for each head. A row of a head becomes a
    scale, its largest magnitude / 127, and codes; the cached numbers are code * scale, rounded to
    the dtype of x.
    """

    name = "kv_write_int8"
    cache: int = operand("c h*", dtype="i32", storage="rows")
    x: int = operand("t h*")
    out: int = result(like="cache", in_place="cache", dtype="i32")

    def check(self, spec: Specs) -> None:
        """A cache consists of whole blocks, and has a part for each head."""
        cache, x = spec(self.cache), spec(self.x)
        _check_blocks(self.name, cache, self.block_size)
        columns = int8_columns(self.head_dim)
        rule = f"a cache of int8 must have {columns} columns for every {self.head_dim} of x"
        fits = _heads(cache, columns, self.name) == _heads(x, self.head_dim, self.name)
        require(fits, self.name, rule, cache, x)


@register
class AttentionPaged(_Scores):
    """Attention of flattened tokens over a paged cache. Positions lie in the blocks that a sequence
    may have; numbers of sequences are rows of the table, whose entries are blocks of the cache.
    """

    name = "attention_paged"
    whole = "c t s m"
    q: int = operand("t h")
    k_cache: int = operand("c h*")
    v_cache: int = operand("c h*")
    positions: int = operand("t", indexes="m")
    sequence: int = operand("t", indexes="s")
    block_table: int = operand("s m", dtype="i32", storage="rows")
    block_size: int
    out: int = result(like="q")

    def index_bounds(self, spec: Specs) -> dict[str, Bounds]:
        """Positions count rows of blocks."""
        cache, table = spec(self.k_cache), spec(self.block_table)
        rows, blocks = cache.shape[0], table.shape[1]
        assert isinstance(rows, int) and isinstance(blocks, int)
        return {
            "positions": (0, blocks * self.block_size, None),
            "sequence": (0, table.shape[0], None),
            "block_table": (0, rows // self.block_size, None),
        }

    def check(self, spec: Specs) -> None:
        """Both caches are alike, and sizes of the table are fixed."""
        q, k, v, table = spec(self.q), spec(self.k_cache), spec(self.v_cache), spec(self.block_table)
        self._check_scores(q, k)
        require(k.shape == v.shape, self.name, "both caches must have one shape", k, v)
        _check_blocks(self.name, k, self.block_size)
        is_fixed = isinstance(table.shape[1], int)
        require(is_fixed, self.name, "the block table must be i32 [sequences, blocks]", table)

    def lower(self, low: Lowering) -> None:
        """One task per row tile. If there may be few rows, tasks also share the heads."""
        q, shares = low.tensor(self.q), self._head_shares(low, self.out, self.k_cache)
        view = low.row if shares == 1 else low.col
        by_row = low.row if shares == 1 else low.whole
        heads = self._heads_of(low, self.q, self.k_cache, shares)
        low.emit(
            self.name,
            over=q if shares == 1 else Number(q.cols),
            step=None if shares == 1 else q.cols // shares,
            dtype=q.dtype,
            tiles={
                "out": view(self.out),
                "q": view(self.q),
                "positions": by_row(self.positions),
                "sequence": by_row(self.sequence),
                "k_cache": low.whole(self.k_cache),
                "v_cache": low.whole(self.v_cache),
                "block_table": low.whole(self.block_table),
            },
            ints={"block_size": self.block_size, "window": self.window, **heads},
            floats={"scale": self.scale, "softcap": self.softcap},
        )


@register
class AttentionPagedInt8(AttentionPaged):
    """`attention_paged` over the numbers of caches of int8, which `kv_write_int8` wrote."""

    name = "attention_paged_int8"
    k_cache: int = operand("c h*", dtype="i32", storage="rows")
    v_cache: int = operand("c h*", dtype="i32", storage="rows")

    @property
    def _columns_of_kv_head(self) -> int:
        return int8_columns(self.head_dim)
