"""The bind stage: the entries that instructions refer to, and the calls of each program."""

from tilewise.plan.bind.programs import Bound, bind, phases_of_programs

__all__ = ["Bound", "bind", "phases_of_programs"]
