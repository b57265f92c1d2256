"""The windows of images that a convolution multiplies with its weight, as rows (im2col), and its
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.graph.ops.common import incoming, require
from tilewise.graph.ops.items import Items, require_dims, result_spec
from tilewise.ir.graph import TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Specs, operand, register, result
from tilewise.ir.tape import Tape

__all__: list[str] = []


class _Windows(Op):
    """Base of both: `image` is [channels, height, width]; the other pairs are (height, width)."""

    image: tuple[int, ...]
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def places(self) -> tuple[int, int]:
        """How many windows fit, along the height and along the width."""
        down, right = (
            (size + 2 * pad - dilation * (window - 1) - 1) // stride + 1
            for size, window, stride, pad, dilation in zip(
                self.image[1:], self.window, self.stride, self.padding, self.dilation
            )
        )
        return down, right

    def _check_windows(self, *specs: TensorSpec) -> None:
        require_dims(self.name, *specs)
        pairs = self.window, self.stride, self.padding, self.dilation
        fits = len(self.image) == 3 and all(len(pair) == 2 for pair in pairs) and min(self.image) > 0
        fits = fits and min(*self.window, *self.stride, *self.dilation) > 0 and min(self.padding) >= 0
        rule = "windows, strides and dilations must be above 0, padding must not be negative"
        require(fits, self.name, f"{rule}, not {pairs} for images {list(self.image)}", *specs)
        rule = f"a window of {list(self.window)} must fit into the padded image"
        require(min(self.places()) > 0, self.name, rule, *specs)

    def _row(self) -> int:
        return self.image[0] * self.window[0] * self.window[1]

    def _emit(self, low: Lowering, x: int, out: int) -> None:
        items = Items.of(low, 1, out, x)
        names = ("height", "width")
        ints = {"channels": self.image[0]}
        for prefix, values in (
            ("", self.image[1:]),
            ("out_", self.places()),
            ("window_", self.window),
            ("stride_", self.stride),
            ("pad_", self.padding),
            ("dilation_", self.dilation),
        ):
            ints |= {prefix + name: value for name, value in zip(names, values)}
        items.emit(self.name, out, {"out": out, "x": x}, ints=ints)


@register
class Unfold(_Windows):
    """`[batch, channels, height, width]` to `[batch, places, channels * window]`."""

    name = "unfold"
    x: int = operand("b c h w")
    out: int = result("b places row")

    def check(self, spec: Specs) -> None:
        """The windows fit."""
        x = spec(self.x)
        self._check_windows(x)
        require(x.shape[1:] == self.image, self.name, f"images must be {list(self.image)}", x)

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Only the batch stays."""
        return {"out": "b places row"}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """A row per window."""
        x, (down, right) = spec(self.x), self.places()
        return [result_spec(x, [x.shape[0], down * right, self._row()], [x.labels[0], None, None])]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Every element is in several windows."""
        return {"x": tape.op(Fold(x=incoming(self, grads), **self.attrs))[0]}

    def lower(self, low: Lowering) -> None:
        """One task per item."""
        self._emit(low, self.x, self.out)


@register
class Fold(_Windows):
    """The sum of the windows of an image, where they came from."""

    name = "fold"
    x: int = operand("b places row")
    out: int = result("b c h w")

    def check(self, spec: Specs) -> None:
        """The windows fit."""
        x, (down, right) = spec(self.x), self.places()
        self._check_windows(x)
        fits = x.shape[1:] == (down * right, self._row())
        require(
            fits, self.name, f"windows of images {list(self.image)} must be {[down * right, self._row()]}", x
        )

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Only the batch stays."""
        return {"out": "b c h w"}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """Images."""
        x = spec(self.x)
        return [result_spec(x, [x.shape[0], *self.image], [x.labels[0], None, None, None])]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """The windows of dy."""
        return {"x": tape.op(Unfold(x=incoming(self, grads), **self.attrs))[0]}

    def lower(self, low: Lowering) -> None:
        """One task per item."""
        self._emit(low, self.x, self.out)
