"""Validates requests and converts them for the model: settings, conversations, and how generated
text is read.
"""

__all__: list[str] = []
