"""`ComposedMethods`: the calls of `GraphBuilder` that are made of several ops: losses, convolutions,
attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilewise.core.dims import MAX_SIZE
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator, shown
from tilewise.graph.methods import TensorMethods, fixed_sizes
from tilewise.graph.ops.common import SOFTCAPS
from tilewise.ir.graph import TensorNode
from tilewise.kernels.user import TileKernel

__all__ = ["ComposedMethods", "attention_scores"]

_validate = Validator("graph", ShapeError)


class ComposedMethods(TensorMethods):
    """The part of `GraphBuilder` for losses, convolutions and attention."""

    def kernel(
        self,
        kernel: TileKernel,
        inputs: Sequence[TensorNode],
        *,
        out_features: int | None = None,
        backward: Sequence[TileKernel | None] | None = None,
        **attributes: float,
    ) -> TensorNode:
        """The result of a kernel of yours, row tile by row tile: rows of the result follow from the same rows
        of the inputs. Devices may share rows.

        Args:
            kernel: what `tilewise.tile_kernel` returned, with one operand `out` and an operand `in` per
                input.
            inputs: tensors with equal dims but the last one.
            out_features: the last dim of the result; by default that of the first input.
            backward: per input, the kernel of its gradient, or None. Its operands are dx (`out`), dy, and
                the inputs. Without it, no loss may depend on the result.
            attributes: the kernels' integers and floats, by name.
        """
        one = _validate.instance(
            "kernel", "kernel", kernel, TileKernel, "register it by tilewise.tile_kernel"
        )
        tensors = [
            self.draft.own("kernel", x) for x in _validate.sequence("kernel", "inputs", inputs, "tensors")
        ]
        if not tensors:
            _validate.invalid("kernel", "a kernel needs an input", "none", "pass a tensor")
        widths = tuple(fixed_sizes("kernel", x.shape[-1:])[0] for x in tensors)
        names = [*(i.name for i in one.spec.ints), *one.spec.floats]
        if {*names} != {*attributes}:
            got = ", ".join(attributes) or "none"
            _validate.invalid(
                "kernel", f"attributes are {', '.join(names) or 'none'}", got, "pass each by name"
            )
        gradients = _validate.sequence("kernel", "backward", backward or (), "kernels")
        for other in gradients:
            if other is not None:
                _validate.instance(
                    "kernel", "a kernel", other, TileKernel, "register it by tilewise.tile_kernel"
                )
        return self.op(
            "kernel",
            tensors,
            kernel=one.name,
            backward=tuple("" if b is None else b.name for b in gradients),
            widths=widths,
            out_features=widths[0] if out_features is None else out_features,
            ints=tuple(attributes[i.name] for i in one.spec.ints),
            floats=tuple(float(attributes[f]) for f in one.spec.floats),
        )[0]

    # ---- losses -------------------------------------------------------------------------------------------

    def mse_loss(self, x: TensorNode, target: TensorNode, *, reduction: str = "mean") -> TensorNode:
        """The squared difference: its `mean` or `sum` over everything, or every element (`none`)."""
        with self.all_or_nothing():
            difference = self.sub(x, target)
            return self._reduced("mse_loss", self.mul(difference, difference), reduction)

    def l1_loss(self, x: TensorNode, target: TensorNode, *, reduction: str = "mean") -> TensorNode:
        """The absolute difference, reduced like `mse_loss`."""
        with self.all_or_nothing():
            return self._reduced("l1_loss", self.abs(self.sub(x, target)), reduction)

    def binary_cross_entropy_with_logits(
        self, x: TensorNode, target: TensorNode, *, reduction: str = "mean"
    ) -> TensorNode:
        """Binary cross-entropy of logits with targets in [0, 1], reduced like `mse_loss`."""
        with self.all_or_nothing():
            loss = self._binary("bce_with_logits", x, target)
            return self._reduced("binary_cross_entropy_with_logits", loss, reduction)

    def _reduced(self, call: str, x: TensorNode, reduction: str) -> TensorNode:
        _validate.choice(call, "reduction", reduction, ("mean", "sum", "none"))
        return x if reduction == "none" else self._total(reduction, x, None, False)

    def sequence_log_probs(
        self, logits: TensorNode, labels: TensorNode, *, ignore_index: int = -100
    ) -> TensorNode:
        """The sum of the log-probabilities of each sequence's counted labels, `[batch]` in f32.

        Args:
            logits: `[batch, seq, classes]`; `seq` may be a symbol.
            labels: `[batch, seq]` i32.
            ignore_index: the label that is not counted.
        """
        name = "sequence_log_probs.one"
        with self.all_or_nothing():
            is_new = name not in self.draft.names
            one = self.constant(np.ones(1, np.float32), name=name, storage="vector") if is_new else None
            one = one or self.draft.tensors[self.draft.names[name]]
            return self.op("sequence_log_probs", [logits, labels, one], ignore_index=ignore_index)[0]

    def swap_pairs(self, x: TensorNode) -> TensorNode:
        """x `[batch]` f32 with the elements 2i and 2i + 1 exchanged. Every device and microbatch must
        have whole pairs.
        """
        return self.op("swap_pairs", [x])[0]

    # ---- convolutions -------------------------------------------------------------------------------------

    def conv2d(
        self,
        x: TensorNode,
        weight: TensorNode,
        bias: TensorNode | None = None,
        *,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
    ) -> TensorNode:
        """Convolution of images `[batch, channels, height, width]`, computed as a product of their windows
        with the weight.

        Args:
            x: the images.
            weight: a parameter `[out_channels, channels * kernel_height * kernel_width]`: PyTorch's
                weight, with its last three dims merged.
            bias: a vector `[out_channels]`.
            kernel_size: of the window: a number, or (height, width).
            stride: between windows: the same.
            padding: zeros around the image: the same.
            dilation: distance of the elements of a window: the same.
        """
        sizes = fixed_sizes("conv2d", self.draft.own("conv2d", x).shape)
        if len(sizes) != 4:
            rule = "images must be [batch, channels, height, width]"
            _validate.invalid("conv2d", rule, f"{x.spec}", "reshape them")
        pairs = {
            "window": _pair_of("kernel_size", kernel_size, 1),
            "stride": _pair_of("stride", stride, 1),
            "padding": _pair_of("padding", padding, 0),
            "dilation": _pair_of("dilation", dilation, 1),
        }
        with self.all_or_nothing():
            windows = self.op("unfold", [x], image=sizes[1:], **pairs)[0]
            op = self._product_with(self.draft.own("conv2d", weight).spec, True)
            y = self.op(op, [windows, weight, None, None], transpose=True)[0]
            if bias is not None:
                y = self.op("add_bias", [y, bias])[0]
            down, right = (
                (n + 2 * p - d * (k - 1) - 1) // s + 1
                for n, k, s, p, d in zip(
                    sizes[2:], *(pairs[name] for name in ("window", "stride", "padding", "dilation"))
                )
            )
            channels = fixed_sizes("conv2d", y.shape)[-1]
            return self._reshaped(self.permute(y, (0, 2, 1)), (sizes[0], channels, down, right))

    def conv1d(
        self,
        x: TensorNode,
        weight: TensorNode,
        bias: TensorNode | None = None,
        *,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
    ) -> TensorNode:
        """Convolution of `[batch, channels, length]`; the weight is `[out_channels, channels *
        kernel_size]`. The arguments are those of `conv2d`.
        """
        sizes = fixed_sizes("conv1d", self.draft.own("conv1d", x).shape)
        if len(sizes) != 3:
            _validate.invalid("conv1d", "x must be [batch, channels, length]", f"{x.spec}", "reshape it")
        with self.all_or_nothing():
            y = self.conv2d(
                self._reshaped(x, (*sizes[:2], 1, sizes[2])),
                weight,
                bias,
                kernel_size=(1, kernel_size),
                stride=(1, stride),
                padding=(0, padding),
                dilation=(1, dilation),
            )
            batch, channels, _, length = fixed_sizes("conv1d", y.shape)
            return self._reshaped(y, (batch, channels, length))

    # ---- attention ----------------------------------------------------------------------------------------

    def scaled_dot_product_attention(
        self,
        q: TensorNode,
        k: TensorNode,
        v: TensorNode,
        *,
        head_dim: int | None = None,
        attn_mask: TensorNode | None = None,
        causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        lengths: TensorNode | None = None,
        first: TensorNode | None = None,
    ) -> TensorNode:
        """Attention on `[batch, heads, seq, head_dim]`, or with `head_dim` on
        `[batch, seq, heads * head_dim]`, where heads are adjacent in the last dim. Grouped if k and v
        have fewer heads.

        One op that never stores the scores computes self-attention without a mask. With `attn_mask`, or
        if keys have another length than queries, the scores are stored.

        Args:
            q: queries.
            k: keys.
            v: values.
            head_dim: elements of a head, if heads are adjacent in the last dim. Tensors of three dims
                without it have one head.
            attn_mask: added to the scores; broadcast to `[batch, heads, queries, keys]`. -inf hides a
                key. Every query must see a key.
            causal: a token attends to itself and to earlier tokens; otherwise to every token of its
                sequence.
            scale: factor of the scores; by default 1 / sqrt(head_dim).
            window: maximum number of positions that a token attends to, including itself; needs
                `causal`.
            softcap: scores s become `softcap * tanh(s / softcap)`.
            lengths: i32 `[batch]` in [1, seq], without `causal`: positions from a length on are
                padding, which no token of the sequence attends to. The result there is 0. Not with
                `attn_mask`.
            first: i32 `[batch, seq]`, with `causal`: the first position that a token attends to. So
                several documents can share a sequence; a token of a document gets the position at
                which the document begins. Not with `attn_mask`.
        """
        for x in (q, k, v, *(() if attn_mask is None else (attn_mask,))):
            self.draft.own("attention", x)
        has_heads = len(q.shape) == 4
        dim = q.shape[-1] if head_dim is None else head_dim
        size = _validate.integer("attention", "head_dim", dim, 1, MAX_SIZE)
        scores = attention_scores("attention", scale, size, window, softcap)
        is_stored = attn_mask is not None or (len(q.shape) > 2 and q.shape[-2] != k.shape[-2])
        if not has_heads and not is_stored:
            return self.op("attention", [q, k, v, lengths, first], head_dim=size, causal=causal, **scores)[0]
        with self.all_or_nothing():
            if has_heads and not is_stored and v.shape == k.shape:
                parts = [self._join_heads(x) for x in (q, k, v)]
                out = self.op("attention", [*parts, lengths, first], head_dim=size, causal=causal, **scores)[
                    0
                ]
                return self._split_heads(out, size)
            if lengths is not None or first is not None:
                rule = "lengths and first need self-attention without a mask"
                _validate.invalid("attention", rule, f"{q.spec}, {k.spec}", "hide padding by attn_mask")
            if has_heads:
                return self._stored_attention((q, k, v), attn_mask, causal, scores)
            q, k, v = (self._split_heads(x, size) for x in (q, k, v))
            return self._join_heads(self._stored_attention((q, k, v), attn_mask, causal, scores))

    def _split_heads(self, x: TensorNode, head_dim: int) -> TensorNode:
        """`[batch, seq, heads * head_dim]` to `[batch, heads, seq, head_dim]`."""
        batch, seq, width = fixed_sizes("attention", x.shape)
        if width % head_dim:
            rule = f"the last dim must hold heads of {head_dim}"
            _validate.invalid("attention", rule, f"{x.spec}", "correct head_dim")
        return self.permute(self.reshape(x, (batch, seq, width // head_dim, head_dim)), (0, 2, 1, 3))

    def _join_heads(self, x: TensorNode) -> TensorNode:
        """The reverse of `_split_heads`."""
        batch, heads, seq, dim = fixed_sizes("attention", x.shape)
        return self.reshape(self.permute(x, (0, 2, 1, 3)), (batch, seq, heads * dim))

    def _stored_attention(
        self,
        parts: tuple[TensorNode, TensorNode, TensorNode],
        attn_mask: TensorNode | None,
        causal: bool,
        scores: Mapping[str, float],
    ) -> TensorNode:
        """Attention on `[batch, heads, seq, head_dim]` as products and a softmax of stored scores."""
        q, k, v = parts
        (_, heads, queries, _), (_, kv_heads, keys, _) = (fixed_sizes("attention", x.shape) for x in (q, k))
        if heads % kv_heads:
            rule = "query heads must divide by KV heads"
            _validate.invalid("attention", rule, f"{q.spec}, {k.spec}", "correct the shapes")
        if kv_heads != heads:
            k, v = (self._repeat_heads(x, heads // kv_heads) for x in (k, v))
        window = int(scores["window"])
        s = self.op("scale", [self.matmul(q, k, trans_b=True)], factor=scores["scale"])[0]
        s = self.op("softcap", [s], cap=scores["softcap"])[0] if scores["softcap"] else s
        if window and not causal:
            _validate.invalid("attention", "a window must be causal", f"window={window}", "pass causal=True")
        if causal:
            name = f"attention.hidden.{queries}x{keys}.{window}"
            is_new = name not in self.draft.names
            hidden = self.constant(_hidden(queries, keys, window), name=name) if is_new else None
            s = self._add_as(s, hidden or self.draft.tensors[self.draft.names[name]])
        if attn_mask is not None:
            s = self._add_as(s, attn_mask)
        return self.matmul(self.softmax(s), v)

    def _add_as(self, x: TensorNode, other: TensorNode) -> TensorNode:
        """The sum, in the dtype of x."""
        is_same = other.spec.dtype == x.spec.dtype
        return self.add(x, other if is_same else self.op("cast", [other], dtype=x.spec.dtype.name)[0])

    def _repeat_heads(self, x: TensorNode, times: int) -> TensorNode:
        batch, heads, seq, dim = fixed_sizes("attention", x.shape)
        wide = self.expand(self.reshape(x, (batch, heads, 1, seq, dim)), (batch, heads, times, seq, dim))
        return self.reshape(wide, (batch, heads * times, seq, dim))


def _hidden(queries: int, keys: int, window: int) -> np.ndarray:
    """-inf where a causal query does not see a key, else 0."""
    query, key = np.arange(queries)[:, None], np.arange(keys)[None, :]
    is_hidden = key > query
    if window:
        is_hidden |= key <= query - window
    return np.where(is_hidden, -np.inf, 0.0).astype(np.float32)


def attention_scores(
    call: str, scale: float | None, head_dim: int, window: int | None, softcap: float | None
) -> dict[str, float]:
    """The attributes of attention scores: scale (by default 1 / sqrt of the head size), softcap and
    window. A softcap or window of 0 stands for none.
    """
    if scale is None:
        scale = float(_validate.integer(call, "head_dim", head_dim, 1, 1 << 20) ** -0.5)
    return {
        "scale": _validate.number(call, "scale", scale),
        "window": 0 if window is None else _validate.integer(call, "window", window, 1, (1 << 31) - 1),
        "softcap": 0.0 if softcap is None else _validate.number(call, "softcap", softcap, *SOFTCAPS),
    }


def _pair_of(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else value
    if not isinstance(pair, tuple) or len(pair) != 2:
        _validate.invalid("conv2d", f"{name} must be a number or (height, width)", shown(value), "correct it")
    first, second = (_validate.integer("conv2d", name, n, least, MAX_SIZE) for n in pair)
    return first, second
