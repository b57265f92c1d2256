"""The lower stage: instructions for one device of each class. Each layer uses only those before it.

A template is a block of instructions that is used many times, for example once per layer. Devices
of a class run the same instructions with other numbers.

- `LocalView`: which part of every tensor a device has, what operands refer to, and temporaries.
- `TemplateLowering`: instructions, as ops and collectives emit them.
- `lower_variant`: lowering of one template for every class, as a pure function.
- `lower`: every template that a schedule uses.
"""

from tilewise.plan.lower.local_view import flat_view
from tilewise.plan.lower.template import TemplateLowering
from tilewise.plan.lower.variants import Use, Variant, Variants, lower

__all__ = ["TemplateLowering", "Use", "Variant", "Variants", "flat_view", "lower"]
