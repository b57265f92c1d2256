"""Devices on named axes. A mesh knows coordinates only; who computes what is the strategy's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tilewise.core.border import Border, shown
from tilewise.core.errors import LayoutError

_border = Border("core", LayoutError)
MAX_DEVICES = 1024

__all__ = ["MAX_DEVICES", "DeviceMesh"]


@dataclass(frozen=True, init=False)
class DeviceMesh:
    """Devices arranged on named axes, row-major: the last axis varies fastest.

    Args:
        axes: size per axis name, in order, for example `{"dp": 2, "tp": 4}`.

    Raises:
        LayoutError: an axis has no name or no size of at least one, or there are more than 1,024 devices.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, axes: Mapping[str, int]) -> None:
        _border.mapping("mesh", "axes", axes, "sizes")
        sizes: list[int] = []
        for name, size in axes.items():
            _border.text("mesh", "the name of an axis", name)
            sizes.append(_border.integer("mesh", f"the size of axis {name!r}", size, 1, MAX_DEVICES))
        if prod(sizes) > MAX_DEVICES:
            _border.refuse("mesh", f"a mesh has at most {MAX_DEVICES} devices", str(dict(axes)), "drop some")
        object.__setattr__(self, "names", tuple(axes))
        object.__setattr__(self, "sizes", tuple(sizes))

    @classmethod
    def parse(cls, text: str) -> DeviceMesh:
        """A mesh from `dp=2,tp=4`.

        Raises:
            LayoutError: the text is not of that form.
        """
        axes: dict[str, int] = {}
        for part in text.split(",") if isinstance(text, str) else [""]:
            name, _, size = part.strip().partition("=")
            if not (size.isascii() and size.isdigit() and len(size) < 8) or name in axes:
                _border.refuse("mesh", "a mesh reads axis=size,…", shown(text), "write for example dp=2,tp=2")
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
        """Position of `device` on `axis`; 0 for an axis the mesh does not have.

        Raises:
            LayoutError: there is no such device.
        """
        _border.integer("mesh", "a device", device, 0, self.num_devices - 1)
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
