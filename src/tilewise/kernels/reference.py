"""A slow and simple fp64 version of every kernel, on logical (unpacked) NumPy arrays.

Operands are in the order of the kernel's entry in `table.KERNELS`, without the outputs. Each
function returns what the kernel writes. Nothing is split, tiled or rounded. Tests compare the
native kernels with these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.dtypes import DTYPES
from tilewise.formats import WeightFormat
from tilewise.kernels.reference_activations import ACTIVATIONS
from tilewise.kernels.reference_dims import ARITHMETIC, DIMS

__all__ = ["REFERENCES", "UPDATE_STEPS"]

F64 = NDArray[np.float64]
Array = NDArray[Any]


def _f64(x: Array) -> F64:
    return np.asarray(x).astype(np.float64)


def _plus(x: F64, residual: Array | None) -> F64:
    return x if residual is None else x + _f64(residual)


def matmul(
    residual: Array | None, terms: Sequence[tuple[Array, Array]], ranges: Sequence[Any] | None = None
) -> F64:
    """sum_t A_t W_t^T + residual; `ranges[t]` are the elements of k that count."""
    total = np.zeros(1)
    for t, (a, w) in enumerate(terms):
        use = slice(None) if ranges is None else ranges[t]
        total = total + _f64(a)[:, use] @ _f64(w)[:, use].T
    return _plus(total, residual)


def quantised_numbers(blocks: Array, form: WeightFormat) -> Array:
    """The bf16 weight that rows of blocks mean."""
    return form.dequantise(blocks).astype(DTYPES["bf16"].numpy)


def matmul_quantised(
    residual: Array | None,
    terms: Sequence[tuple[Array, Array]],
    form: WeightFormat,
    ranges: Sequence[Any] | None = None,
    *,
    is_grouped: bool = False,
) -> F64:
    """`matmul` with weights in blocks of a format. A grouped product does not round them."""
    has_groups = is_grouped and form.has_grouped_product
    plain = [(a, form.dequantise(w) if has_groups else quantised_numbers(w, form)) for a, w in terms]
    return matmul(residual, plain, ranges)


def matmul_dx(
    residual: Array | None, terms: Sequence[tuple[Array, Array]], ranges: Sequence[Any] | None = None
) -> F64:
    """sum_t A_t W_t + residual; `ranges[t]` are the rows of W_t that count."""
    total = np.zeros(1)
    for t, (a, w) in enumerate(terms):
        use = slice(None) if ranges is None else ranges[t]
        total = total + _f64(a)[:, use] @ _f64(w)[use]
    return _plus(total, residual)


def matmul_dx_quantised(
    residual: Array | None,
    terms: Sequence[tuple[Array, Array]],
    forms: Sequence[WeightFormat],
    ranges: Sequence[Any] | None = None,
) -> F64:
    """`matmul_dx` with weights in blocks, each in a format of its own."""
    plain = [(a, quantised_numbers(w, form)) for (a, w), form in zip(terms, forms, strict=True)]
    return matmul_dx(residual, plain, ranges)


def matmul_dw(
    n: int,
    dy: Array | None,
    x: Array | None,
    ids: Array | None,
    de: Array | None,
    carries: Sequence[Array],
    first: int,
) -> F64:
    """dY^T X, plus the rows of dE added at rows `ids - first`, plus the sum of the carries."""
    k = (x if x is not None else de).shape[1]  # type: ignore[union-attr]
    out = np.zeros((n, k))
    if dy is not None and x is not None:
        out += _f64(dy).T @ _f64(x)
    if ids is not None and de is not None:
        for token, row in zip(ids.reshape(-1) - first, _f64(de), strict=True):
            if 0 <= token < n:
                out[token] += row
    return np.asarray(out + sum((_f64(c) for c in carries), start=np.zeros(1)))


def gemm(a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False, c: Array | None = None) -> F64:
    """op(A) op(B) + C."""
    return _plus((_f64(a).T if trans_a else _f64(a)) @ (_f64(b).T if trans_b else _f64(b)), c)


def rms_norm(x: Array, gamma: Array, eps: float, offset: float = 0.0) -> tuple[F64, F64]:
    """y and rstd. rstd has a column per group of columns, where a group has as many columns as
    gamma.
    """
    groups = _f64(x).reshape(len(x), -1, gamma.size)
    rstd = 1 / np.sqrt((groups**2).mean(2, keepdims=True) + eps)
    return (groups * rstd * (_f64(gamma) + offset)).reshape(x.shape), rstd[:, :, 0]


def sequence_splits(seq_len: int, k_splits: int) -> list[tuple[int, int, int]]:
    """Number, first and end position of every non-empty sequence split. A sequence consists of
    atoms of 64 positions, which are cut into `k_splits` splits.
    """
    atoms = -(-seq_len // 64)
    cuts = [(c, c * atoms // k_splits, (c + 1) * atoms // k_splits) for c in range(k_splits)]
    return [(c, 64 * begin, min(64 * end, seq_len)) for c, begin, end in cuts if end > begin]


def _split_sums(per_token: F64, split_rows: int, seq_len: int, k_splits: int) -> F64:
    """A row per batch split, with the sums of its sequence splits one after another."""
    position = np.arange(split_rows) % seq_len
    return np.array(
        [
            np.concatenate(
                [
                    per_token[i : i + split_rows][(begin <= position) & (position < end)].sum(0)
                    for _, begin, end in sequence_splits(seq_len, k_splits)
                ]
            )
            for i in range(0, len(per_token), split_rows)
        ]
    )


def rms_norm_backward(
    dy: Array,
    x: Array,
    rstd: Array,
    gamma: Array,
    residual: Array | None,
    split_rows: int,
    seq_len: int = 1,
    k_splits: int = 1,
    offset: float = 0.0,
) -> tuple[F64, F64]:
    """dx, and dgamma of every sequence split of every batch split, separately for every group of
    columns.
    """
    shape = (len(x), -1, gamma.size)
    d, v, s = _f64(dy).reshape(shape), _f64(x).reshape(shape), _f64(rstd)[:, :, None]
    g = (_f64(gamma) + offset) * d
    dx = s * g - v * s**3 / gamma.size * (g * v).sum(2, keepdims=True)
    sums = _split_sums((d * v * s).reshape(x.shape), split_rows, seq_len, k_splits)
    return _plus(dx.reshape(x.shape), residual), sums


def layer_norm(x: Array, gamma: Array, beta: Array, eps: float) -> tuple[F64, F64]:
    """y, and for every row the mean and 1 / standard deviation."""
    mean, variance = _f64(x).mean(1, keepdims=True), _f64(x).var(1, keepdims=True)
    stats = np.concatenate([mean, 1 / np.sqrt(variance + eps)], axis=1)
    return (_f64(x) - mean) * stats[:, 1:] * _f64(gamma) + _f64(beta), stats


def layer_norm_backward(
    dy: Array,
    x: Array,
    stats: Array,
    gamma: Array,
    residual: Array | None,
    split_rows: int,
    seq_len: int = 1,
    k_splits: int = 1,
) -> tuple[F64, F64, F64]:
    """dx, and dgamma and dbeta of every sequence split of every batch split."""
    normal, g = (_f64(x) - _f64(stats)[:, :1]) * _f64(stats)[:, 1:], _f64(gamma) * _f64(dy)
    tilt = normal * (g * normal).mean(1, keepdims=True)
    dx = _f64(stats)[:, 1:] * (g - g.mean(1, keepdims=True) - tilt)
    sums = [_split_sums(v, split_rows, seq_len, k_splits) for v in (_f64(dy) * normal, _f64(dy))]
    return _plus(dx, residual), sums[0], sums[1]


def head_sum(x: Array, ranges: Sequence[tuple[int, int]], head_dim: int) -> F64:
    """The sum of the heads in the ranges."""
    heads = [_f64(x)[0, begin:end].reshape(-1, head_dim) for begin, end in ranges]
    return np.asarray(np.concatenate(heads).sum(0, keepdims=True))


def split_tree(partials: Array, carries: Sequence[Array], num_splits: int = 1) -> F64:
    """The sum over batch splits, their sequence splits, and carries."""
    batch_splits = _f64(partials).reshape(len(partials), num_splits, -1).sum((0, 1))[None]
    return np.asarray(batch_splits + sum((_f64(c) for c in carries), start=np.zeros(1)))


def tree_resume(carries: Array | None, slot: int, partials: Sequence[Array], finish: bool) -> F64:
    """The stack of a binary counter whose value was `slot` before the partial values are added,
    with its levels side by side. If `finish`, the root of the tree instead.
    """
    levels = slot.bit_count()
    stack = [] if carries is None or not levels else list(np.split(_f64(carries), levels, axis=1))
    for number, partial in enumerate(partials, slot):
        value = _f64(partial)
        while number & 1:
            value, number = stack.pop() + value, number >> 1
        stack.append(value)
    while finish and len(stack) > 1:
        value = stack.pop()
        stack.append(stack.pop() + value)
    return np.concatenate(stack, axis=1)


def row_sum_split(x: Array, split_rows: int, seq_len: int = 1, k_splits: int = 1) -> F64:
    """The sum of every sequence split of every batch split."""
    return _split_sums(_f64(x), split_rows, seq_len, k_splits)


def column_sum_split(x: Array, split_rows: int, seq_len: int = 1, k_splits: int = 1) -> F64:
    """`row_sum_split` of every column."""
    return _split_sums(_f64(x), split_rows, seq_len, k_splits)


def rope(x: Array, positions: Array, table: Array, head_dim: int, inverse: bool = False) -> F64:
    """Rotation by the angles of its position: of the two halves of every head, or of its first
    elements if the table has fewer columns.
    """
    half = table.shape[1] // 2
    angles = _f64(table)[positions.reshape(-1)][:, None, :]
    cosine, sine = angles[..., :half], angles[..., half:] * (-1 if inverse else 1)
    heads = _f64(x).reshape(len(x), -1, head_dim)
    a, b, rest = np.split(heads, [half, 2 * half], axis=-1)
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, rest], -1).reshape(x.shape)


def softmax(x: Array) -> F64:
    """Softmax of every row."""
    e = np.exp(_f64(x) - _f64(x).max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def softmax_backward(dy: Array, y: Array) -> F64:
    """y (dy - sum(dy y))."""
    mean = (_f64(dy) * _f64(y)).sum(-1, keepdims=True)
    return np.asarray(_f64(y) * (_f64(dy) - mean))


def _capped(scores: F64, softcap: float) -> tuple[F64, F64]:
    """Scores after the soft cap, and the slope of the cap. A `softcap` of 0 means that there is no
    cap.
    """
    if not softcap:
        return scores, np.ones_like(scores)
    bent = np.tanh(scores / softcap)
    return softcap * bent, 1 - bent**2


def _hidden(count: int, causal: bool, window: int, first: Array | None, row: int) -> NDArray[np.bool_]:
    """Which positions of a sequence, whose first row is `row`, a query does not see."""
    query, position = np.arange(count)[:, None], np.arange(count)[None, :]
    hidden = causal & ((position > query) | (position <= query - (window or count)))
    return np.asarray(hidden if first is None else hidden | (position < first[row : row + count]))


def _sequences(lengths: Array | None, rows: int, seq_len: int) -> Iterator[tuple[int, int]]:
    """First row and length of every sequence."""
    for i, row in enumerate(range(0, rows, seq_len)):
        yield row, seq_len if lengths is None else int(lengths.reshape(-1)[i])


def _head(x: Array, row: int, length: int, head: int, dim: int) -> F64:
    return _f64(x)[row : row + length, head * dim : (head + 1) * dim]


def attention(
    q: Array,
    k: Array,
    v: Array,
    seq_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    lengths: Array | None = None,
    first: Array | None = None,
) -> tuple[F64, F64]:
    """The output and lse of self-attention in each sequence; zero after its length."""
    out, lse = np.zeros((len(q), heads * dim)), np.zeros((len(q), heads))
    for row, length in _sequences(lengths, len(q), seq_len):
        rows = slice(row, row + length)
        for h in range(heads):
            kv = h * kv_heads // heads
            keys, values = _head(k, row, length, kv, dim), _head(v, row, length, kv, dim)
            scores, _ = _capped(_head(q, row, length, h, dim) @ keys.T * scale, softcap)
            scores = np.where(_hidden(length, causal, window, first, row), -np.inf, scores)
            top = scores.max(1, keepdims=True)
            lse[rows, h] = (np.log(np.exp(scores - top).sum(1, keepdims=True)) + top)[:, 0]
            out[rows, h * dim : (h + 1) * dim] = softmax(scores) @ values
    return out, lse


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    seq_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    lengths: Array | None = None,
    first: Array | None = None,
) -> tuple[F64, F64, F64]:
    """dq, dk and dv. The softmax is computed again here, so out and lse are not operands."""
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for row, length in _sequences(lengths, len(q), seq_len):
        rows = slice(row, row + length)
        for h in range(heads):
            kv = h * kv_heads // heads
            own, shared = slice(h * dim, (h + 1) * dim), slice(kv * dim, (kv + 1) * dim)
            query, key = _head(q, row, length, h, dim), _head(k, row, length, kv, dim)
            scores, slope = _capped(query @ key.T * scale, softcap)
            p = softmax(np.where(_hidden(length, causal, window, first, row), -np.inf, scores))
            gradient = _head(dout, row, length, h, dim)
            ds = softmax_backward(gradient @ _head(v, row, length, kv, dim).T, p) * slope * scale
            dq[rows, own] = ds @ key
            dk[rows, shared] += ds.T @ query
            dv[rows, shared] += p.T @ gradient
    return dq, dk, dv


def attention_paged(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    positions: Array,
    sequence: Array,
    block_table: Array,
    block_size: int,
    heads: int,
    kv_heads: int,
    dim: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> F64:
    """Attention of single tokens over the pages of their sequences."""
    out = np.zeros(q.shape)
    keys, values = (_f64(cache_pages(cache, block_size, dim)) for cache in (k_cache, v_cache))
    for t, (position, owner) in enumerate(zip(positions.reshape(-1), sequence.reshape(-1), strict=True)):
        seen = np.arange(max(0, position + 1 - window) if window else 0, position + 1)
        blocks, places = block_table[owner][seen // block_size], seen % block_size
        for h in range(heads):
            kv = h * kv_heads // heads
            query = _f64(q)[t : t + 1, h * dim : (h + 1) * dim]
            p = softmax(_capped(query @ keys[blocks, kv, places].T * scale, softcap)[0])
            out[t, h * dim : (h + 1) * dim] = (p @ values[blocks, kv, places])[0]
    return out


def cache_pages(cache: Array, block_size: int, dim: int) -> Array:
    """A view of a cache `[blocks * block_size, heads * dim]` as it is used: `[blocks, heads, block_size, dim]`."""
    return cache.reshape(-1, cache.shape[1] // dim, block_size, dim)


def kv_write(cache: Array, x: Array, slots: Array, block_size: int, dim: int) -> Array:
    """The cache with row t of x at slots[t]; negative slots are skipped."""
    out = cache.copy()
    pages = cache_pages(out, block_size, dim)
    for row, slot in zip(x, slots.reshape(-1), strict=True):
        if slot >= 0:
            pages[slot // block_size, :, slot % block_size] = row.reshape(-1, dim)
    return out


def int8_parts(cache: Array, block_size: int, dim: int) -> tuple[Array, Array]:
    """Views of a cache of int8, i32 `[blocks * block_size, heads * (dim / 4 + 1)]`: its codes, int8 `[blocks, heads,
    block_size, dim]`, and its scales, f32 `[blocks, heads, block_size]`.
    """
    words = dim // 4 + 1
    heads = cache.reshape(-1, cache.shape[1] // words, block_size * words)
    codes = heads[..., : block_size * dim // 4].view(np.int8)
    return codes.reshape(*codes.shape[:2], block_size, dim), heads[..., -block_size:].view(np.float32)


def int8_numbers(cache: Array, block_size: int, dim: int, dtype: np.dtype[Any]) -> Array:
    """The cache `[blocks * block_size, heads * dim]` that a cache of int8 means."""
    codes, scales = int8_parts(cache, block_size, dim)
    numbers = (codes.astype(np.float32) * scales[..., None]).astype(dtype)
    return numbers.reshape(len(cache), -1)


def kv_write_int8(cache: Array, x: Array, slots: Array, block_size: int, dim: int) -> Array:
    """`kv_write` into a cache of int8; the largest magnitude of a row and head becomes 127."""
    out = cache.copy()
    codes, scales = int8_parts(out, block_size, dim)
    for row, slot in zip(x.astype(np.float32), slots.reshape(-1), strict=True):
        if slot >= 0:
            heads = row.reshape(-1, dim)
            scale = np.abs(heads).max(1) / np.float32(127)
            with np.errstate(invalid="ignore", divide="ignore"):
                quotients = np.where(scale[:, None] > 0, heads / scale[:, None], 0)
            codes[slot // block_size, :, slot % block_size] = np.rint(quotients).astype(np.int8)
            scales[slot // block_size, :, slot % block_size] = scale
    return out


def attention_paged_int8(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    positions: Array,
    sequence: Array,
    block_table: Array,
    block_size: int,
    heads: int,
    kv_heads: int,
    dim: int,
    *scores: Any,
) -> F64:
    """`attention_paged` over the numbers of caches of int8."""
    keys, values = (int8_numbers(cache, block_size, dim, q.dtype) for cache in (k_cache, v_cache))
    sizes = block_size, heads, kv_heads, dim
    return attention_paged(q, keys, values, positions, sequence, block_table, *sizes, *scores)


def embedding(ids: Array, table: Array, vocab_begin: int) -> Array:
    """Rows of this shard's table. The row is zero for an id outside of the shard."""
    local = ids.reshape(-1) - vocab_begin
    inside = (local >= 0) & (local < len(table))
    return np.where(inside[:, None], table[np.where(inside, local, 0)], np.zeros((), table.dtype))


