"""Lowers one template for one class of devices, in four layers. Each layer uses only those before
it.

A template is a block of instructions that is used many times, for example once per layer. Devices
of a class run the same instructions with other numbers.

- `LocalView`: which part of every tensor a device has.
- `SlotTable`: what operands refer to, and temporaries.
- `TemplateLowering`: instructions, as ops and collectives emit them.
- `lower_variant`: lowering for every class, as a pure function.
"""

from tilewise.plan.lower.aliases import alias_roots
from tilewise.plan.lower.slots import flat_view
from tilewise.plan.lower.template import TemplateLowering, trailing_ones
from tilewise.plan.lower.variant import LoweredVariant, LoweringTask, lower_variant, renumbered

__all__ = [
    "LoweredVariant",
    "LoweringTask",
    "TemplateLowering",
    "alias_roots",
    "flat_view",
    "lower_variant",
    "renumbered",
    "trailing_ones",
]
