"""Lowering one template for one class of devices: layers, each knowing the one before.

LocalView          what a device has of every tensor
SlotTable          what operands stand for, and temporaries
TemplateLowering   instructions, as ops and collectives ask for them
lower_variant      all that for every class, from data to data
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
