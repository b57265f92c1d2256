"""The bind stage: the entries that instructions refer to, and the calls of each program."""

from tilewise.plan.bind.programs import bind, phases_of_programs

__all__ = ["bind", "phases_of_programs"]