def embedding_quantised(ids: Array, table: Array, form: WeightFormat, vocab_begin: int) -> Array:
    """`embedding` with a table in blocks of a format."""
    return embedding(ids, quantised_numbers(table, form), vocab_begin)


def gather_rows(x: Array, index: Array) -> Array:
    """Rows of x."""
    return np.asarray(x[index.reshape(-1)])


def cross_entropy_max(logits: Array, labels: Array, vocab_begin: int, ignore_index: int) -> F64:
    """Row maximum, and the label's logit or -inf."""
    stats = np.full((len(logits), 2), -np.inf)
    for r, label in enumerate(labels.reshape(-1)):
        stats[r, 0] = _f64(logits[r]).max()
        if label != ignore_index and 0 <= label - vocab_begin < logits.shape[1]:
            stats[r, 1] = _f64(logits[r])[label - vocab_begin]
    return stats


def cross_entropy_sum(logits: Array, stats: Array) -> F64:
    """Sum of exp(logit - maximum)."""
    return np.asarray(np.exp(_f64(logits) - _f64(stats)[:, :1]).sum(1, keepdims=True))


def cross_entropy_grad(
    logits: Array,
    stats: Array,
    sums: Array,
    labels: Array,
    inv_count: Array,
    vocab_begin: int,
    ignore_index: int,
) -> tuple[F64, F64]:
    """dlogits and the loss of every row."""
    ignored = labels.reshape(-1, 1) == ignore_index
    loss = np.log(_f64(sums)) + _f64(stats)[:, :1] - _f64(stats)[:, 1:]
    p = np.exp(_f64(logits) - _f64(stats)[:, :1]) / _f64(sums)
    p[np.arange(logits.shape[1])[None, :] == labels.reshape(-1, 1) - vocab_begin] -= 1
    weight = np.where(ignored, 0.0, _f64(inv_count))
    return p * weight, np.where(ignored, 0.0, loss) * weight


