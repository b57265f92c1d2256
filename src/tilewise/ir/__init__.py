"""The immutable data that the stages pass on (a graph, its layout, a tile program), and the
interface of ops.

docs/glossary.md explains the words; `ir.program` introduces those of a tile program.
"""

__all__: list[str] = []
