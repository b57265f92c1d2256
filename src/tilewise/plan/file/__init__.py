"""Plan files (records as rows, see `ir.file`), and the checks that a file passes before it is used."""

from tilewise.plan.file.content import decode_plan, digest_of, encode_plan, read_content
from tilewise.plan.file.fit import require_fit

__all__ = ["decode_plan", "digest_of", "encode_plan", "read_content", "require_fit"]
