"""Graph files: a graph definition as JSON, and the checks that a file passes before it is used."""

from tilewise.graph.file.content import Definition, decode_definition, encode_definition, read_content
from tilewise.graph.file.fit import require_definition

__all__ = ["Definition", "decode_definition", "encode_definition", "read_content", "require_definition"]