UPDATE_STEPS: dict[str, Callable[[F64, F64, F64], F64]] = {
    "add": lambda x, y, z: x + y,
    "subtract": lambda x, y, z: x - y,
    "multiply": lambda x, y, z: x * y,
    "divide": lambda x, y, z: x / y,
    "fused": lambda x, y, z: x * y + z,
    "sqrt": lambda x, y, z: np.sqrt(x),
    "negate": lambda x, y, z: -x,
    "absolute": lambda x, y, z: np.abs(x),
    "sign": lambda x, y, z: np.sign(x),
    "maximum": lambda x, y, z: np.maximum(x, y),
    "minimum": lambda x, y, z: np.minimum(x, y),
}
"""What each step of an update computes from three values; a step's number is its position
(native/kernels/update.cc)."""


def update(
    arrays: Sequence[Array],
    hyper: Array,
    scale: float,
    steps: Sequence[int],
    constants: Sequence[float],
    left: Sequence[int],
) -> list[F64]:
    """Weight and states (the arrays without the gradient) after a program of steps. They are
    unchanged if the scale is NaN.
    """
    *old, gradient = (_f64(a) for a in arrays)
    if np.isnan(scale):
        return old
    values = [*old, gradient * scale]
    values += [np.full_like(gradient, float(v)) for v in (*hyper.reshape(-1), *constants)]
    compute = list(UPDATE_STEPS.values())
    with np.errstate(all="ignore"):
        for kind, a, b, c in zip(*(steps[i::4] for i in range(4)), strict=True):
            values.append(compute[kind](values[a], values[b], values[c]))
    return [values[v] for v in left]


