"""The command line. `tilewise.cli.main` holds the commands; nothing else is public."""

__all__: list[str] = []
