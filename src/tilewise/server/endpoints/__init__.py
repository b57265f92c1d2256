"""The endpoints: functions from a checked body to the body of an answer, or to the chunks of a
stream.
"""

__all__: list[str] = []
