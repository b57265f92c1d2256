"""A plan as a file: records as rows, constants as bytes, and all that is asked of one before it is used."""

from tilewise.plan.file.content import decode_plan, digest_of, encode_plan, read_content
from tilewise.plan.file.fit import require_fit
from tilewise.plan.file.write_rows import Unwritable

__all__ = ["Unwritable", "decode_plan", "digest_of", "encode_plan", "read_content", "require_fit"]