def square_sum(
    grad: Array, rows: int, first_row: int, first_entry: int, size: int, k_splits: Sequence[tuple[int, int]]
) -> F64:
    """Entries [first_entry, first_entry + size) of the table of a gradient's partial sums. Entry c
    * rows + r is the sum of squares of row r over the columns of k split c. The whole gradient has
    `rows` rows; `grad` has those from `first_row` on.
    """
    table = np.zeros(max(len(k_splits) * rows, first_entry + size))
    for c, (begin, end) in enumerate(k_splits):
        first = c * rows + first_row
        if end > begin:
            table[first : first + len(grad)] = (_f64(grad)[:, begin:end] ** 2).sum(1)
    return table[first_entry : first_entry + size, None]


def norm_scale(squares: Array, loss: Array, max_norm: float) -> F64:
    """The norm, and the factor that clips it. The factor is NaN if the norm (in fp32) or the loss
    is not finite.
    """
    norm = float(np.sqrt(_f64(squares).sum()))
    if not (norm <= float(np.finfo(np.float32).max) and np.isfinite(loss).all()):
        return np.array([norm, np.nan])
    return np.array([norm, 1.0 if max_norm <= 0 else min(1.0, max_norm / (norm + 1e-6))])


def tree_add(residual: Array | None, inputs: Sequence[Array]) -> F64:
    """The sum of the inputs and the residual."""
    return _plus(np.sum([_f64(x) for x in inputs], axis=0), residual)


