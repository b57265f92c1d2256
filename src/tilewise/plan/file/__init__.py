"""Plans and programs as bytes: records as rows, see `ir.file`."""

from tilewise.plan.file.content import decode_plan, digest_of, encode_plan, read_content

__all__ = ["decode_plan", "digest_of", "encode_plan", "read_content"]
