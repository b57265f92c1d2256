"""Reading files that any program may have written, and writing files in one step."""

__all__: list[str] = []
