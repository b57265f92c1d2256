"""Lowering one template for one class of devices: three layers, each knowing the one before.

LocalView          what a device has of every tensor
SlotTable          what operands stand for, and temporaries
TemplateLowering   instructions, as ops and collectives ask for them
"""

from tilewise.plan.lower.aliases import alias_roots
from tilewise.plan.lower.slots import flat_view
from tilewise.plan.lower.template import TemplateLowering, trailing_ones

__all__ = ["TemplateLowering", "alias_roots", "flat_view", "trailing_ones"]
