"""The rules that frozen data keeps, checked between stages: `validate_*` returns nothing or raises.

*Verify* means something else here: comparing with one device (`session.verify`).
"""

from tilewise.ir.validate.graph import validate_graph
from tilewise.ir.validate.layout import contracted_axes, validate_layout, validate_microbatches
from tilewise.ir.validate.program import validate_acknowledgements

__all__ = [
    "contracted_axes",
    "validate_acknowledgements",
    "validate_graph",
    "validate_layout",
    "validate_microbatches",
]