def tree_max(inputs: Sequence[Array]) -> F64:
    """The elementwise maximum."""
    return np.asarray(np.max([_f64(x) for x in inputs], axis=0))


def tree_min(inputs: Sequence[Array]) -> F64:
    """The elementwise minimum."""
    return np.asarray(np.min([_f64(x) for x in inputs], axis=0))


def tree_or(inputs: Sequence[Array]) -> Array:
    """The elementwise or of bit patterns."""
    return np.asarray(np.bitwise_or.reduce(list(inputs)))


REFERENCES: dict[str, Any] = {
    "matmul": matmul,
    "matmul_quantised": matmul_quantised,
    "matmul_dx": matmul_dx,
    "matmul_dx_quantised": matmul_dx_quantised,
    "matmul_dw": matmul_dw,
    "gemm": gemm,
    "rms_norm": rms_norm,
    "rms_norm_backward": rms_norm_backward,
    "layer_norm": layer_norm,
    "layer_norm_backward": layer_norm_backward,
    "split_tree": split_tree,
    "head_sum": head_sum,
    "tree_resume": tree_resume,
    "row_sum_split": row_sum_split,
    "column_sum_split": column_sum_split,
    "rope": rope,
    "attention": attention,
    "attention_backward": attention_backward,
    "attention_paged": attention_paged,
    "attention_paged_int8": attention_paged_int8,
    "kv_write": kv_write,
    "kv_write_int8": kv_write_int8,
    **ACTIVATIONS,
    **ARITHMETIC,
    **DIMS,
    "softmax": softmax,
    "softmax_backward": softmax_backward,
    "add": lambda a, b: _f64(a) + _f64(b),
    "add_bias": lambda x, bias: _f64(x) + _f64(bias),
    "multiply": lambda a, b: _f64(a) * _f64(b),
    "scale": lambda x, s: _f64(x) * s,
    "copy": _f64,
    "fetch": _f64,
    "store": _f64,
    "exp": lambda x: np.exp(_f64(x)),
    "log": lambda x: np.log(_f64(x)),
    "row_sum": lambda x: _f64(x).sum(1, keepdims=True),
    "cast_f32_bf16": _f64,
    "cast_bf16_f32": _f64,
    "spread": lambda x, rows, cols: np.full((rows, cols), _f64(x).item()),
    "embedding": embedding,
    "embedding_quantised": embedding_quantised,
    "gather_rows": gather_rows,
    "cross_entropy_max": cross_entropy_max,
    "cross_entropy_sum": cross_entropy_sum,
    "cross_entropy_grad": cross_entropy_grad,
    "update": update,
    "square_sum": square_sum,
    "norm_scale": norm_scale,
    "tree_add": tree_add,
    "tree_max": tree_max,
    "tree_min": tree_min,
    "tree_sum": lambda inputs: tree_add(None, inputs),
    "tree_or": tree_or,
    "copy_pairs": _f64,
}
"""By kernel name without the dtype suffix. The `peak` loops compute nothing and have none."""
