"""Reading files that any program may have written, and writing files so that they appear in one
step.
"""

__all__: list[str] = []
