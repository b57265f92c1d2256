"""Rules of the frozen data, checked between stages. `validate_*` returns nothing or raises.

`session.verify` is unrelated: it compares the results of a strategy with those of one device.
"""

from tilewise.ir.validate.bindings import Work, validate_bindings
from tilewise.ir.validate.graph import validate_graph
from tilewise.ir.validate.pending_reductions import validate_pending_reductions
from tilewise.ir.validate.program import validate_acknowledgements
from tilewise.ir.validate.values import Values, validate_values, values_of

__all__ = [
    "Values",
    "Work",
    "validate_acknowledgements",
    "validate_bindings",
    "validate_graph",
    "validate_pending_reductions",
    "validate_values",
    "values_of",
]
