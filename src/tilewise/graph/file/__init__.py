"""A defined graph as a file of JSON (records as rows by `ir.file`), and all that is asked of one before it is used."""

from tilewise.graph.file.content import Definition, decode_definition, encode_definition, read_content
from tilewise.graph.file.fit import require_definition

__all__ = ["Definition", "decode_definition", "encode_definition", "read_content", "require_definition"]
