"""Devices on named axes. A mesh knows coordinates only; who computes what is the strategy's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tilewise.core.errors import LayoutError

__all__ = ["DeviceMesh"]

_MAX_DEVICES = (
    1 << 16
)  # more than one machine can have, and few enough to be planned for before they are refused
_MAX_DIGITS = 9


@dataclass(frozen=True, init=False)
class DeviceMesh:
    """Devices arranged on named axes, row-major: the last axis varies fastest.

    Args:
        axes: size per axis name, in order, for example `{"dp": 2, "tp": 4}`.

    Raises:
        LayoutError: an axis has no name or a size below one, or there are more devices than can be.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, axes: Mapping[str, int]) -> None:
        for name, size in axes.items():
            if not name or size < 1:
                raise LayoutError(
                    f"[core.mesh] an axis needs a name and a size of at least 1; got {name!r}={size}; write dp=2,tp=2"
                )
        if prod(axes.values()) > _MAX_DEVICES:
            raise LayoutError(
                f"[core.mesh] a mesh has at most {_MAX_DEVICES} devices; got {prod(axes.values())}; choose smaller axes"
            )
        object.__setattr__(self, "names", tuple(axes))
        object.__setattr__(self, "sizes", tuple(axes.values()))

    @classmethod
    def parse(cls, text: str) -> DeviceMesh:
        """A mesh from `dp=2,tp=4`.

        Raises:
            LayoutError: the text is not of that form.
        """
        axes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if not (size.isascii() and size.isdecimal() and len(size) <= _MAX_DIGITS) or name in axes:
                raise LayoutError(
                    f"[core.mesh] a mesh reads axis=size,…; got {text!r}; write for example dp=2,tp=2"
                )
            axes[name] = int(size)
        return cls(axes)

    @property
    def num_devices(self) -> int:
        """Product of all axis sizes."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """Size of an axis; 1 for one the mesh does not have."""
        return self.sizes[self.names.index(axis)] if axis in self.names else 1

    def coordinate(self, device: int, axis: str) -> int:
        """Position of `device` on `axis`; 0 for an axis the mesh does not have."""
        if axis not in self.names:
            return 0
        index = self.names.index(axis)
        return device // prod(self.sizes[index + 1 :]) % self.sizes[index]

    def team(self, device: int, axis: str) -> list[int]:
        """The devices that differ from `device` on `axis` only, in the order of that axis (`device` among them)."""
        if axis not in self.names:
            return [device]
        stride = prod(self.sizes[self.names.index(axis) + 1 :])
        first = device - self.coordinate(device, axis) * stride
        return [first + i * stride for i in range(self.size(axis))]

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.sizes)) or "one device"
