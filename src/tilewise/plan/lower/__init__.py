"""Lowers one template for one class of devices, in four layers. Each layer uses only those before
it.

LocalView          what a device has of every tensor SlotTable          what operands refer to, and
temporaries TemplateLowering   instructions, as ops and collectives emit them lower_variant
lowering for every class, as a pure function
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
