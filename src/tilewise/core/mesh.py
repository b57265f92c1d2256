"""`DeviceMesh`: devices on named axes. A mesh knows coordinates only; strategies decide what each
device computes.

`Axes` is a tuple of axis names, major first, for a dim or a device group. It may contain `MICRO`:
microbatches divide a dim in time as an axis divides it in space. No axis of a mesh has that name,
so in space it counts as one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tilewise.core.errors import LayoutError
from tilewise.core.validation import Validator, shown

_validate = Validator("core", LayoutError)
MAX_DEVICES = 1024
MICRO = "micro"

__all__ = ["MAX_DEVICES", "MICRO", "Axes", "DeviceMesh"]

Axes = tuple[str, ...]


@dataclass(frozen=True, init=False)
class DeviceMesh:
    """Devices on named axes, row-major: the last axis varies fastest.

    Args:
        axes: size per axis name, in order, for example `{"dp": 2, "tp": 4}`.

    Raises:
        LayoutError: an axis has no name, the name of time, or a size below one; or there are more
            than 1,024 devices.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, axes: Mapping[str, int]) -> None:
        sizes: list[int] = []
        for name, size in axes.items():
            _validate.text("mesh", "the name of an axis", name)
            if name == MICRO:
                _validate.invalid(
                    "mesh", f"{MICRO!r} is reserved for the axis of time", "an axis of devices", "rename it"
                )
            sizes.append(_validate.integer("mesh", f"the size of axis {name!r}", size, 1, MAX_DEVICES))
        if prod(sizes) > MAX_DEVICES:
            _validate.invalid(
                "mesh", f"a mesh may have at most {MAX_DEVICES} devices", str(dict(axes)), "drop some"
            )
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
                _validate.invalid(
                    "mesh",
                    "a mesh must have the form axis=size,…",
                    shown(text),
                    "write for example dp=2,tp=2",
                )
            axes[name] = int(size)
        return cls(axes)

    @cached_property
    def num_devices(self) -> int:
        """The product of all axis sizes."""
        return prod(self.sizes)

    @cached_property
    def _axes(self) -> dict[str, tuple[int, int]]:
        """Per axis, its size and its stride in devices."""
        return {
            name: (size, prod(self.sizes[i + 1 :]))
            for i, (name, size) in enumerate(zip(self.names, self.sizes))
        }

    def _existing(self, axes: tuple[str, ...]) -> list[tuple[int, int]]:
        """Size and stride of each of these axes that the mesh has."""
        sizes_and_strides = []
        for axis in axes:
            if not isinstance(axis, str):
                _validate.invalid("mesh", "axes must be names", shown(axes), 'pass "dp", "tp"')
            if axis in self._axes:
                sizes_and_strides.append(self._axes[axis])
        return sizes_and_strides

    def size(self, *axes: str) -> int:
        """Number of devices along the product of some axes; an axis that the mesh does not have
        counts as one.

        Raises:
            LayoutError: an axis is not a name.
        """
        return prod(size for size, _ in self._existing(axes))

    def coordinate(self, device: int, *axes: str) -> int:
        """Position of `device` on the product of some axes, the first of them major.

        Raises:
            LayoutError: there is no such device, or an axis is not a name.
        """
        _validate.integer("mesh", "a device", device, 0, self.num_devices - 1)
        position = 0
        for size, stride in self._existing(axes):
            position = position * size + device // stride % size
        return position

    def first(self, device: int, *axes: str) -> int:
        """The device with coordinate 0 on these axes that otherwise has the coordinates of
        `device`.

        Raises:
            LayoutError: there is no such device, or an axis is not a name.
        """
        _validate.integer("mesh", "a device", device, 0, self.num_devices - 1)
        return device - sum(device // stride % size * stride for size, stride in self._existing(axes))

    def group(self, device: int, *axes: str) -> list[int]:
        """The devices that differ from `device` only on these axes, including `device`, ordered by
        their `coordinate`.

        Raises:
            LayoutError: there is no such device, or an axis is not a name.
        """
        devices = [self.first(device, *axes)]
        for size, stride in self._existing(axes):
            devices = [at + i * stride for at in devices for i in range(size)]
        return devices

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.sizes)) or "one device"
