"""What a request says, checked, and what it means for a model: settings, conversations, how texts are read."""

__all__: list[str] = []
